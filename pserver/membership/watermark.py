"""A trainer's progress in one lane of a server, the outcomes of its steps, and their norms.

[Note: far beyond its history]  Norms are compared by their logarithms x, because they change by
factors.  The history is a mean m and a deviation s of x.

- The first ``WARM_UP`` pushes are not judged.  Then m is their median, and s 1.4826 times the
  median of their distances from it, so that a large one among them does not count.
- A push is an outlier where x - m > max(ln factor, ``DEVIATIONS`` s): it is ``factor`` times its
  history, and that is unusual here, too.
- Of every other push the history learns: with d = x - m, cut to +-max(3 s, 1), m grows by a d, and
  s^2 becomes (1 - a) (s^2 + a d^2), where a is ``WEIGHT`` (Finch: Incremental calculation of
  weighted mean and variance, 2009).  About the last 40 pushes count.
- Of an outlier it does not learn.  But ``RENEWED`` outliers in a row whose norms are within
  ``factor`` of one another are the new size of things: they become the history, as a warm-up does.

A moving mean and deviation of norms also finds the spikes that ZClip clips (Kumar et al.: ZClip,
2025), which takes the norms themselves, of all parameters together.  AutoClip clips above a
percentile of all norms so far (Seetharaman et al.: AutoClip, 2020), and so always clips some.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from pserver.finite import NonFiniteStep
from pserver.job_log.records import Applied
from pserver.transport.arrays import OutlierPush

# ---- norm history ----
#
# What the norms of one trainer's pushes of one variable have been, and whether one is far beyond.
# Pure arithmetic.


WARM_UP = 20
RENEWED = 10
WEIGHT = 0.05
DEVIATIONS = 6.0
NORMAL = 1.4826  # a normal distribution's deviation, in medians of distances from its median


class NormHistory:
    """The history of one trainer's pushes of one variable.  One caller at a time.

    Args:
        factor: the ratio to its history that makes an outlier, above 1.

    Example:
        >>> history = NormHistory(factor=100.0)
        >>> for _ in range(WARM_UP):
        ...     history.learn(2.0)
        >>> round(history.expected, 3), history.beyond(150.0), history.beyond(250.0)
        (2.0, False, True)
    """

    def __init__(self, factor: float) -> None:
        self._factor = math.log(factor)
        self._first: list[float] = []  # logarithms, until there are as many as the warm-up has
        self._outliers: list[float] = []  # likewise, in a row
        self._mean = self._variance = 0.0

    @property
    def expected(self) -> float:
        """The norm that the history expects; 1 in the warm-up."""
        return math.exp(self._mean)

    def beyond(self, norm: float) -> bool:
        """Whether a norm is far beyond the history; nothing is changed.

        Args:
            norm: finite, above 0.
        """
        least = max(self._factor, DEVIATIONS * math.sqrt(self._variance))
        return len(self._first) == WARM_UP and math.log(norm) - self._mean > least

    def learn(self, norm: float) -> None:
        """Adds a push that is not an outlier to the history.

        Args:
            norm: finite, above 0.
        """
        value = math.log(norm)
        self._outliers.clear()
        if len(self._first) < WARM_UP:
            self._first.append(value)
            if len(self._first) == WARM_UP:
                self._begin(self._first)
            return
        most = max(3 * math.sqrt(self._variance), 1.0)
        difference = min(max(value - self._mean, -most), most)
        self._mean += WEIGHT * difference
        self._variance = (1 - WEIGHT) * (self._variance + WEIGHT * difference**2)

    def pass_over(self, norm: float) -> None:
        """Notes an outlier: it is not added, unless it is the last of many similar ones.

        Args:
            norm: finite, above 0.
        """
        self._outliers = [*self._outliers, math.log(norm)][-RENEWED:]
        alike = max(self._outliers) - min(self._outliers) <= self._factor
        if len(self._outliers) == RENEWED and alike:
            self._begin(self._outliers)
            self._outliers = []

    def interrupt(self) -> None:
        """Ends a row of outliers by a push that is not one, and does not count."""
        self._outliers.clear()

    def _begin(self, values: Collection[float]) -> None:
        self._mean = median(values)
        deviation = NORMAL * median(abs(value - self._mean) for value in values)
        self._variance = deviation**2


# ---- outcome ----
#
# What a committed step has led to.


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a committed step.

    Attributes:
        version: updates of the lane up to this one, counted in steps.
        committed: how many trainers' gradients are in this update.
        overflow: a trainer saw a gradient that is not finite, so nothing was applied.
        refused: the server saw one, or an outlier, and nothing of this trainer's step was applied.
        nonfinite: the steps in this update in which a value is not finite.
        outliers: what in this update is far beyond its trainer's history.
    """

    version: int
    committed: int
    overflow: bool = False
    refused: bool = False
    nonfinite: tuple[NonFiniteStep, ...] = ()
    outliers: tuple[OutlierPush, ...] = ()


