"""``pserver status --ready``: whether servers take trainers, for probes of containers.

A probe runs every few seconds for as long as a server lives, so this imports neither torch nor the
protocol's messages: it asks gRPC's own health service.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pserver import timeouts
from pserver.config import split_endpoint
from pserver.errors import Unreachable, Untrusted
from pserver.security import keys as tls
from pserver.security.keys import Keys
from pserver.transport.endpoint import spell
from pserver.transport.grpc_security import open_channel


def show(endpoints: Sequence[str], out: TextIO = sys.stdout, keys: str | None = None) -> int:
    """Prints a line for each server.

    Args:
        endpoints: HOST:PORT of each server.
        keys: the folder of any keys of the cluster, where servers have keys.

    Raises:
        ValueError: there are no keys in that folder.

    Returns:
        0 if all of them take trainers, otherwise 1.
    """
    own = Keys(keys, ("operator", "trainer", "server")) if keys else None
    obstacles = [obstacle(endpoint, keys=own) for endpoint in endpoints]
    for endpoint, reason in zip(endpoints, obstacles, strict=True):
        print(f"{endpoint}: not ready: {reason}" if reason else f"{endpoint}: ready", file=out)
    return 1 if any(obstacles) else 0


def obstacle(
    endpoint: str, timeout_seconds: float = timeouts.CALL_SECONDS, keys: Keys | None = None
) -> str:
    """Why a server takes no trainers; "" if it does.

    Args:
        timeout_seconds: for each of the connection and the answer.
        keys: this process's, where the server has keys.
    """
    host, port = split_endpoint(endpoint)
    options = [("grpc.enable_http_proxy", 0)]  # that fetches packages, and has no servers behind it
    try:
        opened = open_channel(host, port, options, timeout_seconds, keys)
    except (Unreachable, Untrusted) as error:
        return str(error).removeprefix(f"{spell(host, port)}: ")
    with opened as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            if tls.speaks_tls(host, port) and keys is None:
                return f"it speaks TLS: {tls.ONE_SIDED}"
            return f"no answer to a health check: {error.details() or error.code().name}"
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "it is shutting down"
