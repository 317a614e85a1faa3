"""What a server measures of one job's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver.metrics.histograms import in_seconds, in_steps
from pserver.onlookers import onlooker
from pserver.tracing.spans import Fact, Spans, now

TEXT = 200  # letters of the names that a span has
Work = Callable[[tuple[str, ...]], None]
PUSHED = ("applied", "repeated", "refused")
STEPS = "the metrics of steps"


class JobSteps(Collector):
    """The histograms and counters of one job on one server.

    Any thread may add to them.

    Args:
        spans: where a trace has them; None: nowhere.

    Attributes:
        spans: see there.
        lanes: those of each lane, by index.
        partial_steps: of lost trainers: decided in a lane, and not in another one.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = spans or Spans()
        self.lanes: dict[int, LaneSteps] = {}
        self._step = in_seconds(
            "pserver_step_seconds",
            "From a step's first commit on this server until it is applied.",
            "lane",
        )
        self._wait = in_seconds(
            "pserver_wait_seconds",
            "Who holds up whom: for how long a step's first trainer waited for this one.",
            *("lane", "peer"),
        )
        self._update = in_seconds(
            "pserver_update_seconds",
            "The arithmetic of a step: merging, the optimizer, rows.",
            "lane",
        )
        self._staleness = in_steps(
            "pserver_staleness_steps",
            "Updates of others between two of the same trainer, in modes without rounds.",
            "lane",
        )
        self._pushes = Counter(
            "pserver_pushes",
            "Steps that are applied; repeated: had come before; refused: overflow, not finite, "
            "outliers.",
            ("lane", "result"),
            registry=None,
        )
        self._count_trainers()
        self._checkpoint = in_seconds("pserver_checkpoint_seconds", "A save of all that is here.")
        self._pause = in_seconds(
            "pserver_checkpoint_pause_seconds",
            "For how long no step ran, because of a save, a load or a shrink.",
        )

    def _count_trainers(self) -> None:
        """Counters of what is odd about trainers' steps."""
        self._nonfinite = Counter(
            "pserver_nonfinite",
            "Steps with a NaN or an infinity in them.",
            ("trainer",),
            registry=None,
        )
        self._outliers = Counter(
            "pserver_outlier_pushes",
            "Steps with a norm far beyond its history, where outlier_push looks for them.",
            ("trainer",),
            registry=None,
        )
        self.partial_steps = 0
        self._partial = Counter(
            "pserver_partial_steps",
            "Steps of lost trainers that count in lanes of one mode, or in averages, only.",
            registry=None,
        )

    def lane(self, index: int) -> LaneSteps:
        """Those of one lane."""
        measured = self._step, self._wait, self._update, self._staleness, self._pushes
        self.lanes[index] = LaneSteps(index, self.spans, *measured)
        return self.lanes[index]

    @onlooker(STEPS)
    def nonfinite(self, trainer: int) -> None:
        """A trainer has committed a step that is not finite."""
        self._nonfinite.labels(str(trainer)).inc()

    @onlooker(STEPS)
    def outlier(self, trainer: int) -> None:
        """A trainer has committed a step with a norm far beyond its history."""
        self._outliers.labels(str(trainer)).inc()

    def partial(self, steps: int) -> None:
        """A lost trainer has left so many steps that are decided in a lane, and not in another."""
        self.partial_steps += steps
        self._count_partial(steps)

    @onlooker(STEPS)
    def _count_partial(self, steps: int) -> None:
        self._partial.inc(steps)

    @onlooker(STEPS)
    def saved(self, seconds: float) -> None:
        """A save of all that is here took so long."""
        self._checkpoint.observe(seconds)

    @onlooker(STEPS)
    def paused(self, seconds: float) -> None:
        """No step ran for so long, because of a save, a load or a shrink."""
        self._pause.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        for each in (
            *(self._step, self._wait, self._update, self._staleness, self._pushes),
            *(self._nonfinite, self._outliers, self._partial, self._checkpoint, self._pause),
        ):
            yield from each.collect()


