"""The calls of a connection that trainers make together, and those that are grouped by what they
are about.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from pserver.client.explained import explained
from pserver.client.lease_calls import LeaseCalls
from pserver.client.position_calls import PositionCalls
from pserver.client.replies import Absences, Gathered, PutOff
from pserver.client.save_calls import SaveCalls
from pserver.client.server_return import ServerReturn
from pserver.client.trace_calls import TraceCalls
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError, TimedOut, TrainerLost, UnknownSession, Unreachable
from pserver.wire_pb2 import BarrierReply, BarrierRequest, JoinReply

POLL_SECONDS = 0.1  # between two questions whether a server takes this trainer

Answer = TypeVar("Answer")


class GroupedCalls(ABC):
    """A part of a :class:`~pserver.client.client.Client`."""

    _control: ControlClient
    _reply: JoinReply
    _return: ServerReturn
    _closing: threading.Event
    learn: Callable[[Absences], None]

    @abstractmethod
    def check(self) -> None:
        """Raises what ended the connection, if something did."""

    @abstractmethod
    def _lost_while_away(self, error: PServerError) -> TrainerLost | None:
        """The error of a trainer that was lost because it did not run; None where it ran."""

    def _asked(self, call: Callable[[str], Answer]) -> Answer:
        """The answer to a call, which is made again where the server is awaited and has come back.

        Args:
            call: with the session that counts now.
        """
        while True:
            session = self._reply.session
            try:
                with explained(self.check, self._lost_while_away):
                    return call(session)
            except (Unreachable, TimedOut, UnknownSession):
                if not self._return.seconds or self._closing.wait(POLL_SECONDS):
                    raise

    @property
    def store(self) -> str:
        """The directory, or the URL, below which the server keeps files; "": it keeps none."""
        return self._reply.store

    @property
    def saves(self) -> SaveCalls:
        """The calls that have the server write what it holds."""
        return SaveCalls(self._control, self._reply.session)

    @property
    def leases(self) -> LeaseCalls:
        """The calls about who trains on which samples; server 0 answers them."""
        return LeaseCalls(self._control, self._asked, self.check)

    @property
    def positions(self) -> PositionCalls:
        """The calls about where the script is; server 0 answers them."""
        return PositionCalls(self._control, self._asked, self.check)

    @property
    def tracing(self) -> TraceCalls:
        """The calls that belong to a trace."""
        return TraceCalls(self._control, self._reply.session, str(self))

    def barrier(
        self,
        name: str,
        text: str = "",
        meanwhile: Callable[[], None] = lambda: None,
        past: bool = False,
        apart: bool = False,
    ) -> dict[int, str]:
        """Waits until every trainer of the job that has not left has come to the barrier of this
        name.

        Args:
            text: what this trainer tells the others there.
            meanwhile: called while it waits; raises what should end the wait.
            past: the others have passed it before this trainer joined.
            apart: trainers that wait at another barrier come to this one, too.

        Returns:
            What trainers have told, by trainer; those that told nothing are not in it.

        Raises:
            PutOff: one that is apart is not held.
        """
        request = BarrierRequest(name=name, text=text, past=past, apart=apart)
        reply = self._passed(request, meanwhile)
        if reply.put_off:
            raise PutOff(reply.put_off)
        return dict(reply.texts)

    def gather(
        self,
        text: str,
        after: int,
        meanwhile: Callable[[], None] = lambda: None,
        ends: bool = False,
        averages: int = 0,
        overflows: int = 0,
    ) -> Gathered:
        """Waits until every trainer of the job that has not left has come to the gathering.

        Args:
            text: what this trainer tells the others there.
            after: the number of the last one that this trainer was in; 0: none.
            meanwhile: called while it waits; raises what should end the wait.
            ends: this trainer takes no further step.
            averages: of the trainers' gradients that were applied, as far as this one knows.
            overflows: further ones, of steps that overflowed on some trainer.
        """
        request = BarrierRequest(gathers=True, text=text, after=after, ends=ends)
        request.averages, request.overflows = averages, overflows
        reply = self._passed(request, meanwhile)
        return Gathered(reply.number, reply.changes, dict(reply.texts))

    def _passed(self, request: BarrierRequest, meanwhile: Callable[[], None]) -> BarrierReply:
        """The reply when all have come, or it is put off; a call waits for a second."""

        def ask(session: str) -> BarrierReply:
            request.session = session
            return self._control.barrier(request)

        while not ((reply := self._asked(ask)).passed or reply.put_off):
            self.check()
            meanwhile()
        self.learn(Absences.of(reply.roll))
        return reply
