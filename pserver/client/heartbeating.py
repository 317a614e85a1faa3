"""The heartbeat of a trainer's connection to one server.

[Note: silence]  The heartbeat has a connection and a thread of its own.  A server that has not
answered one for longer than the heartbeat timeout is lost: its channels fail with
:class:`~pserver.errors.ServerLost`.  A server that answers, but whose job has failed, says why, and
the channels fail with that.
The time in which this process has not run does not count: see [Note: one's own pause] in
``pserver/running_clock.py``.  A trainer that was away for longer than the heartbeat timeout, and is
not taken back, says that, and blames no server.
Silence may also be the connection's.  A heartbeat that is not answered within a fifth of the
timeout is sent again over a new connection; see [Note: dialling again] in
``pserver/control/control_client.py``.
The same thread watches the channels' streams: one on which an answer is overdue is opened again;
see [Note: sending again].
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from functools import partial

from pserver.client.channel import Channel
from pserver.client.grouped_calls import GroupedCalls
from pserver.client.replies import Absences
from pserver.client.report import Report, heartbeat
from pserver.client.server_return import ServerReturn
from pserver.client.silence import lost_while_away
from pserver.errors import (
    PServerError,
    Refused,
    ServerLost,
    TimedOut,
    TrainerLost,
    UnknownSession,
    Unreachable,
    from_wire,
)
from pserver.running_clock import RUNNING
from pserver.side_business import SideBusiness
from pserver.wire_pb2 import HeartbeatReply, HeartbeatRequest, JoinReply, WaitStatus

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # from one heartbeat to the next, at most; five of them in a heartbeat timeout
LAST_BEAT_SECONDS = 0.1  # what a heartbeat at the end of the timeout still has


class Heartbeating(GroupedCalls):
    """The part of a :class:`~pserver.client.client.Client` that notices what becomes of its server.

    Attributes:
        index: of the server in the plan.
        transport: that the streams use.
        activity: what the trainer does, for ``pserver status``.
        reported: called for each heartbeat: what the trainer says of its training.
        learn: called, in any thread, with what the server says of who is not there.
        asked: called, in the heartbeat's thread, with the number of a question where the job's
            script is, which this trainer is to answer.
    """

    index: int
    transport: str
    activity: str
    reported: Callable[[], Report]
    learn: Callable[[Absences], None]
    asked: Callable[[int], None]
    _answered: float  # when the last heartbeat that was answered began, by the system's clock
    _closing: threading.Event
    _failure: PServerError | None
    _heartbeat_timeout: float
    _return: ServerReturn
    _waits_said: Collection[int] = ()  # numbers of waits

    @property
    @abstractmethod
    def every_channel(self) -> list[Channel]:
        """The lanes' channels, and the tables'."""

    @abstractmethod
    def _ask_to_join(self, meanwhile: Callable[[], None]) -> JoinReply:
        """Joins the server's job, when it takes this trainer."""

    @property
    def returned(self) -> int:
        """How often the server has come back, and was joined again."""
        return self._return.count

    def _beat(self) -> None:
        """See [Note: silence]."""
        with RUNNING.ticking():
            self._beat_until_closed()

    def _beat_until_closed(self) -> None:
        interval = min(BEAT_SECONDS, self._heartbeat_timeout / 5)
        begun, answered = time.monotonic(), RUNNING()
        unanswered = 0
        reporting = SideBusiness("what a heartbeat says and hears")
        while not self._closing.wait(max(begun + interval - time.monotonic(), 0.0)):
            begun = time.monotonic()
            left = max(self._heartbeat_timeout - (RUNNING() - answered), LAST_BEAT_SECONDS)
            seconds = min(self._heartbeat_timeout / 5 * 2**unanswered, left)
            session, streams = self._reply.session, self.every_channel
            said = reporting.do(self.reported) or Report()
            request = heartbeat(session, self.activity, said, self.index, streams)
            try:
                reply = self._heartbeat_answered(request, seconds, unanswered > 0)
            except PServerError as error:
                unanswered += 1
                if self._comes_back(error, RUNNING() - answered):
                    if isinstance(error, UnknownSession):
                        answered, unanswered = RUNNING(), 0
                    continue
                if self._is_lost(error, RUNNING() - answered):
                    return
                continue
            if unanswered:
                log.warning("%s answers again, over a new connection", self)
            answered, unanswered = RUNNING(), 0
            self._answered = begun
            reporting.do(partial(self.learn, Absences.of(reply.roll)))
            self._say_waits(reply.waits)
            if reply.failure:
                self._fail(from_wire(reply.error, f"{self}: {reply.failure}"))
                return
            if reply.position_asked:
                reporting.do(partial(self.asked, reply.position_asked))
            for channel in self.every_channel:
                channel.end_if_silent()

    def _say_waits(self, waits: Iterable[WaitStatus]) -> None:
        """Says of each wait of this trainer that lasts long for whom it waits, once."""
        said = {each.number: each for each in waits}
        for number, wait in said.items():
            if number not in self._waits_said:
                whom = ", ".join(map(str, wait.for_whom)) or "nobody any more"
                log.warning(
                    "this trainer waits at %s for trainer %s, for %.0f s now (so says %s)",
                    *(wait.what, whom, wait.seconds, self),
                )
        self._waits_said = said.keys()

    def _heartbeat_answered(
        self, request: HeartbeatRequest, seconds: float, anew: bool
    ) -> HeartbeatReply:
        try:
            return self._control.heartbeat(request, timeout=seconds, anew=anew)
        except OSError as error:  # of this system: it has no descriptor, or no memory, left
            raise Unreachable(f"{self}: {error}") from error

    def _comes_back(self, error: PServerError, silence: float) -> bool:
        """Whether a server that has not answered is awaited, or has come back and was joined again.

        See [Note: joining again] in server_return.py.
        """
        known = not isinstance(error, UnknownSession)
        if known and self._lost_while_away(
            error
        ):  # lost itself: the servers may have ended without it
            return False
        if known or not self._return.seconds:
            return self._return.awaits(error, silence, self._heartbeat_timeout)
        try:
            reply = self._ask_to_join(self._check_open)
            if reply.install:
                raise ServerLost("it holds nothing of the job")
            self._reply = reply
        except (Unreachable, TimedOut):
            return True  # it has gone once more
        except PServerError as refusal:
            self._fail(ServerLost(f"{self} has come back: {refusal}"))
            return False
        self.transport = self._reply.transport
        self._return.joined()
        for channel in self.every_channel:
            channel.renew()
        return True

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Unreachable(f"{self}: this trainer leaves")

    def _is_lost(self, error: PServerError, silence: float) -> bool:
        """Whether a heartbeat that ended with an error means that the server is lost; fails the
        channels then.
        """
        away = self._lost_while_away(error)
        if away and (isinstance(error, Refused) or silence > self._heartbeat_timeout):
            self._fail(away)
        elif isinstance(error, Refused):  # it answers, and has no such trainer
            self._fail(ServerLost(f"{self} does not know this trainer any more: {error}"))
        elif silence <= self._heartbeat_timeout:
            return False
        else:
            limit = f"heartbeat timeout {self._heartbeat_timeout:g} s"
            text = f"{self} has not answered for {silence:.1f} s ({limit}): {error}"
            self._fail(ServerLost(text))
        self._control.close()  # and with it every call that waits for the server
        return True

    def _lost_while_away(self, error: PServerError) -> TrainerLost | None:
        return lost_while_away(str(self), self._answered, self._heartbeat_timeout, error)

    def _fail(self, error: PServerError) -> None:
        self._failure = self._failure or error
        for channel in self.every_channel:
            channel.fail(error)
