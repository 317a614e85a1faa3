"""A trace on one trainer: from its begin to the file that trainer 0 writes.

The spans of a few steps are noted in memory; afterwards a thread brings those of all processes
together, while training goes on.

::

    ARMED --the step before the first one ends--> NOTING --its last step ends--> TELLING --> OVER
                                                    `-----the job ends----------^
"""

from __future__ import annotations

import atexit
import enum
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pserver.errors import PServerError
from pserver.onlookers import onlooker
from pserver.storage.single_file import written
from pserver.telemetry.trace import SPANS, Recording, document
from trainer.communicator.torch_spans import TorchSpans
from transpiler.files.files import is_url, shown

GATHER_SECONDS = 30.0  # for the other trainers' last steps, when trainer 0's are over
JOIN_SECONDS = GATHER_SECONDS + 15.0  # and for the calls besides

log = logging.getLogger(__name__)


class Meeting(Protocol):
    """How the processes of a job bring their spans together."""

    def begin(self, number: int) -> None:
        """A trace begins.

        Args:
            number: of this process's traces, from 1; the same on every trainer.
        """

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """A trainer other than 0 leaves its spans for trainer 0."""

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Trainer 0: the recordings of all other processes by its own clock, and those that are
        missing, with the reasons.
        """


class Alone:
    """The meeting of a process that trains alone."""

    def begin(self, number: int) -> None:
        """There is nobody to tell."""

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """There is nobody to leave spans for."""

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """There is nobody else."""
        return [], {}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced, and where the file goes.

    Attributes:
        path: of the file, or its URL.
        steps: of this trainer.
        after: how many steps to let pass before the first.
        profiler: whether torch.profiler's spans are in the file, too.

    Raises:
        TypeError, ValueError: one is something else.
    """

    path: str
    steps: int = 3
    after: int = 0
    profiler: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int):
            raise TypeError(f"steps: expected a whole number, got {self.steps!r}")
        if self.steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {self.steps}")
        is_url(self.path)


class Phase(enum.Enum):
    """How far a trace has come."""

    ARMED = "armed"
    NOTING = "noting"
    TELLING = "telling"
    OVER = "over"


class Trace:
    """One trace of this trainer.  The script's thread calls it.

    Args:
        settings: of it.
        number: of this process's traces, from 1.
        trainer: this one.
        meeting: how spans come together; None: this trainer has not joined its job yet.
        watch: called when it begins; what it returns is called when it ends.

    Raises:
        OSError, ImportError, ValueError: trainer 0 cannot write to the path.
    """

    def __init__(
        self,
        settings: TraceSettings,
        number: int,
        trainer: int,
        meeting: Callable[[], Meeting | None],
        watch: Callable[[], Callable[[], None]],
    ) -> None:
        self.settings = settings
        self.phase = Phase.ARMED
        self._number, self._trainer = number, trainer
        self._find, self._watch = meeting, watch
        self._meeting: Meeting = Alone()
        self._left, self._taken = settings.after, 0  # steps
        self._torch = TorchSpans() if settings.profiler else None
        self._notes: list[str] = []
        self._stop_watching: Callable[[], None] = lambda: None
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="trace", daemon=True)
        if trainer == 0:
            write(settings.path, document([], {}, {"state": "the trace is not over"}))
        if not self._left:
            self._begin()

    @onlooker("the trace", end=lambda trace: trace.abandon())
    def stepped(self) -> None:
        """A step of this trainer is over."""
        if self.phase is Phase.ARMED:
            self._left -= 1
            if self._left <= 0:
                self._begin()
        elif self.phase is Phase.NOTING:
            self._taken += 1
            if self._taken == self.settings.steps:
                self._end()
                self._thread.start()

    def finish(self, failed: bool = False, exiting: bool = False) -> None:
        """The job ends: so does the trace, with what there is; returns when the file is written.

        Args:
            failed: nobody waits for other trainers.
            exiting: no thread can be started any more.
        """
        if failed:
            self._hurried.set()
        if self.phase is Phase.ARMED:
            self.phase = Phase.OVER
            log.warning("trace: the job ended before its first step to be traced")
        elif self.phase is Phase.NOTING:
            self._notes.append(f"the job ended after {self._taken} of {self.settings.steps} steps")
            self._end()
            if exiting:
                self._tell()
            else:
                self._thread.start()
        self.wait()

    def wait(self) -> None:
        """Returns when the spans have been brought together, if they are under way."""
        if self.phase is Phase.TELLING:
            self._thread.join(JOIN_SECONDS)

    def abandon(self) -> None:
        """Ends it without a file; whatever is noted is forgotten."""
        atexit.unregister(self._exits)
        self.phase = Phase.OVER
        SPANS.end()
        self._stop_watching()

    # ---- its parts ----

    def _begin(self) -> None:
        """Begins, unless this trainer has not joined its job; then after its next step."""
        meeting = self._find()
        if meeting is None:
            return
        if self._torch is not None:
            self._torch.begin()
        self._meeting = meeting
        try:
            meeting.begin(self._number)
        except PServerError as error:
            self._notes.append(f"the trace did not begin everywhere: {error}")
        atexit.register(self._exits)
        SPANS.begin()
        self._stop_watching = self._watch()
        self.phase = Phase.NOTING

    def _end(self) -> None:
        self._stop_watching()
        if self._torch is not None:
            self._torch.end()
        SPANS.end()
        self.phase = Phase.TELLING

    def _exits(self) -> None:
        """The process ends without having left its job."""
        self.finish(failed=True, exiting=True)

    def _tell(self) -> None:
        """Brings the spans together; the trace's thread runs it."""
        spans, dropped = SPANS.taken()
        own = Recording("trainer", self._trainer, spans, dropped, notes=self._notes)
        try:
            if self._trainer:
                self._meeting.deliver(self._number, own, GATHER_SECONDS)
            else:
                own.clock = "the clock of this file"
                self._gather(own)
        except (PServerError, OSError, ValueError) as error:
            log.warning("trace: %s", error)
        except Exception:
            log.exception("trace")
        finally:
            self.phase = Phase.OVER
            atexit.unregister(self._exits)

    def _gather(self, own: Recording) -> None:
        """Trainer 0: writes the file, and says so."""
        wait = self._hurried.is_set
        others, missing = self._meeting.gather(self._number, GATHER_SECONDS, wait)
        content = document([own, *others], missing, {"steps": self._taken, "pid": os.getpid()})
        write(self.settings.path, content)
        about = content["otherData"]
        spans, dropped = (
            sum(each[key] for each in about["processes"].values()) for key in ("spans", "dropped")
        )
        said = [
            f"trace: {shown(self.settings.path)}: steps {self._taken}, processes "
            f"{len(about['processes'])}, spans {spans}, clocks within "
            f"{about['clock_error_bound_us'] / 1e3:.3f} ms",
            f"dropped beyond the limit: {dropped}" if dropped else "",
            *(f"{name} is missing: {reason}" for name, reason in missing.items()),
        ]
        print("; ".join(filter(None, said)), flush=True)


def write(path: str, content: dict[str, object]) -> None:
    """Writes the file, whole or not at all.

    Raises:
        OSError, ImportError, ValueError: the path cannot be written to.
    """
    text = json.dumps(content, separators=(",", ":")) + "\n"
    try:
        with written(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"the trace cannot be written to {shown(path)!r}: {error}") from error
