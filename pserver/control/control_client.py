"""Control calls to one server, with timeouts, retries and proofs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pserver import wire_pb2 as wire
from pserver.config import split_endpoint
from pserver.control.calls import CALLS
from pserver.control.rpc_errors import from_rpc_error, named
from pserver.errors import CorruptFrame, PServerError, Unreachable
from pserver.polling import poll
from pserver.running_clock import RUNNING
from pserver.security import keys, tokens
from pserver.security.access import OPEN, Access
from pserver.security.tokens import ProofRequest
from pserver.telemetry.trace import ClockOffset, clock_ns
from pserver.transport.checksums import check_message, of_message
from pserver.transport.grpc_port import DialledChannel
from pserver.transport.grpc_stream import SERVICE

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries
LEAVE_SECONDS = 3.0
FILE_SECONDS = 3600.0  # for Save and Load, which write and read whole models
# calls that a server answers at once: one without an answer for a third of its timeout is asked
# again over a new connection
PROMPT_CALLS = frozenset({"Join", "Leave", "Status", "Drain", "Trace", "Follow"})
TRIES = 3
UNLIMITED = 10**9
# of a connection that no error of ours has come over: it broke, or brought what is no message
BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)

Reply = TypeVar("Reply", bound=Message)


class ControlClient:
    """Control calls to one server, on a connection of their own.  Any thread may call.

    Each call ends within its timeout.  While the server cannot be reached the call is tried again:
    every control call may safely arrive twice.  Only Heartbeat is tried once, because a late one
    says nothing.

    [Note: dialling again]  A connection can die without an error: packets are dropped, and nothing
    arrives any more, not even an error.  No call can tell that from a server that takes long.  The
    heartbeat can: where one stays unanswered and the next, over a connection that was dialled for
    it, is answered, the old connection is dead.  The new one takes its place, and the calls that
    wait on the old one are asked again, each with its whole timeout: the server is alive.
    Before there is a heartbeat, a call that servers answer at once (PROMPT_CALLS) is asked again
    over a new connection after a third of its timeout.
    A name is resolved each time that a connection is dialled: a server that has moved is found.

    Args:
        endpoint: HOST:PORT.
        timeout_seconds: the timeout of a call that is given none.
        name: of the server in errors, its endpoint where nothing is given.
        access: what is proved to the server, and asked of it, with each call.

    Attributes:
        clock: the offset of the server's clock, as heartbeats and traces measure it.
    """

    def __init__(
        self, endpoint: str, timeout_seconds: float, name: str = "", access: Access = OPEN
    ) -> None:
        self.endpoint = endpoint
        self._access = access
        self._name = name or endpoint
        self._timeout = timeout_seconds
        self._dialled = DialledChannel(*split_endpoint(endpoint), access.keys)
        self.clock = ClockOffset()

    @property
    def redials(self) -> int:
        """Connections that a heartbeat has put in the place of a dead one."""
        return self._dialled.redials

    def wait_ready(
        self, timeout_seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Returns when the server is up and serves.  A wait of more than a few seconds is logged
        once.

        Args:
            meanwhile: called while it waits; raises what should end the wait.

        Raises:
            Unreachable: it was not, within ``timeout_seconds``.
            Untrusted: one end does not take the other's certificate, or has none.
        """
        reason, answered = "", False
        text = f"{self._name}: waiting for the server (for up to {timeout_seconds:g} s)"
        for waited in poll(log, lambda: text, timeout_seconds, FIRST_PAUSE):
            meanwhile()
            seconds = min(max(timeout_seconds - waited, 0.001), 1.0)
            try:
                channel = self._dialled.present(seconds)
            except Unreachable as error:
                reason = str(error).removeprefix(f"{self.endpoint}: ")
                continue
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE), timeout=seconds
                )
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                reason, answered = "it is up, but shutting down", True
            except grpc.RpcError as error:
                if not answered:  # the last try may have had no time left
                    reason = str(from_rpc_error(error, self.endpoint, "a health check"))
                    reason = reason.removeprefix(self.endpoint).lstrip(": ")
                self._dialled.drop(channel)
                self._check_plain()
        raise Unreachable(f"{self._name}: no server there within {timeout_seconds:g} s: {reason}")

    def join(self, request: wire.JoinRequest, timeout: float | None = None) -> wire.JoinReply:
        """Joins the server's job.  protos/pserver/wire.proto says more, as for the calls below."""
        return self._call("Join", request, wire.JoinReply, timeout)

    def install(
        self,
        request: wire.InstallRequest,
        timeout: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> wire.InstallReply:
        """Gives the server its program.

        Args:
            meanwhile: called before it is tried again; raises what should end that.
        """
        return self._call("Install", request, wire.InstallReply, timeout, meanwhile=meanwhile)

    def heartbeat(
        self, request: wire.HeartbeatRequest, timeout: float | None = None, anew: bool = False
    ) -> wire.HeartbeatReply:
        """Sends a heartbeat; tried once.

        Args:
            anew: over a connection that is dialled for it; when it has been answered, that is the
                client's: see [Note: dialling again].
        """
        if not anew:
            return self._call("Heartbeat", request, wire.HeartbeatReply, timeout, tries=1)
        seconds = self._timeout if timeout is None else timeout
        fresh = self._dialled.dial(seconds)
        try:
            reply = self._ask(fresh, "Heartbeat", request, seconds)
        except Unreachable:
            fresh.close()
            raise
        except grpc.RpcError as error:
            fresh.close()
            raise from_rpc_error(error, self._name, "Heartbeat") from error
        self._dialled.replace(fresh)
        assert isinstance(reply, wire.HeartbeatReply)
        return reply

    def announce(
        self, request: wire.AnnounceRequest, timeout: float | None = None
    ) -> wire.AnnounceReply:
        """Says that a trainer has started; tried once."""
        return self._call("Announce", request, wire.AnnounceReply, timeout, tries=1)

    def finish(self, request: wire.FinishRequest, timeout: float | None = None) -> wire.FinishReply:
        """Waits a second at most: see FinishReply."""
        return self._call("Finish", request, wire.FinishReply, timeout)

    def leave(self, request: wire.LeaveRequest, timeout: float = LEAVE_SECONDS) -> wire.LeaveReply:
        """Leaves the job.  The others would wait for a trainer whose goodbye is lost: so it is said
        again while the server can be dialled.  Nobody waits for a server that is gone.
        """
        return self._call("Leave", request, wire.LeaveReply, timeout, dials=2)

    def meet(
        self,
        request: wire.MeetRequest,
        timeout: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> wire.MeetReply:
        """Meets the other trainers of the job; waits a second at most.

        Args:
            meanwhile: as for :meth:`install`.
        """
        return self._call("Meet", request, wire.MeetReply, timeout, meanwhile=meanwhile)

    def lease(
        self,
        request: wire.LeaseRequest,
        timeout: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> wire.LeaseReply:
        """Asks for samples to train on; waits a second at most.

        Args:
            meanwhile: as for :meth:`install`.
        """
        return self._call("Lease", request, wire.LeaseReply, timeout, meanwhile=meanwhile)

    def save(self, request: wire.SaveRequest, timeout: float = FILE_SECONDS) -> wire.SaveReply:
        """Makes the server write its values to its directory or store."""
        return self._call("Save", request, wire.SaveReply, timeout)

    def load(self, request: wire.LoadRequest, timeout: float = FILE_SECONDS) -> wire.LoadReply:
        """Makes the server read its values from its directory or store."""
        return self._call("Load", request, wire.LoadReply, timeout)

    def shrink(
        self,
        request: wire.ShrinkRequest,
        timeout: float = FILE_SECONDS,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> wire.ShrinkReply:
        """Applies time decay to the tables' rows, then drops some of them.

        Args:
            meanwhile: as for :meth:`install`.
        """
        return self._call("Shrink", request, wire.ShrinkReply, timeout, meanwhile=meanwhile)

    def status(
        self, request: wire.StatusRequest | None = None, timeout: float | None = None
    ) -> wire.StatusReply:
        """The server's state, its trainers, and what it holds."""
        return self._call("Status", request or wire.StatusRequest(), wire.StatusReply, timeout)

    def observe(
        self, request: wire.ObserveRequest, timeout: float | None = None
    ) -> wire.ObserveReply:
        """Begins, goes on with or ends reading what a job holds."""
        return self._call("Observe", request, wire.ObserveReply, timeout)

    def reset(
        self, request: wire.ResetRequest | None = None, timeout: float | None = None
    ) -> wire.ResetReply:
        """Drops the values of a failed job."""
        return self._call("Reset", request or wire.ResetRequest(), wire.ResetReply, timeout)

    def trace(self, request: wire.TraceRequest, timeout: float | None = None) -> wire.TraceReply:
        """Begins or ends a trace on the server, leaves spans there or reads them; measures its
        clock.
        """
        return self._call("Trace", request, wire.TraceReply, timeout)

    def follow(self, request: wire.FollowRequest, timeout: float | None = None) -> wire.FollowReply:
        """Asks a job's coordinator for the link of one of its other servers."""
        return self._call("Follow", request, wire.FollowReply, timeout)

    def drain(
        self, request: wire.DrainRequest | None = None, timeout: float | None = None
    ) -> wire.DrainReply:
        """Asks the server to shut down."""
        return self._call("Drain", request or wire.DrainRequest(), wire.DrainReply, timeout)

    def close(self) -> None:
        """Ends the connection; harmless when called twice."""
        self._dialled.close()

    # ---- one call: see [Note: dialling again] ----

    def _call(
        self,
        name: str,
        request: Message,
        kind: type[Reply],
        timeout: float | None,
        tries: int = UNLIMITED,
        dials: int = UNLIMITED,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Reply:
        """One call, tried again while the connection breaks and the server has not said why.

        Args:
            tries: at most so many.
            dials: after so many without a connection the server counts as gone.
            meanwhile: called before it is tried again; raises what should end that.
        """
        seconds = self._timeout if timeout is None else timeout
        deadline = RUNNING() + seconds
        pause = FIRST_PAUSE
        while True:
            left = max(deadline - RUNNING(), 0.001)
            patience = left if name not in PROMPT_CALLS else min(left, seconds / TRIES)
            tries -= 1
            channel = None
            try:
                channel = self._dialled.present(patience)
                reply = self._ask(channel, name, request, patience)
            except (Unreachable, grpc.RpcError, ValueError) as error:
                if channel is not None and tries and self._dialled.replaced(channel):
                    deadline = RUNNING() + seconds
                    continue
                dials -= channel is None
                failure, again = self._failure(error, name, RUNNING() + pause < deadline)
                if again and channel is not None:
                    self._dialled.drop(channel)
                if not (again and tries and dials) or RUNNING() + pause >= deadline:
                    if channel is not None and again:
                        self._check_plain()
                    raise failure from None  # it says what grpcio's has said
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                assert isinstance(reply, kind)
                return reply

    def _ask(self, channel: grpc.Channel, name: str, request: Message, timeout: float) -> Message:
        """One try of the call of that name, which a challenge precedes where there is a key."""
        _, _, answered = CALLS[name]
        said = request.SerializeToString()
        deadline = time.monotonic() + timeout
        metadata = self._proof(channel, name, said, timeout)
        if self._access.keys is None:  # TLS has its own
            metadata = (*metadata, of_message(said))
        left = max(deadline - time.monotonic(), 0.001)
        call = channel.unary_unary(f"/{SERVICE}/{name}")
        asked = clock_ns()
        received, answer = call.with_call(said, timeout=left, metadata=metadata)
        try:
            check_message("a reply", received, answer.trailing_metadata())
            reply: Message = answered.FromString(received)
        except (CorruptFrame, DecodeError) as error:
            raise Unreachable(f"{self.endpoint}: {name}: {error}") from error
        if isinstance(reply, wire.HeartbeatReply | wire.TraceReply):
            self.clock.add_round(asked, reply.clock_ns, clock_ns())
        return reply

    def _proof(
        self, channel: grpc.Channel, name: str, said: bytes, timeout: float
    ) -> tokens.Metadata:
        """The metadata of a call.  The server has proved itself by then; before that it receives
        only a random number, and the role of the client's key.

        Raises:
            NotAllowed: it is no server of this job.
        """
        if self._access.secret is None:
            return ()
        _, port = split_endpoint(self.endpoint)
        question = ProofRequest(self._access.secret, port, self._name)
        challenge = channel.unary_unary(
            f"/{SERVICE}/Challenge",
            wire.ChallengeRequest.SerializeToString,
            wire.ChallengeReply.FromString,
        )
        asked = wire.ChallengeRequest(nonce=question.nonce, role=question.role)
        reply = challenge(asked, timeout=timeout)
        question.answered(reply.nonce, reply.proof)
        return tokens.to_metadata(question.proof(name, said))

    def _check_plain(self) -> None:
        """Raises Untrusted if this end alone has no keys."""
        keys.check_plain(*split_endpoint(self.endpoint), self._access.keys)

    def _failure(self, error: Exception, name: str, early: bool) -> tuple[PServerError, bool]:
        """The error that a try has ended with, and whether another try may help.

        Args:
            early: the call's time is not over by the clock of this process: grpcio's went on while
                the process was stopped.
        """
        again = not self._dialled.closed
        if isinstance(error, Unreachable):  # it knows the endpoint alone
            return Unreachable(str(error).replace(self.endpoint, self._name, 1)), again
        if isinstance(error, ValueError):  # grpcio's word for a closed channel
            text = f"{self._name}: {name} after the connection was closed"
            return Unreachable(text), again
        assert isinstance(error, grpc.RpcError)
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and (
            name in PROMPT_CALLS or (early and not named(error))
        )
        again = again and (late or (error.code() in BROKEN and not named(error)))
        return from_rpc_error(error, self._name, name), again
