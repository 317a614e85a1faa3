"""The metrics of a trainer: measurements of its steps, and counters that other parts keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver.client.client import Client, Report, TrainerLaneTotals
from pserver.config import metrics_place
from pserver.onlookers import onlooker
from pserver.security.access import Access
from pserver.telemetry.logs import JSON_LINES, write_json
from pserver.telemetry.memory import resident_bytes
from pserver.telemetry.metrics import (
    Exposition,
    Labelled,
    build_info,
    current,
    in_seconds,
    in_words,
    job_labels,
    public_name,
    versions,
)
from pserver.telemetry.trace import SPANS, now
from trainer.environment.environment import LOOPBACK, Connection
from trainer.senders.pipeline import LaneSender
from transpiler.plan.plan import Deployment

STEPS = "the metrics of steps"


@dataclass(slots=True)
class _LaneSteps:
    """What the steps of one lane add to.

    Attributes:
        closed: the time of the last step.
    """

    step: Histogram
    blocked: Counter
    totals: TrainerLaneTotals
    closed: float


class _Blocked:
    """Counts the time inside as blocked.

    Args:
        lanes: that wait.
        traced: the facts of the wait's span; None: it has none.
    """

    def __init__(
        self, steps: TrainerSteps, lanes: Iterable[int], traced: Mapping[str, int] | None = None
    ) -> None:
        self._steps, self._lanes, self._traced = steps, lanes, traced
        self._began = 0.0

    def __enter__(self) -> None:
        self._steps.waiting = True
        self._began = now()

    def __exit__(self, *error: object) -> None:
        self._steps.waiting = False
        self._steps.waited(self._lanes, now() - self._began)
        if error[0] is None and self._traced is not None and SPANS.on:
            SPANS.add("wait", self._began, now(), **self._traced)


class TrainerSteps(Collector):
    """A trainer's measurements of its steps.

    The script's thread closes and finishes steps; the connections' threads receive answers.

    Attributes:
        totals: of each lane, by index, for the reports to servers.
        saves: successful saves of the whole job.
        waiting: whether a wait is under way whose time counts as blocked.
    """

    def __init__(self) -> None:
        self._step = in_seconds(
            "pserver_step_seconds", "From one step's close to the next one's.", "lane"
        )
        self._wait = in_seconds(
            "pserver_wait_seconds",
            "From a message's commit until this server has answered it.",
            *("lane", "peer"),
        )
        self._blocked = Counter(
            "pserver_blocked_seconds",
            "For how long the script's thread waited in steps.",
            ("lane",),
            registry=None,
        )
        self._checkpoint = in_seconds("pserver_checkpoint_seconds", "A save of the whole job.")
        self.totals: dict[int, TrainerLaneTotals] = {}
        self.saves, self._saved = 0, 0.0
        self._lanes: dict[int, _LaneSteps] = {}  # that have closed a step
        self.waiting = False

    @onlooker(STEPS)
    def closed(self, lane: int) -> None:
        """Notes that a step of a lane is complete."""
        closed = now()
        if (own := self._lanes.get(lane)) is None:
            step, blocked = self._step.labels(str(lane)), self._blocked.labels(str(lane))
            own = self._lanes[lane] = _LaneSteps(step, blocked, self.lane(lane), closed)
        else:
            own.step.observe(closed - own.closed)
            own.totals.step_seconds += closed - own.closed
            own.closed = closed
        own.totals.steps += 1

    def blocked(self, lane: int) -> AbstractContextManager[None]:
        """Counts the time inside, in which a lane's step is finished, as blocked."""
        return _Blocked(self, (lane,), {"lane": lane})

    def waits(self) -> AbstractContextManager[None]:
        """Counts the time inside, in which the script waits for other trainers in a step, as
        blocked in every lane, unless it is counted already.
        """
        return nullcontext() if self.waiting else _Blocked(self, tuple(self._lanes))

    @onlooker(STEPS)
    def waited(self, lanes: Iterable[int], seconds: float) -> None:
        """Counts time as blocked in these lanes."""
        for lane in lanes:
            own = self._lanes[lane]
            own.blocked.inc(seconds)
            own.totals.blocked_seconds += seconds

    def lane(self, index: int) -> TrainerLaneTotals:
        """The totals of one lane."""
        return self.totals.setdefault(index, TrainerLaneTotals())

    def answered(self, lane: int, server: int) -> Callable[[float], None]:
        """A function that receives the seconds that each answer of a server took."""
        histogram, totals = self._wait.labels(str(lane), f"server {server}"), self.lane(lane)
        return partial(self._answered, histogram, totals, server)

    @onlooker(STEPS)
    def _answered(
        self, histogram: Histogram, totals: TrainerLaneTotals, server: int, seconds: float
    ) -> None:
        histogram.observe(seconds)
        totals.answered(server, seconds)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Measures the save of the whole job that happens inside."""
        began = now()
        try:
            yield
        finally:
            self._saved_in(now() - began)
        self.saves, self._saved = self.saves + 1, time.monotonic()

    @onlooker(STEPS)
    def _saved_in(self, seconds: float) -> None:
        self._checkpoint.observe(seconds)

    @property
    def since_save(self) -> float:
        """Seconds since the end of the last save of the whole job; 0 before the first."""
        return time.monotonic() - self._saved if self.saves else 0.0

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        for each in (self._step, self._wait, self._blocked, self._checkpoint):
            yield from each.collect()


class TrainerMetrics(Collector):
    """The metrics page of a trainer.  It is served if PSERVER_METRICS is set.

    Args:
        deployment: the plan, and this trainer's number.
        connection: the page's address, and the job's name.
        lanes: the senders, by lane.
        incarnation: of this trainer.

    Attributes:
        steps: the measurements of steps.
        run: names this run of the job; "" before a server has sent it.
        more: collectors of other parts of the trainer.
        said: gives what the script has reported of its training: samples, and values by name.
        position: gives the position in the data: see :class:`Report`.
        settings: gives the script's settings in words.
    """

    def __init__(
        self,
        deployment: Deployment,
        connection: Connection,
        lanes: Sequence[LaneSender],
        incarnation: str,
    ) -> None:
        self._fingerprint, self._trainer = deployment.plan.fingerprint(), deployment.trainer_id
        self._connection, self._lanes = connection, lanes
        self._incarnation = public_name(incarnation)
        self._clients: Sequence[Client] = ()
        self._process = ProcessCollector(registry=None)
        self._exposition: Exposition | None = None
        self.steps = TrainerSteps()
        self.run = ""
        self.more: list[Collector] = []
        self.said: Callable[[], tuple[int, Mapping[str, float]]] = lambda: (0, {})
        self.position: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        self.settings: Callable[[], Mapping[str, str]] = dict
        self.wrong_lines: Callable[[], int] = int

    def open(self, clients: Sequence[Client]) -> None:
        """Starts to serve the page, if one is wanted.

        Raises:
            OSError: it cannot listen at the address.
        """
        self._clients = clients
        for client in clients:
            client.reported = self.report
        given = self._connection
        JSON_LINES.labels = self._labels
        if given.log_json:
            write_json()
        if not given.metrics:
            return
        place = metrics_place(
            "PSERVER_METRICS", given.metrics, LOOPBACK, given.keys, given.insecure
        )
        keys = Access.of(None, given.keys, "trainer").keys
        page = Labelled(self._labels, lambda: (self, self._process, self.steps, *self.more))
        self._exposition = Exposition(*place, page, keys)

    def joined(self, run: str) -> None:
        """Called when this trainer has joined every server."""
        self.run = run
        for client in self._clients:
            for lane, channel in enumerate(client.channels):
                channel.heard = self.steps.answered(lane, client.index)
                channel.track = f"to server {client.index}, lane {lane}"
                channel.facts = {"server": client.index, "lane": lane}
            if client.tables is not None:
                client.tables.track = f"to server {client.index}, tables"
                client.tables.facts = {"server": client.index}

    @onlooker("the report to the servers", otherwise=Report)
    def report(self) -> Report:
        """The report to servers with each heartbeat."""
        samples, values = self.said()
        lanes = [self.steps.lane(index) for index in range(len(self._lanes))]
        saves, since = self.steps.saves, self.steps.since_save
        said = samples, values, resident_bytes(), lanes
        settings = {"versions": in_words(versions(torch.__version__)), **self.settings()}
        return Report(*said, saves, since, self.position(), settings, self.wrong_lines())

    def close(self) -> None:
        """Ends the page; harmless when called twice."""
        if self._exposition is not None:
            self._exposition.close()

    def _labels(self) -> Mapping[str, str]:
        process = f"trainer {self._trainer}"
        job, run = self._connection.job, self.run
        return job_labels(job, self._fingerprint, run, self._incarnation, process)

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        yield build_info(torch.__version__)
        sent, reconnects = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
        for client in self._clients:
            channels = client.every_channel
            for direction, count in (
                ("in", sum(channel.bytes_in for channel in channels)),
                ("out", sum(channel.bytes_out for channel in channels)),
            ):
                key = (direction, client.transport)
                sent[key] = sent.get(key, 0.0) + count
            broken = sum(channel.reconnects for channel in channels)
            reconnects[f"server {client.index}",] = float(broken)
        yield current(
            "pserver_bytes_total",
            "Payload of tensors, from (in) and to (out) servers.",
            sent,
            *("direction", "transport"),
        )
        yield current(
            "pserver_reconnects_total",
            "Streams that were opened in place of a broken one.",
            reconnects,
            "peer",
        )
        yield current(
            "pserver_queue_steps",
            "Steps that are closed and not answered yet.",
            {
                (str(index),): lane.metrics().get("steps_queued", 0.0)
                for index, lane in enumerate(self._lanes)
            },
            "lane",
        )