# ---- watermark ----
#
# The progress of a trainer in one lane of a server.


@dataclass(slots=True)
class Watermark:
    """A trainer's progress in one lane.  There is one for each trainer and lane, however many
    steps they take.

    [Note: exactly once]  A trainer numbers its steps from 1 and sends a step until the server has
    answered it.  A step that arrives is therefore the next one, the one in progress, or one that
    was applied: the server takes it, joins it, or only answers it.  Watermarks move together with
    the slices, before a pause can begin (decisions.py), and are saved with them.  A
    watermark belongs to one start of a trainer's process, its incarnation: another incarnation
    counts its steps from 1 again.

    Attributes:
        applied: the last step that was applied; 0 before the first.
        committed, overflow, refused, nonfinite, outliers: the outcome of that step, for when it is
            asked for again.
        version: the lane's version with that step; 0: not known, or all trainers step together.
        rows: of tables that all steps have changed until then, counted in each step.
        taking: the step in progress, from its COMMIT until it is applied.
        taking_rows: that this one changes.
        uploaded: the last upload that was loaded, by its request's number.
        stream: the number of the stream that counts: the latest one.
        end_stream: breaks that stream.
        loading: a thread copies a part of an upload into what the server holds, in :meth:`upload`.
        script_steps: of the process's script, in the steps that were applied, or whose record
            stands.
        histories: of norms, by parameter and table; never saved, so another start begins anew.
    """

    applied: int = 0
    committed: int = 0
    overflow: bool = False
    refused: bool = False
    nonfinite: tuple[NonFiniteStep, ...] = ()
    outliers: tuple[OutlierPush, ...] = ()
    version: int = 0
    rows: int = 0
    taking: int = 0
    taking_rows: int = 0
    uploaded: int = 0
    stream: int = 0
    end_stream: Callable[[], None] | None = None
    loading: bool = False
    script_steps: int = 0
    histories: dict[str, NormHistory] = field(default_factory=dict)

    @classmethod
    def of(cls, applied: Applied) -> Watermark:
        """The watermark of a trainer that has taken these steps in another process of the
        server.
        """
        return cls(applied=applied.step, rows=applied.rows)

    def begin(self, step: int, rows: int) -> bool:
        """Begins a step, which changes so many rows.

        Returns:
            Whether it was in progress before.
        """
        again, self.taking, self.taking_rows = self.taking == step, step, rows
        return again

    @contextmanager
    def upload(
        self, condition: threading.Condition, check: Callable[[], None], request: int, last: bool
    ) -> Iterator[bool]:
        """Marks, while the block runs, that the caller copies a part of an upload; later streams of
        the trainer wait until it ends.

        Args:
            condition: the job's.
            check: raises where the caller's stream does not count; called under the lock.
            request: the upload's number.
            last: with this part it is whole, and counts once.

        Yields:
            Whether to copy it; False: it was loaded before, and trainers may have stepped since.
        """
        with condition:
            check()
            self.loading = new = not 0 < request <= self.uploaded
        try:
            yield new
            if last and new:
                self.uploaded = max(self.uploaded, request)
        finally:
            with condition:
                self.loading = False
                condition.notify_all()

    def apply(
        self,
        committed: int,
        overflow: bool,
        refused: bool = False,
        nonfinite: tuple[NonFiniteStep, ...] = (),
        outliers: tuple[OutlierPush, ...] = (),
    ) -> None:
        """Ends the step in progress, which has been applied or refused."""
        self.applied, self.committed, self.overflow = self.taking, committed, overflow
        self.refused, self.nonfinite, self.outliers = refused, nonfinite, outliers
        self.rows, self.taking_rows = self.rows + self.taking_rows, 0

    def outcome(self, version: int) -> Outcome:
        """The outcome of the last applied step.

        Args:
            version: of the lane.
        """
        seen = self.nonfinite, self.outliers
        return Outcome(version, self.committed, self.overflow, self.refused, *seen)

    def saved(self) -> list[int]:
        """The part that a saved job keeps: applied, committed, overflow, rows."""
        return [self.applied, self.committed, int(self.overflow), self.rows]

    def restore(self, saved: Sequence[int]) -> None:
        """Takes over what :meth:`saved` returned, unless more has been applied since: a step's
        number is never used again.
        """
        applied, committed, overflow, *rows = saved
        if applied > self.applied:
            self.applied, self.committed, self.overflow = applied, committed, bool(overflow)
            self.rows = sum(rows)  # older saves do not say it
