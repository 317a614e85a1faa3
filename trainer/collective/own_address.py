"""Where other trainers reach this host."""

from __future__ import annotations

import socket

from pserver.config import split_endpoint


def own_address(endpoint: str) -> str:
    """This host's address on the way to an endpoint."""
    host, port = split_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
