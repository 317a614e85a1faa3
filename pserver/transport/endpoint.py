"""HOST:PORT as the operating system sees it: whether a process listens there, whether it is free,
and the peer of a connection.
"""

from __future__ import annotations

import socket
from urllib.parse import unquote

from pserver.errors import Unreachable


def spell(host: str, port: int) -> str:
    """``"HOST:PORT"``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def of_peer(peer: str) -> str:
    """gRPC's name of a peer (``"ipv4:10.0.0.1:5000"``, ``"ipv6:%5B::1%5D:5000"``) as HOST:PORT."""
    return unquote(peer.partition(":")[2])


def reach(host: str, port: int, timeout_seconds: float) -> str:
    """Resolves a host, and finds the address at which a process accepts a connection.

    Called before gRPC connects, which retries silently, reports less, and keeps resolved addresses.

    Returns:
        The address that accepted, as a number.

    Raises:
        Unreachable: none does within ``timeout_seconds``; the message names HOST:PORT and the
            system's reason.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_seconds) as connection:
            return str(connection.getpeername()[0])
    except OSError as error:
        raise Unreachable(f"{spell(host, port)}: {reason_of(error, timeout_seconds)}") from error


def reason_of(error: OSError, timeout_seconds: float) -> str:
    """The reason of a failed connection, in words."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no process listens there"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_seconds:.3g} s"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: {error.strerror}"
    return error.strerror or str(error)


def is_here(host: str) -> bool:
    """Whether ``host`` is an address of this network namespace."""
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.bind(info[4])
    except OSError:
        return False
    return True


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens; port 0 is any free one.

    Raises:
        OSError: one sentence that names HOST:PORT and the system's reason.
    """
    bound = None
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(info[0], info[1])
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(info[4])
        bound.listen()
    except OSError as error:
        if bound is not None:
            bound.close()
        raise OSError(f"cannot listen on {spell(host, port)}: {error.strerror or error}") from error
    return bound
