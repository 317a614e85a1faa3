"""The control calls of protos/pserver/wire.proto over gRPC: the service, and a client with timeouts
and retries.

No call has any logic here: the service passes each
request to the job's method of the same name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pserver import wire_pb2 as wire
from pserver.config import split_endpoint
from pserver.errors import PServerError, Unreachable
from pserver.limits import Limits
from pserver.polling import poll
from pserver.repeated_lines import LimitedLog
from pserver.rpc_errors import abort_with, from_rpc_error, named
from pserver.transport.call_threads import Answer, CallThreads
from pserver.transport.dialled_channel import DialledChannel
from pserver.transport.endpoint import check_free, spell
from pserver.transport.grpc_stream import SERVICE, Exchanges, server_options
from pserver.transport.health_service import HealthService

log = logging.getLogger(__name__)
of_grpc = LimitedLog(log)  # messages that are none, to reflection for one
GRPC_LOGGERS = ("grpc._common", "grpc._server")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries
LEAVE_SECONDS = 3.0
FILE_SECONDS = 3600.0  # for Save and Load, which write and read whole models
# calls that a server answers at once: one without an answer for a third of its timeout is asked
# again over a new connection
PROMPT_CALLS = frozenset({"Join", "Leave", "Rendezvous", "Status", "Drain"})
TRIES = 3
REFLECTION_THREADS = 4
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

CALLS: dict[str, tuple[str, type[Message], type[Message]]] = {
    "Join": ("join", wire.JoinRequest, wire.JoinReply),
    "Install": ("install", wire.InstallRequest, wire.InstallReply),
    "Heartbeat": ("heartbeat", wire.HeartbeatRequest, wire.HeartbeatReply),
    "Announce": ("announce", wire.AnnounceRequest, wire.AnnounceReply),
    "Finish": ("finish", wire.FinishRequest, wire.FinishReply),
    "Leave": ("leave", wire.LeaveRequest, wire.LeaveReply),
    "Barrier": ("barrier", wire.BarrierRequest, wire.BarrierReply),
    "Rendezvous": ("rendezvous", wire.RendezvousRequest, wire.RendezvousReply),
    "Save": ("save", wire.SaveRequest, wire.SaveReply),
    "Load": ("load", wire.LoadRequest, wire.LoadReply),
    "Shrink": ("shrink", wire.ShrinkRequest, wire.ShrinkReply),
    "Status": ("status", wire.StatusRequest, wire.StatusReply),
    "Drain": ("drain", wire.DrainRequest, wire.DrainReply),
    "Observe": ("observe", wire.ObserveRequest, wire.ObserveReply),
    "Reset": ("reset", wire.ResetRequest, wire.ResetReply),
}


class Controlled(Protocol):
    """The object that answers control calls, with one method for each: a job, or a test's double.

    Each method may be called from any thread, and raises PServerError or ValueError.
    """

    def join(self, request: wire.JoinRequest, /) -> wire.JoinReply: ...
    def install(self, request: wire.InstallRequest, /) -> wire.InstallReply: ...
    def heartbeat(self, request: wire.HeartbeatRequest, /) -> wire.HeartbeatReply: ...
    def announce(self, request: wire.AnnounceRequest, /) -> wire.AnnounceReply: ...
    def finish(self, request: wire.FinishRequest, /) -> wire.FinishReply: ...
    def leave(self, request: wire.LeaveRequest, /) -> wire.LeaveReply: ...
    def barrier(self, request: wire.BarrierRequest, /) -> wire.BarrierReply: ...
    def rendezvous(self, request: wire.RendezvousRequest, /) -> wire.RendezvousReply: ...
    def save(self, request: wire.SaveRequest, /) -> wire.SaveReply: ...
    def load(self, request: wire.LoadRequest, /) -> wire.LoadReply: ...
    def shrink(self, request: wire.ShrinkRequest, /) -> wire.ShrinkReply: ...
    def status(self, request: wire.StatusRequest, /) -> wire.StatusReply: ...
    def drain(self, request: wire.DrainRequest, /) -> wire.DrainReply: ...
    def observe(self, request: wire.ObserveRequest, /) -> wire.ObserveReply: ...
    def reset(self, request: wire.ResetRequest, /) -> wire.ResetReply: ...


# ---- the service ----


class ControlServer:
    """A gRPC server of control calls, health checks, reflection and (where offered) tensor streams.

    It binds its port at once and answers after :meth:`start`.

    Args:
        host, port: where to listen; port 0 is any free one.
        limits: what it takes from its peers.

    Attributes:
        port: the one that it is bound to.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(self, host: str, port: int, limits: Limits = Limits()) -> None:  # noqa: B008  # frozen
        check_free(host, port)
        # of reflection, whose calls may last; all others have threads of their own
        self._pool = ThreadPoolExecutor(REFLECTION_THREADS, thread_name_prefix="reflection")
        self._server = grpc.server(self._pool, options=server_options(limits))
        self._threads = CallThreads(limits)
        self._health = HealthService()
        self._exchanges: Exchanges | None = None
        try:
            self.port: int = self._server.add_insecure_port(spell(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {spell(host, port)}: {error}") from error

    def start(self, job: Controlled, exchanges: Exchanges | None) -> None:
        """Answers calls from here on, with the methods of ``job``."""
        methods = {
            name: self._threads.handler(name, _answering(getattr(job, method), request.FromString))
            for name, (method, request, _) in CALLS.items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, methods),)
        )
        self._health.add_to(self._server, self._threads)
        self._exchanges = exchanges
        for name in GRPC_LOGGERS:
            logging.getLogger(name).addFilter(of_grpc.filter)
        if exchanges is not None:
            exchanges.add_to(self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._server.start()
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def drain(self) -> None:
        """Makes health checks say that the server takes no new clients; it still answers calls."""
        self._health.enter_graceful_shutdown()

    def end_late(self) -> None:
        """Ends calls whose message has not come in time; somebody calls it now and then."""
        self._threads.end_late()

    def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, gives running ones ``grace_seconds`` to end, then cancels them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_seconds).wait(grace_seconds + 1)
        self._threads.close()
        self._pool.shutdown(wait=False)
        if self._exchanges is not None:
            self._exchanges.end_threads()