@dataclass(slots=True)
class LaneTotals:
    """Running totals of one lane, from the job's start.

    Attributes:
        steps, step_seconds: from a step's first commit until it is applied.
        updates, update_seconds: the arithmetic.
        wait_seconds: by trainer: for how long a step's first trainer waited for this one.
        stale_pushes, stale_steps, most_stale_steps: pushes whose staleness was measured, its sum in
            steps, and the most.
    """

    steps: int = 0
    step_seconds: float = 0.0
    updates: int = 0
    update_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    stale_pushes: int = 0
    stale_steps: int = 0
    most_stale_steps: int = 0


class LaneSteps:
    """What a server measures of one lane's steps.  Times are of :func:`now`.  The caller holds the
    job's lock.

    Args:
        lane: its index.
        spans: where a trace has them.
        step, wait, update, staleness, pushes: of the job.

    Attributes:
        totals: for ``pserver status``.
    """

    def __init__(
        self,
        lane: int,
        spans: Spans,
        step: Histogram,
        wait: Histogram,
        update: Histogram,
        staleness: Histogram,
        pushes: Counter,
    ) -> None:
        self.totals = LaneTotals()
        self._lane, self._wait = str(lane), wait
        self._index, self._spans = lane, spans
        self._waits: dict[int, Histogram] = {}  # by trainer
        self._step, self._update = step.labels(self._lane), update.labels(self._lane)
        self._staleness = staleness.labels(self._lane)
        self._pushes = {result: pushes.labels(self._lane, result) for result in PUSHED}

    @onlooker(STEPS)
    def arrived(self, trainer: int, after: float) -> None:
        """A trainer's commit has come, some seconds after the step's first."""
        if trainer not in self._waits:
            self._waits[trainer] = self._wait.labels(self._lane, f"trainer {trainer}")
        self._waits[trainer].observe(after)
        waited = self.totals.wait_seconds
        waited[trainer] = waited.get(trainer, 0.0) + after

    def traced(self, name: str, work: Work, version: int) -> Work:
        """Work on batches, each of which is a span where a trace is under way.

        Args:
            name: of the spans.
            version: of the lane, which this work makes.
        """
        if not self._spans.on:
            return work

        def timed(batch: tuple[str, ...]) -> None:
            began = now()
            try:
                work(batch)
            finally:
                facts: dict[str, Fact] = {"lane": self._index, "version": version}
                self._spans.add(name, began, now(), variables=", ".join(batch)[:TEXT], **facts)

        return timed

    @onlooker(STEPS)
    def waited(self, trainer: int, step: int, since: float) -> None:
        """A trainer's step has waited for others since then; since 0 nobody has asked."""
        if since:
            facts: dict[str, Fact] = {"lane": self._index, "trainer": trainer, "step": step}
            self._spans.add("wait", since, now(), **facts)

    @property
    def traced_since(self) -> float:
        """Now, where a trace is under way; otherwise 0."""
        return now() if self._spans.on else 0.0

    @onlooker(STEPS)
    def repeated(self) -> None:
        """A step has come again that was applied before, or is in progress."""
        self._pushes["repeated"].inc()

    @onlooker(STEPS)
    def pushed(self, refused: bool) -> None:
        """A trainer's step is applied, or is not to be."""
        self._pushes["refused" if refused else "applied"].inc()

    @onlooker(STEPS)
    def applied(self, since: float) -> None:
        """A step is applied whose first commit came at ``since``."""
        seconds = now() - since
        self._step.observe(seconds)
        self.totals.steps += 1
        self.totals.step_seconds += seconds

    @onlooker(STEPS)
    def updated(self, since: float) -> None:
        """An update that began at ``since`` has ended."""
        seconds = now() - since
        self._update.observe(seconds)
        self.totals.updates += 1
        self.totals.update_seconds += seconds

    @onlooker(STEPS)
    def stale(self, steps: int) -> None:
        """So many updates of others lie between two of one trainer."""
        self._staleness.observe(steps)
        self.totals.stale_pushes += 1
        self.totals.stale_steps += steps
        self.totals.most_stale_steps = max(self.totals.most_stale_steps, steps)
