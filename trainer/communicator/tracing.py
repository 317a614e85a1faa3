"""The traces of this process: one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pserver.onlookers import look_again, onlooker
from pserver.telemetry.trace import SPANS
from trainer.communicator.server_meeting import ServerMeeting
from trainer.communicator.trace import Meeting, Phase, Trace, TraceSettings
from trainer.environment.environment import Connection

if TYPE_CHECKING:
    from trainer.communicator.communicator import Communicator

AFTER = 2  # steps that a trace of ``launch --trace`` lets pass: the first ones are slower


class Tracing:
    """The present trace of this process, and the connection over which spans come together.

    The script's thread uses it.
    """

    def __init__(self) -> None:
        self._present: Trace | None = None
        self._count = 0
        self._counts: Callable[[object], bool] = lambda _: True
        # of programs, whose connections are their Executor's
        self._programs: Callable[[], Meeting] | None = None

    def begin(
        self,
        settings: TraceSettings,
        trainer: int,
        meeting: Callable[[], Meeting | None],
        watch: Callable[[], Callable[[], None]],
        counts: Callable[[object], bool] = lambda _: True,
    ) -> None:
        """Begins a trace; see :class:`Trace`.

        Args:
            counts: whether the steps of an optimizer, or of a program (None), are the trace's.

        Raises:
            RuntimeError: one is under way.
            OSError, ImportError, ValueError: trainer 0 cannot write to the path.
        """
        if self._present is not None:
            self._present.wait()
            if self._present.phase is not Phase.OVER:
                raise RuntimeError(
                    f"a trace is under way, to {self._present.settings.path!r}: one at a time"
                )
        trace = Trace(settings, self._count + 1, trainer, meeting, watch)
        self._count += 1
        self._present, self._counts = trace, counts
        look_again(self)
        SPANS.watcher = self.stepped

    @onlooker("the trace")
    def stepped(self, optimizer: object) -> None:
        """A step of an optimizer, or of a program (None), is over."""
        if self._present is not None and self._counts(optimizer):
            self._present.stepped()

    def finish(self, failed: bool = False) -> None:
        """The job ends; harmless where no trace is under way."""
        trace, self._present = self._present, None
        SPANS.watcher = self._programs = None
        if trace is not None:
            trace.finish(failed)

    # ---- programs ----

    def joined(self, trainer: int, meeting: Callable[[], Meeting]) -> None:
        """An Executor has joined a job.  Where no trace has begun in this process, one that the
        environment asks for begins here.

        Args:
            trainer: its number.
            meeting: how spans come together.

        Raises:
            OSError, ImportError, ValueError: trainer 0 cannot write to the path.
        """
        self._programs = meeting
        settings = asked(Connection.from_environment())
        if settings is not None and self._count == 0:
            self.begin(settings, trainer, self.of_programs, lambda: lambda: None)

    def of_programs(self) -> Meeting | None:
        """How the spans of programs come together; None before one has joined its job."""
        return None if self._programs is None else self._programs()


def meeting_of(communicator: Communicator) -> Meeting:
    """How a trainer of a job with servers brings spans together."""
    return ServerMeeting(communicator.clients, communicator.plan.trainers)


def asked(connection: Connection) -> TraceSettings | None:
    """What PSERVER_TRACE asks for, if anything.

    Raises:
        ValueError: the number of steps is below 1.
    """
    if not connection.trace:
        return None
    return TraceSettings(connection.trace, connection.trace_steps, AFTER)


TRACING = Tracing()