def _answering(method: Any, parse: Callable[[bytes], Message]) -> Answer:
    def answer(received: bytes, context: grpc.ServicerContext) -> Message:
        try:
            reply: Message = method(parse(received))
            return reply
        except DecodeError as error:  # without an error's name: the caller tries again
            context.abort(grpc.StatusCode.INTERNAL, str(error))
            raise AssertionError("abort returns") from error  # it raises
        except Exception as error:
            abort_with(context, error)

    return answer


# ---- the client ----


class ControlClient:
    """Control calls to one server, on a connection of their own.  Any thread may call.

    Each call ends within its timeout.  While the server cannot be reached the call is tried again:
    every control call may safely arrive twice.  Only Heartbeat is tried once, because a late one
    says nothing.

    [Note: dialling again]  A connection can die without a word: packets are dropped, and nothing
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
    """

    def __init__(self, endpoint: str, timeout_seconds: float, name: str = "") -> None:
        self.endpoint = endpoint
        self._name = name or endpoint
        self._timeout = timeout_seconds
        self._dialled = DialledChannel(*split_endpoint(endpoint))

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
        """
        reason = ""
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
                reason = "it is up, but shutting down"
            except grpc.RpcError as error:
                reason = str(from_rpc_error(error, self.endpoint, "a health check"))
                reason = reason.removeprefix(self.endpoint).lstrip(": ")
                self._dialled.drop(channel)
        raise Unreachable(f"{self._name}: no server there within {timeout_seconds:g} s: {reason}")

    def join(self, request: wire.JoinRequest, timeout: float | None = None) -> wire.JoinReply:
        """Joins the server's job.  protos/pserver/wire.proto says more, as for the calls below."""
        return self._call("Join", request, wire.JoinReply, timeout)

    def install(
        self, request: wire.InstallRequest, timeout: float | None = None
    ) -> wire.InstallReply:
        """Gives the server its program."""
        return self._call("Install", request, wire.InstallReply, timeout)

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
        """Leaves the job; does not wait for a server that is gone.  A connection that is broken is
        dialled again once.
        """
        return self._call("Leave", request, wire.LeaveReply, timeout, tries=2)

    def barrier(
        self, request: wire.BarrierRequest, timeout: float | None = None
    ) -> wire.BarrierReply:
        """Waits a second at most: see BarrierReply."""
        return self._call("Barrier", request, wire.BarrierReply, timeout)

    def rendezvous(
        self, request: wire.RendezvousRequest, timeout: float | None = None
    ) -> wire.RendezvousReply:
        """Gives the address at which trainers meet, or asks for it."""
        return self._call("Rendezvous", request, wire.RendezvousReply, timeout)

    def save(self, request: wire.SaveRequest, timeout: float = FILE_SECONDS) -> wire.SaveReply:
        """Writes what the server holds to its disk."""
        return self._call("Save", request, wire.SaveReply, timeout)

    def load(self, request: wire.LoadRequest, timeout: float = FILE_SECONDS) -> wire.LoadReply:
        """Reads what the server holds from its disk."""
        return self._call("Load", request, wire.LoadReply, timeout)

    def shrink(
        self, request: wire.ShrinkRequest, timeout: float = FILE_SECONDS
    ) -> wire.ShrinkReply:
        """Applies time decay to the tables' rows, then drops some of them."""
        return self._call("Shrink", request, wire.ShrinkReply, timeout)

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
        """Drops what a failed job has left."""
        return self._call("Reset", request or wire.ResetRequest(), wire.ResetReply, timeout)

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
        tries: int = 10**9,
    ) -> Reply:
        """One call, tried again while the connection breaks and the server has not said why."""
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            patience = left if name not in PROMPT_CALLS else min(left, seconds / TRIES)
            tries -= 1
            channel = None
            try:
                channel = self._dialled.present(patience)
                reply = self._ask(channel, name, request, patience)
            except (Unreachable, grpc.RpcError, ValueError) as error:
                if channel is not None and tries and self._dialled.replaced(channel):
                    deadline = time.monotonic() + seconds
                    continue
                failure, again = self._failure(error, name)
                if again and channel is not None:
                    self._dialled.drop(channel)
                if not again or not tries or time.monotonic() + pause >= deadline:
                    raise failure from error
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                assert isinstance(reply, kind)
                return reply

    def _ask(self, channel: grpc.Channel, name: str, request: Message, timeout: float) -> Message:
        """One try of the call of that name."""
        _, asked, answered = CALLS[name]
        call = channel.unary_unary(
            f"/{SERVICE}/{name}", asked.SerializeToString, answered.FromString
        )
        reply: Message = call(request, timeout=timeout)
        return reply

    def _failure(self, error: Exception, name: str) -> tuple[PServerError, bool]:
        """The error that a try has ended with, and whether another try may help."""
        again = not self._dialled.closed
        if isinstance(error, Unreachable):  # it knows the endpoint alone
            return Unreachable(str(error).replace(self.endpoint, self._name, 1)), again
        if isinstance(error, ValueError):  # grpcio's word for a closed channel
            text = f"{self._name}: {name} after the connection was closed"
            return Unreachable(text), again
        assert isinstance(error, grpc.RpcError)
        late = name in PROMPT_CALLS and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        again = again and (late or (error.code() in BROKEN and not named(error)))
        return from_rpc_error(error, self._name, name), again
