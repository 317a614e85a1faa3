"""A trainer's calls to server 0 about where the job's script is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pserver.control.control_client import ControlClient
from pserver.polling import poll
from pserver.wire_pb2 import PositionReply, PositionRequest

ASK_SECONDS = 20.0  # a script that does not come to its next batch or step can say nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """What another trainer has said.

    Attributes:
        position: a text of the trainers' own.
        problem: why there is none; "": there is one.
    """

    position: str
    problem: str = ""


class PositionCalls:
    """The calls of one trainer.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        asked: the answer to a call that is given the session of this trainer.
        check: raises what has ended the job.
    """

    def __init__(
        self,
        control: ControlClient,
        asked: Callable[[Callable[[str], PositionReply]], PositionReply],
        check: Callable[[], None],
    ) -> None:
        self._control, self._asked, self._check = control, asked, check

    def ask(self, who: Callable[[], str]) -> Told:
        """Where the others are; waits for a while until one of them has said it.

        Args:
            who: gives the trainer that is waited for, in words.
        """
        number = 0
        what = f"waiting for {who()} to say where the job is"
        for _ in poll(log, lambda: what, ASK_SECONDS):
            reply = self._call(PositionRequest(number=number))
            if reply.ready:
                return Told(reply.position, reply.problem)
            number = reply.number
            self._check()
        return Told("", f"{who()} has not said it within {ASK_SECONDS:g} s")

    def answer(self, number: int, told: Told, step: int) -> bool:
        """Answers a question.

        Args:
            number: of the question.
            step: that the position is just before, of the lane whose steps need all trainers; 0:
                there is no such lane.

        Returns:
            Whether that was an answer: not where the step is decided already.
        """
        request = PositionRequest(
            number=number,
            answers=True,
            position=told.position,
            problem=told.problem,
            step=step,
        )
        return self._call(request).ready

    def _call(self, request: PositionRequest) -> PositionReply:
        def ask(session: str) -> PositionReply:
            request.session = session
            return self._control.position(request, meanwhile=self._check)

        return self._asked(ask)
