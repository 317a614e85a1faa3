"""How far a trainer has come in one lane of a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pserver.finite import NonFiniteStep
from pserver.job.norm_history import NormHistory
from pserver.job.outcome import Outcome
from pserver.job_log.standing import Applied
from pserver.transport.arrays import OutlierPush


@dataclass(slots=True)
class Watermark:
    """How far a trainer has come in one lane.  There is one for each trainer and lane, however many
    steps they take.

    [Note: exactly once]  A trainer numbers its steps from 1 and sends a step until the server has
    answered it.  A step that arrives is therefore the next one, the one in progress, or one that
    was applied: the server takes it, joins it, or only answers it.  Watermarks move together with
    the slices, before a pause can begin (quiesce.py), and are saved with them.  A
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
        """Of a trainer that has taken these steps in another process of the server."""
        return cls(applied=applied.step, rows=applied.rows)

    def take(self, step: int, rows: int) -> bool:
        """A step is in progress, which changes so many rows.

        Returns:
            Whether it was before.
        """
        again, self.taking, self.taking_rows = self.taking == step, step, rows
        return again

    @contextmanager
    def upload(
        self, condition: threading.Condition, check: Callable[[], None], request: int, last: bool
    ) -> Iterator[bool]:
        """While it lasts the caller copies a part of an upload, and no later stream of the trainer
        goes on; however it ends, they do afterwards.

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
        """The step in progress has been applied, or refused."""
        self.applied, self.committed, self.overflow = self.taking, committed, overflow
        self.refused, self.nonfinite, self.outliers = refused, nonfinite, outliers
        self.rows, self.taking_rows = self.rows + self.taking_rows, 0

    def outcome(self, version: int) -> Outcome:
        """Of the last step that was applied.

        Args:
            version: of the lane.
        """
        seen = self.nonfinite, self.outliers
        return Outcome(version, self.committed, self.overflow, self.refused, *seen)

    def saved(self) -> list[int]:
        """What a saved job keeps of it: applied, committed, overflow, rows."""
        return [self.applied, self.committed, int(self.overflow), self.rows]

    def restore(self, saved: Sequence[int]) -> None:
        """Takes over what :meth:`saved` returned, unless more has been applied since: a step's
        number is never used again.
        """
        applied, committed, overflow, *rows = saved
        if applied > self.applied:
            self.applied, self.committed, self.overflow = applied, committed, bool(overflow)
            self.rows = sum(rows)  # older saves do not say it
