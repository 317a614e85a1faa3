"""Loggers: where a job's values go besides its own displays, such as W&B, MLflow or a CSV file.

[Note: loggers]  A logger is anything with ``log(values, step)``.  ``fleet.report`` puts its values
into a queue, and a thread gives them to every logger, so that a slow one costs no step.  The values
are those of the leader among the trainers: one run for a job.  Where the leader is lost, its
successor opens loggers of its own.  A logger that raises is closed, which is said once and counted.
The files of TensorBoard are a logger of each trainer, in a folder of its own.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver.errors import PartialPlan
from pserver.extras import extra
from pserver.onlookers import onlooker
from pserver.telemetry.metrics import current
from trainer.environment.environment import Connection, Role
from trainer.job.job import Job

log = logging.getLogger(__name__)

QUEUED = 10_000  # reports that wait for loggers; further ones are dropped
METRICS_SECONDS = 10.0  # between two rows of the job's metrics
CLOSE_SECONDS = 10.0  # for which the end of a job waits for its loggers
FLUSH_SECONDS = 5  # until others can read TensorBoard's files
ENDS = ("finish", "end", "close")  # methods that end a run, of which a logger may have one


class Logger(Protocol):
    """A place for values."""

    def log(self, values: dict[str, float], step: int, /) -> object:
        """Takes values by name, at a step of the job."""


Given = Logger | Callable[[], Logger]


class TensorBoard:
    """The event files of one trainer, in a folder of its own.

    Args:
        folder: of the job; the trainer's folder in it is ``trainer-N``.
        trainer_id: N.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str, trainer_id: int) -> None:
        with extra("tensorboard", f"PSERVER_TENSORBOARD={folder} needs TensorBoard"):
            with warnings.catch_warnings():  # of the packages that it imports
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        path = str(Path(folder) / f"trainer-{trainer_id}")
        self._writer = SummaryWriter(path, flush_secs=FLUSH_SECONDS)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes values at a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the rest."""
        self._writer.close()


class _Open:
    """A logger in use.

    Args:
        given: the logger, or a function that opens it.
        everywhere: whether each trainer has one, and not only the leader; it is no script's, and
            ends here.
        opened, failed: called when it has been opened, and when it has failed.
    """

    def __init__(
        self,
        given: Given,
        everywhere: bool,
        opened: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.everywhere = everywhere
        self._given, self._opened, self._failed = given, opened, failed
        self._opens = isinstance(given, type) or not hasattr(given, "log")
        self._logger: Any = None if self._opens else given

    @onlooker("a logger", end=lambda logger: logger._fail())
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Gives the logger values, and opens it before the first."""
        with _contained():
            if self._logger is None:
                self._logger = self._given()  # type: ignore[operator]  # by _opens
                if not callable(getattr(self._logger, "log", None)):
                    got, self._logger = self._logger, None
                    raise TypeError(f"expected a logger with log(values, step), got {got!r}")
                self._opened()
            self._logger.log(dict(values), step)

    @onlooker("a logger")
    def close(self) -> None:
        """Ends a logger of ours; one that the script has opened stays open."""
        self._end()

    def _fail(self) -> None:
        self._failed()
        self._end()

    def _end(self) -> None:
        logger, self._logger = self._logger, None
        end = next((name for name in ENDS if hasattr(logger, name)), None)
        if (self._opens or self.everywhere) and end is not None:
            with _contained():
                getattr(logger, end)()


