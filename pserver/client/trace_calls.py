"""A trainer's calls to one server that belong to a trace, and the server's clock."""

from __future__ import annotations

from pserver.control.control_client import ControlClient
from pserver.errors import CorruptFrame
from pserver.tracing.clock_offset import Estimate
from pserver.tracing.recording import Recording, parts_of, whole
from pserver.wire_pb2 import TraceAction, TraceReply, TraceRequest

ROUNDS = 8  # of questions for the clock, at either end of a trace
CALL_SECONDS = 5.0


class TraceCalls:
    """The calls of one trainer to one server.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        session: of this trainer.
        name: of the server, for messages.
    """

    def __init__(self, control: ControlClient, session: str, name: str) -> None:
        self._control, self._session, self._name = control, session, name

    def begin(self, number: int) -> None:
        """The server notes what it does from here on; its clock is asked for anew.

        Args:
            number: of this trainer's traces in the job, from 1.
        """
        self._control.clock.restart()
        self._call(TraceAction.TRACE_BEGIN, number)
        self.ask_clock()

    def ask_clock(self) -> None:
        """Asks for the server's clock a few times."""
        for _ in range(ROUNDS):
            self._call(TraceAction.TRACE_CLOCK, 0)

    @property
    def clock(self) -> Estimate | None:
        """How far the server's clock is ahead of this process's; None before the first round."""
        return self._control.clock.estimate()

    def leave(self, number: int, recording: Recording) -> None:
        """Leaves this trainer's spans at the server, for trainer 0."""
        parts = parts_of(recording.to_bytes())
        for index, part in enumerate(parts):
            self._call(TraceAction.TRACE_LEAVE, number, index=index, parts=len(parts), part=part)

    def left_by(self, trainer: int, number: int) -> Recording | None:
        """What a trainer has left; None: not all of it is there yet.

        Raises:
            CorruptFrame: it is no recording of that trainer.
        """
        found = self._parts(TraceAction.TRACE_READ, number, trainer)
        return None if found is None else self._recording(found, "trainer", trainer)

    def end(self, number: int, server: int) -> Recording:
        """The server notes nothing more; gives what it has noted.

        Args:
            server: its index.

        Raises:
            CorruptFrame: it is no recording of that server.
        """
        return self._recording(self._parts(TraceAction.TRACE_END, number) or b"", "server", server)

    def _recording(self, data: bytes, kind: str, number: int) -> Recording:
        try:
            recording = Recording.from_bytes(data)
        except ValueError as error:
            raise CorruptFrame(f"{self._name}: {error}") from error
        if (recording.kind, recording.number) != (kind, number):
            raise CorruptFrame(f"{self._name}: expected {kind} {number}, got {recording.name}")
        return recording

    def _parts(self, action: TraceAction, number: int, trainer: int = 0) -> bytes | None:
        first = self._call(action, number, trainer=trainer)
        if not first.parts:
            return None
        others = [
            self._call(action, number, trainer=trainer, index=index).part
            for index in range(1, first.parts)
        ]
        return whole([first.part, *others])

    def _call(
        self,
        action: TraceAction,
        number: int,
        trainer: int = 0,
        index: int = 0,
        parts: int = 0,
        part: bytes = b"",
    ) -> TraceReply:
        request = TraceRequest(
            session=self._session,
            action=action,
            number=number,
            trainer=trainer,
            index=index,
            parts=parts,
            part=part,
        )
        return self._control.trace(request, CALL_SECONDS)
