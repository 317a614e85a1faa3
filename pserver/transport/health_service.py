"""The standard health service of gRPC, with bounds."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2

from pserver.transport.call_threads import CallThreads

MOST_WATCHES = 64  # calls of Watch, at a time


class HealthService(health.HealthServicer):  # type: ignore[misc]  # it has no types
    """Health checks with threads of their own, and few calls of Watch at a time, as each lasts.

    Args:
        welcome: is told of each call that lasts.
    """

    def __init__(self, welcome: Callable[[grpc.ServicerContext], None]) -> None:
        super().__init__()
        self._welcome = welcome
        self._watching = 0  # calls of Watch
        self._counting = Lock()  # guards it

    def add_to(self, server: grpc.Server, threads: CallThreads) -> None:
        """Adds the service to a server."""
        asked, answered = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse

        def check(received: bytes, context: grpc.ServicerContext) -> Message:
            reply: Message = self.Check(asked.FromString(received), context)
            return reply

        methods = {
            "Check": threads.handler("Check", check),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, asked.FromString, answered.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods),)
        )

    def Watch(self, request: Any, context: grpc.ServicerContext, send: Any = None) -> Any:  # noqa: N802  # grpc's
        """Tells each change of a service's status, until the caller ends it."""
        with self._counting:
            full = self._watching >= MOST_WATCHES
            self._watching += not full
        if full:
            what = f"expected at most {MOST_WATCHES} calls of Watch at a time"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        context.add_callback(self._watched)
        self._welcome(context)
        return super().Watch(request, context, send)

    def _watched(self) -> None:
        with self._counting:
            self._watching -= 1