@contextmanager
def _contained() -> Iterator[None]:
    """Makes an error of what would end the thread, and with it all other loggers."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # such as sys.exit()
        raise RuntimeError(f"it raised {error!r}") from error


class Loggers(Collector):
    """The loggers of one trainer.  The script's thread adds values, a thread of its own writes
    them.

    Args:
        job: of this trainer.
        given: the script's loggers.
        tensorboard: the logger of this trainer that is no script's; None: there is none.
        every_seconds: between two rows of the job's metrics.
    """

    def __init__(
        self,
        job: Job,
        given: Sequence[Given],
        tensorboard: TensorBoard | None = None,
        every_seconds: float = METRICS_SECONDS,
    ) -> None:
        self._job, self._every = job, every_seconds
        self.failures = 0
        each_does = self._close_first, self._failed
        self._loggers = [_Open(each, False, *each_does) for each in given]
        if tensorboard is not None:
            self._loggers.append(_Open(tensorboard, True, *each_does))
        self._tensorboard = tensorboard
        self._led = job.role.trainer_id == 0  # whether this trainer was the leader when last asked
        self._before = time.monotonic(), 0.0, 0  # of the last row of metrics: steps and samples
        # values, and their step; None: the end
        self._queue: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(QUEUED)
        self._dropped = self._closed = False
        self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
        self._thread.start()
        self._close_first()

    def add(self, values: Mapping[str, float]) -> None:
        """Queues the values of a report, at the job's present step."""
        try:
            self._queue.put_nowait((values, self._step()))
        except queue.Full:
            if not self._dropped:
                log.warning("loggers: %d reports wait, further ones are dropped", QUEUED)
            self._dropped = True

    def close(self) -> None:
        """Writes everything that was reported, and ends the loggers that were opened here; harmless
        when called twice.
        """
        atexit.unregister(self.close)
        if self._closed or not self._thread.is_alive():
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            log.warning(
                "loggers: not done within %.0f seconds, and left: their last values may be missing",
                CLOSE_SECONDS,
            )

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        failures: dict[tuple[str, ...], float] = {(): float(self.failures)}
        yield current(
            "pserver_loggers_failed_total", "Loggers that were closed after an error.", failures
        )

    # ---- the thread ----

    def _run(self) -> None:
        due, written = time.monotonic() + self._every, 0
        while True:
            if time.monotonic() >= due:
                due, present = time.monotonic() + self._every, self._step()
                # steps do not decrease: a report that waits has one between these two
                written = present if self._queue.empty() else written
                self._write(self._metrics(), written, metrics=True)
            try:
                found = self._queue.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if found is None:
                break
            values, written = found
            self._write(values, written)
        self._write(self._metrics(), self._step(), metrics=True)
        for each in self._loggers:
            each.close()

    def _write(self, values: Mapping[str, float], step: int, metrics: bool = False) -> None:
        if not values:
            return
        leads = self._leads()
        for each in self._loggers:
            if leads and not each.everywhere or each.everywhere and not metrics:
                each.log(values, step)

    def _leads(self) -> bool:
        try:
            leads = self._job.is_first
        except PartialPlan:  # it has not joined yet
            return False
        if leads and not self._led and any(not each.everywhere for each in self._loggers):
            number = self._job.role.trainer_id
            log.warning("trainer %d is the leader now, and opens the loggers", number)
        self._led = leads
        return leads

    @onlooker("the metrics for loggers", otherwise=dict)
    def _metrics(self) -> dict[str, float]:
        """The job's counters on this trainer, and its steps and samples per second; none before it
        has joined: where it takes a lost trainer's place, another one may lead.
        """
        try:
            if self._job.role.role is Role.TRAINER and self._job.communicator is None:
                return {}
            counters = self._job.metrics()
        except PartialPlan:
            return {}
        (then, steps, samples), (total, _) = self._before, self._job.reported.now()
        now = time.monotonic()
        self._before = now, counters["steps"], total
        seconds = max(now - then, 1e-9)
        rates = {"steps_per_second": (counters["steps"] - steps) / seconds}
        if total:
            rates |= {"samples": float(total), "samples_per_second": (total - samples) / seconds}
        return {f"pserver/{name}": value for name, value in (counters | rates).items()}

    def _step(self) -> int:
        return max((each.steps for each in self._job.optimizers), default=0)

    def _close_first(self) -> None:
        """Closes at the process's end, where a script that fails has no finish(); and before a
        logger that was just opened: W&B's ends its run there, too.
        """
        atexit.unregister(self.close)
        if not self._closed:
            atexit.register(self.close)

    def _failed(self) -> None:
        self.failures += 1


def check_loggers(given: Any) -> list[Given]:
    """The loggers that a script gives.

    Raises:
        TypeError: they are no list, or one of them has no ``log`` and cannot be called.
    """
    if given is None:
        return []
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"loggers: expected a list, got {type(given).__name__}: write [...]")
    for each in given:
        if not callable(getattr(each, "log", None)) and not callable(each):
            raise TypeError(
                "loggers: expected objects with log(values, step), or functions that open one, "
                f"got {each!r}"
            )
    return list(given)


def begin_loggers(job: Job, given: list[Given]) -> None:
    """Gives the loggers the reports of a job's trainer until the job's end; those of the script,
    and TensorBoard if PSERVER_TENSORBOARD is set.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    settings = Connection.from_environment()
    if settings.plan_only or job.role.role is Role.PSERVER:
        return
    folder, number = settings.tensorboard, job.role.trainer_id
    tensorboard = TensorBoard(folder, number) if folder else None
    if given or tensorboard is not None:
        loggers = Loggers(job, given, tensorboard)
        job.loggers = loggers
        job.reported.heard = loggers.add
        job.undo.callback(loggers.close)
