"""The service of control calls over gRPC, with health checks and reflection.

No call has any logic here: the service passes each request to the job's method of the same name,
when the caller has proved its right to call: see ``pserver/security``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from pserver import wire_pb2 as wire
from pserver.control.calls import CALLS, Controlled
from pserver.control.rpc_errors import abort_with
from pserver.errors import PServerError
from pserver.limits import Limits
from pserver.security import tokens
from pserver.security.access import (
    OPEN,
    PEERS,
    Access,
    Guard,
    asks_for,
    check,
    is_logged,
    role_for_call,
)
from pserver.security.tokens import Stale
from pserver.telemetry.logs import LimitedLog, RecentLines
from pserver.transport.grpc_port import Answer, CallThreads, GrpcPort, HealthService
from pserver.transport.grpc_security import bearer_of
from pserver.transport.grpc_stream import SERVICE, Exchanges

log = logging.getLogger(__name__)
of_anybody = LimitedLog(log)
of_grpc = LimitedLog(log)  # messages that are none, to reflection for one
GRPC_LOGGERS = ("grpc._common", "grpc._server")

REFLECTION_THREADS = 4


class ControlServer:
    """A gRPC server of control calls, health checks, reflection and (where offered) tensor streams.

    It binds its port at once and answers after :meth:`start`.

    Args:
        host, port: where to listen; port 0 is any free one.
        access: what it asks of callers.
        limits: what it takes from its peers.
        insecure: every peer is trusted: reflection needs no keys.

    Attributes:
        port: the one that it is bound to.
        guard: the admission of callers, on the port's streams too.

    Raises:
        OSError: it cannot listen there; one sentence.
        ValueError: the access has a trainer's key.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: Access = OPEN,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        insecure: bool = False,
    ) -> None:
        self._reflects = insecure or access.keys is not None
        # of reflection, whose calls may last; all others have threads of their own
        self._pool = ThreadPoolExecutor(REFLECTION_THREADS, thread_name_prefix="reflection")
        self._grpc = GrpcPort(host, port, self._pool, access.keys, limits)
        self._threads = CallThreads(limits, self._grpc.peer)
        self._health = HealthService(self._welcome)
        self._exchanges: Exchanges | None = None
        self._said = RecentLines()
        self.port = self._grpc.port
        try:
            self.guard = Guard(access, self.port)
        except ValueError:
            self.stop(0.0)
            raise

    def start(self, job: Controlled, exchanges: Exchanges | None) -> None:
        """Answers calls from here on, with the methods of ``job``."""
        methods = {
            name: self._threads.handler(name, self._answering(name, getattr(job, method)))
            for name, (method, _, _) in CALLS.items()
        }
        methods["Challenge"] = self._threads.handler("Challenge", self._challenge)
        self._grpc.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, methods),)
        )
        self._health.add_to(self._grpc.server, self._threads)
        self._exchanges = exchanges
        for name in GRPC_LOGGERS:
            logging.getLogger(name).addFilter(of_grpc.filter)
        if exchanges is not None:
            exchanges.add_to(self._grpc)
        if self._reflects:  # with keys to those who have some: they are asked for by TLS
            reflection.enable_server_reflection(
                (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc.server
            )
        self._grpc.start()
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def drain(self) -> None:
        """Makes health checks say that the server takes no new clients; it still answers calls."""
        self._health.enter_graceful_shutdown()

    def end_late(self) -> None:
        """Ends calls whose message is overdue; called from time to time."""
        self._threads.end_late()

    def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, gives running ones ``grace_seconds`` to end, then cancels them."""
        self._health.enter_graceful_shutdown()
        self._grpc.stop(grace_seconds)
        self._threads.close()
        self._pool.shutdown(wait=False)
        if self._exchanges is not None:
            self._exchanges.end_threads()

    def _challenge(self, received: bytes, context: grpc.ServicerContext) -> Message:
        request = wire.ChallengeRequest.FromString(received)
        try:
            nonce, proof = self.guard.answer(request.role, request.nonce)
        except PServerError as error:
            abort_with(context, error)
        return wire.ChallengeReply(nonce=nonce, proof=proof)

    def _answering(self, name: str, method: Callable[[Any], Message]) -> Answer:
        def answer(received: bytes, context: grpc.ServicerContext) -> Message:
            try:
                return method(self._admitted(name, received, context))
            except (Stale, DecodeError) as error:
                stale = isinstance(error, Stale)
                # without an error's name: the caller tries again
                status = grpc.StatusCode.UNAVAILABLE if stale else grpc.StatusCode.INTERNAL
                context.abort(status, str(error))
                raise AssertionError("abort returns") from error  # it raises
            except Exception as error:
                abort_with(context, error)

        return answer

    def _welcome(self, context: grpc.ServicerContext) -> None:
        """A call that needs no proof, and may last: it may where there is nothing to prove, or the
        caller has a certificate.
        """
        if self.guard.is_open or bearer_of(context) is not None:
            self._grpc.admit(context)

    def _say(self, name: str, text: str) -> None:
        """Logs a call; where anyone may call, not every one.  Servers call one another in every
        job: that is for who looks for an error in it.
        """
        level = logging.DEBUG if name in PEERS else logging.INFO
        if self.guard.is_open:
            of_anybody.log(name, text, level)
        else:
            log.log(level, "%s", text)

    def _admitted(self, name: str, received: bytes, context: grpc.ServicerContext) -> Message:
        """Returns the request, if its caller is allowed to make it."""
        _, kind, _ = CALLS[name]
        proof = tokens.from_metadata(context.invocation_metadata())
        bearer = bearer_of(context)
        of_peer = name in PEERS
        role = self.guard.admit(name, received, proof, bearer, of_peer=of_peer)
        request = kind.FromString(received)
        check(role, role_for_call(name, request), name)
        self._grpc.admit(context)
        if is_logged(name, request):
            key = "without a key"
            if not self.guard.is_open:
                key = f"with the job's secret, as its {role.word}"
            key = key if bearer is None else f"with the key of {bearer}"
            again = asks_for(name, request)
            if not again or self._said.is_new((name, key, again)):
                self._say(name, f"{name}, {key}, from {self._grpc.peer(context)}")
        return request
