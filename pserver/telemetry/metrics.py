"""Metrics for Prometheus: their buckets and labels, those of a job's steps, and the page that it
reads.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from platform import python_version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pserver import __version__
from pserver.errors import Untrusted
from pserver.half_open import HalfOpen
from pserver.onlookers import onlooker
from pserver.security import keys as tls
from pserver.security.bearer import ROLES
from pserver.security.keys import Keys
from pserver.telemetry.counts import COUNTS, TrainerCounts
from pserver.telemetry.logs import LimitedLog
from pserver.telemetry.trace import Fact, Spans, now

# ---- exposition ----
#
# GET /metrics: the page that Prometheus reads.


log = logging.getLogger(__name__)

CONNECTION_SECONDS = 10.0  # for a connection, from its handshake to the end of its answer
MOST_OPEN = 16  # connections; of more an older one is closed


class Exposition:
    """Answers GET /metrics, in threads of its own.

    It admits every peer, as the process's other ports do without keys; with keys it speaks TLS 1.3
    and requires a certificate of the cluster, of any role.

    Args:
        host, port: where it listens; port 0 is any free one.
        collector: asked for each page.
        keys: this host's; None: plain HTTP.

    Attributes:
        port: the one that it listens on.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(self, host: str, port: int, collector: Collector, keys: Keys | None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server = _Server(host, port, registry, keys)
        except OSError as error:
            raise OSError(f"metrics at {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        scheme = "http" if keys is None else "https"
        log.info("metrics at %s://%s:%d/metrics", scheme, host, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; harmless when called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """An HTTP server with a thread for each of its few connections: a new one is served, and
    displaces an older one.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MOST_OPEN

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, keys: Keys | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._keys, self._log = keys, LimitedLog(log)
        self._open = HalfOpen(MOST_OPEN, CONNECTION_SECONDS)
        self._lock = threading.Lock()  # guards the one below
        self._begun: dict[Any, tuple[int, socket.socket]] = {}  # by the peer's address and port
        super().__init__((host, port), _handler(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a connection's thread."""
        handle = request.dup()  # TLS puts another socket in the place of this one
        number = self._open.begin(str(client_address[0]), partial(_end, handle))
        with self._lock:
            self._begun[client_address] = number, handle
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a request, in the connection's thread."""
        secured = request
        try:
            request.settimeout(CONNECTION_SECONDS)
            if self._keys is not None:
                secured, _ = tls.accept_for_http(request, self._keys, *ROLES)
            super().finish_request(secured, client_address)
        except (Untrusted, OSError, ValueError) as error:
            text = f"a request for metrics from {client_address[0]}: {error}"
            self._log.log("metrics", text, logging.INFO)
        finally:
            with self._lock:
                number, handle = self._begun.pop(client_address)
            self._open.over(number)
            handle.close()
            self.shutdown_request(secured)

    def service_actions(self) -> None:
        """Ends connections that take too long; called a few times a second."""
        self._open.end_late()


def _end(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def _handler(registry: CollectorRegistry) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        """GET /metrics, and nothing else."""

        timeout = CONNECTION_SECONDS

        def do_GET(self) -> None:
            """The page."""
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            super().do_GET()

    Handler.registry = registry
    return Handler


# ---- histograms ----
#
# Histograms, with the buckets that all processes share, so that they can be added up.


SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
STEPS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


def in_seconds(name: str, documentation: str, *labels: str) -> Histogram:
    """A histogram of durations from half a millisecond to two minutes."""
    return Histogram(name, documentation, labels, registry=None, buckets=SECONDS_BUCKETS)


def in_steps(name: str, documentation: str, *labels: str) -> Histogram:
    """A histogram of numbers of steps."""
    return Histogram(name, documentation, labels, registry=None, buckets=STEPS_BUCKETS)


# ---- job steps ----
#
# What a server measures of one job's steps.


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
        trainers: the counts of each trainer.
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
            "How long a step's first trainer waited for this one: which trainers delay others.",
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
        self.trainers = TrainerCounts()
        self._checkpoint = in_seconds("pserver_checkpoint_seconds", "A save of all that is here.")
        self._pause = in_seconds(
            "pserver_checkpoint_pause_seconds",
            "For how long no step ran, because of a save, a load or a shrink.",
        )

    def lane(self, index: int) -> LaneSteps:
        """The measurements of one lane."""
        measured = self._step, self._wait, self._update, self._staleness, self._pushes
        self.lanes[index] = LaneSteps(index, self.spans, *measured)
        return self.lanes[index]

    @onlooker(STEPS)
    def saved(self, seconds: float) -> None:
        """Adds the duration of a save of all that is here."""
        self._checkpoint.observe(seconds)

    @onlooker(STEPS)
    def paused(self, seconds: float) -> None:
        """Adds the seconds in which no step ran, because of a save, a load or a shrink."""
        self._pause.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        for each in (
            *(self._step, self._wait, self._update, self._staleness, self._pushes),
            *(self._checkpoint, self._pause),
        ):
            yield from each.collect()
        known = self.trainers.all()
        for name, count in COUNTS.items():
            values: dict[tuple[str, ...], float] = {
                (str(trainer),): float(each[name]) for trainer, each in known.items()
            }
            yield current(f"{count.metric}_total", count.sentence, values, "trainer")


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
    """A server's measurements of one lane's steps.  Times are of :func:`now`.  The caller holds the
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
        """Notes that a trainer's commit has arrived, some seconds after the step's first."""
        if trainer not in self._waits:
            self._waits[trainer] = self._wait.labels(self._lane, f"trainer {trainer}")
        self._waits[trainer].observe(after)
        waited = self.totals.wait_seconds
        waited[trainer] = waited.get(trainer, 0.0) + after

    def traced(self, name: str, work: Work, version: int) -> Work:
        """Wraps work on batches, each of which is a span where a trace is under way.

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
        """Adds a span for a trainer's step that has waited for others since then; 0: there is no
        trace.
        """
        if since:
            facts: dict[str, Fact] = {"lane": self._index, "trainer": trainer, "step": step}
            self._spans.add("wait", since, now(), **facts)

    @property
    def traced_since(self) -> float:
        """The present time, where a trace is under way; otherwise 0."""
        return now() if self._spans.on else 0.0

    @onlooker(STEPS)
    def repeated(self) -> None:
        """Counts a repeated step, which was applied before or is in progress."""
        self._pushes["repeated"].inc()

    @onlooker(STEPS)
    def pushed(self, refused: bool) -> None:
        """Counts a trainer's step that is applied, or is not to be."""
        self._pushes["refused" if refused else "applied"].inc()

    @onlooker(STEPS)
    def applied(self, since: float) -> None:
        """Adds the duration of an applied step, whose first commit arrived at ``since``."""
        seconds = now() - since
        self._step.observe(seconds)
        self.totals.steps += 1
        self.totals.step_seconds += seconds

    @onlooker(STEPS)
    def updated(self, since: float) -> None:
        """Adds the duration of an update that began at ``since``."""
        seconds = now() - since
        self._update.observe(seconds)
        self.totals.updates += 1
        self.totals.update_seconds += seconds

    @onlooker(STEPS)
    def stale(self, steps: int) -> None:
        """Adds the number of others' updates between two of one trainer."""
        self._staleness.observe(steps)
        self.totals.stale_pushes += 1
        self.totals.stale_steps += steps
        self.totals.most_stale_steps = max(self.totals.most_stale_steps, steps)


# ---- labels ----
#
# The constant labels of a process: which job, which run of it, which process.


SHORT = 12  # digits of a fingerprint that name a job


class Labelled(Collector):
    """All metrics of some collectors, with more labels.

    Args:
        labels: called for each page.
        collectors: called for each page.
    """

    def __init__(
        self,
        labels: Callable[[], Mapping[str, str]],
        collectors: Callable[[], Iterable[Collector]],
    ) -> None:
        self._labels, self._collectors = labels, collectors

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`.  The times of first counts are left out."""
        labels = self._labels()
        for collector in self._collectors():
            for metric in collector.collect():
                metric.samples = [
                    sample._replace(labels={**labels, **sample.labels})
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield metric


def public_name(incarnation: str) -> str:
    """A public name of one start of a process, which does not reveal the secret that its calls
    repeat.
    """
    return hashlib.sha256(incarnation.encode()).hexdigest()[:SHORT]


def job_labels(
    name: str, fingerprint: str, run: str, incarnation: str, process: str
) -> dict[str, str]:
    """The labels of all metrics of a process.

    Args:
        name: the job's, of PSERVER_JOB or ``--job``; "": the first digits of its plan's
            fingerprint.
        run: the same on all processes that have joined one another.
        incarnation: of this process.
        process: "server 0", "trainer 1".

    Example:
        >>> job_labels("", "0123456789abcdef", "r", "i", "server 0")["job"]
        '0123456789ab'
    """
    return {
        "job": name or fingerprint[:SHORT],
        "run": run,
        "incarnation": incarnation,
        "process": process,
    }


def versions(torch: str) -> dict[str, str]:
    """The versions that a process runs, by name.

    Args:
        torch: its version.
    """
    return {"pserver": __version__, "python": python_version(), "torch": torch}


def in_words(versions: Mapping[str, str]) -> str:
    """Versions as a status has them.

    Example:
        >>> in_words({"pserver": "0.2.0", "python": "3.11.7"})
        'pserver 0.2.0, python 3.11.7'
    """
    return ", ".join(f"{name} {each}" for name, each in versions.items())


def build_info(torch: str) -> Metric:
    """The versions that a process runs.

    Args:
        torch: its version.
    """
    return current(
        "pserver_build_info",
        "Versions; always 1.",
        {tuple(versions(torch).values()): 1.0},
        *("pserver", "python", "torch"),
    )


def current(
    name: str, documentation: str, values: Mapping[tuple[str, ...], float], *labels: str
) -> Metric:
    """A gauge, or with a name that ends with "_total" a counter, as it is now.

    Args:
        values: by the values of the labels.

    Example:
        >>> [sample.value for sample in current("rows", "", {("emb",): 3.0}, "table").samples]
        [3.0]
    """
    counted = name.endswith("_total")
    kind = "counter" if counted else "gauge"
    metric = Metric(name.removesuffix("_total"), documentation, kind)
    metric.samples = [
        Sample(name, dict(zip(labels, key, strict=True)), value) for key, value in values.items()
    ]
    return metric
