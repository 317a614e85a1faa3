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

from pserver.config import split_endpoint
from pserver.errors import Unreachable
from pserver.transport.endpoint import reach, spell

ASK_SECONDS = 3.0  # a probe is given more by the image and by the compose file


def show(endpoints: Sequence[str], out: TextIO = sys.stdout) -> int:
    """Prints a line for each server.

    Args:
        endpoints: HOST:PORT of each server.

    Returns:
        0 if all of them take trainers, otherwise 1.
    """
    obstacles = [obstacle(endpoint) for endpoint in endpoints]
    for endpoint, reason in zip(endpoints, obstacles, strict=True):
        print(f"{endpoint}: not ready: {reason}" if reason else f"{endpoint}: ready", file=out)
    return 1 if any(obstacles) else 0


def obstacle(endpoint: str, timeout_seconds: float = ASK_SECONDS) -> str:
    """Why a server takes no trainers; "" if it does.

    Args:
        timeout_seconds: for each of the connection and the answer.
    """
    host, port = split_endpoint(endpoint)
    try:
        address = reach(host, port, timeout_seconds)
    except Unreachable as error:
        return str(error).removeprefix(f"{spell(host, port)}: ")
    options = [("grpc.enable_http_proxy", 0)]  # that fetches packages, and has no servers behind it
    with grpc.insecure_channel(spell(address, port), options=options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            return f"no answer to a health check: {error.details() or error.code().name}"
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "it is shutting down"
