"""HOST:PORT as the operating system sees it: whether a process listens there, whether it is free,
and which peer a connection leads to.
"""

from __future__ import annotations

import os
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

    Called before gRPC connects, which retries without a word, says less, and keeps what it has
    resolved.

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
        raise Unreachable(
            f"no answer at {spell(host, port)} within {timeout_seconds:g} s: "
            f"{error.strerror or error}"
        ) from error


def is_here(host: str) -> bool:
    """Whether ``host`` is an address of this network namespace."""
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.bind(info[4])
    except OSError:
        return False
    return True


def check_free(host: str, port: int) -> None:
    """Returns if this process may listen there.  Called before gRPC listens, which only logs a
    failure.

    Raises:
        OSError: one sentence that names HOST:PORT and the system's reason.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
    except OSError as error:
        raise OSError(f"cannot listen on {spell(host, port)}: {error.strerror or error}") from error


def cut(peer: str) -> bool:
    """Shuts down this process's connection to ``peer`` (HOST:PORT), which gRPC owns.

    pyarrow has no call that cancels an exchange at its accepting end.  When the connection is shut
    down, gRPC sees it end, and every call on it fails at once.

    Returns:
        False if there is no such connection.
    """
    port, found = int(peer.rpartition(":")[2]), False
    for name in os.listdir("/dev/fd"):
        copy = _socket_of(int(name))
        if copy is None:
            continue
        with copy:
            try:
                if copy.getpeername()[1] == port and _same_host(copy.getpeername()[0], peer):
                    copy.shutdown(socket.SHUT_RDWR)
                    found = True
            except (OSError, IndexError):  # not connected, or no internet address
                continue
    return found


def _socket_of(descriptor: int) -> socket.socket | None:
    """A second handle on an open socket; None if it is no socket, or was closed meanwhile."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _same_host(address: str, peer: str) -> bool:
    return address.removeprefix("::ffff:") == peer.rpartition(":")[0].strip("[]").removeprefix(
        "::ffff:"
    )
