"""Shared memory between processes of one host: payloads in a segment that both ends map, everything
else over unix sockets.

::

    sender      copies a payload into the next slot, then sends the header over the socket
    receiver    reads the header, returns a view of the slot; frees the slot when it is asked for
                the next frame

A stream has two sockets, one for each direction: frames go down a socket and free slots come back
on it, so that a thread that sends and a thread that receives never read each other's messages.
Every wait is a wait for a socket in the kernel: the sender's for a free slot, the receiver's for a
frame.  A peer that dies closes its sockets, which ends every wait at once.  A payload too small for
a slot to pay travels behind its header.  Where the accepting end has offered a segment, large
payloads are copied once, to where they belong: see zones.py.

[Note: finding each other]  The listener's "port" is a random number, which is part of the name of
its socket in the abstract namespace: it is no file, and ends with the process.  That namespace is
as wide as the network namespace, so a trainer on another host, or in a container with a network of
its own, finds no listener there and takes the next transport.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from functools import partial

from pserver.errors import Unreachable
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security.keys import Keys
from pserver.transport import shm_ring
from pserver.transport.accept_loop import AcceptLoop
from pserver.transport.endpoint import spell
from pserver.transport.open_streams import OpenStreams
from pserver.transport.shm_ring import Ring
from pserver.transport.shm_stream import ShmStream
from pserver.transport.stream import Handler

GREETING = b"pserver shm 2"  # sent with the segment and the socket of the other direction
WELCOME = b"ok"
GREETING_SECONDS = 5.0
_PEER = struct.Struct("3i")  # struct ucred: process, user, group
MAX_PORT = 2**32 - 1  # of JoinReply.data_port


class ShmListener:
    """A listening unix socket in the abstract namespace.

    Attributes:
        port: the number in the socket's name.
    """

    def __init__(self, handle: Handler, port: int, limits: Limits) -> None:
        os.close(shm_ring.make())  # raises where segments do not work, so that shm is not offered
        self.port = port or 1 + secrets.randbelow(MAX_PORT)
        self._streams = OpenStreams(handle)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(_name(self.port))
            listening.listen()
        except OSError as error:
            listening.close()
            raise OSError(
                f"cannot listen on shared memory's number {self.port}: {error.strerror or error}"
            ) from error
        self._accepting = AcceptLoop(
            listening, partial(_greeted, limits), self._streams, f"shm {self.port}", limits
        )

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        self._accepting.close()
        self._streams.close(grace_seconds)


def listen(
    handle: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits = ANY_FIRST_FRAME,
) -> ShmListener:
    """Accepts streams from this host.

    Args:
        host: ignored.
        port: the number in the socket's name; 0 is a random one.
        limits: how many connections there may be.

    Raises:
        OSError: this system has no such memory, or no room for it; one sentence.
    """
    return ShmListener(handle, port, limits)


def connect(host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None) -> ShmStream:
    """Opens a stream.

    Args:
        keys: ignored: nothing leaves the host.

    Raises:
        Unreachable: no listener of that number is on this host, or one of the ends has no room for
            a segment.
    """
    here = spell(host, port)
    near, far = socket.socketpair()
    outgoing, segment = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), -1
    try:
        segment = shm_ring.make()
        ours, theirs = shm_ring.attach(segment)
        outgoing.settimeout(timeout_seconds)
        outgoing.connect(_name(port))
        _check_peer(outgoing)
        socket.send_fds(outgoing, [GREETING], [segment, far.fileno()])
        if outgoing.recv(len(WELCOME)) != WELCOME:
            raise OSError("the server could not take the segment")
        outgoing.settimeout(None)
    except OSError as error:
        for end in (near, outgoing):
            end.close()
        reason = error.strerror or error
        raise Unreachable(
            f"no shared memory with {here} within {timeout_seconds:g} s: {reason}"
        ) from error
    finally:
        far.close()
        if segment >= 0:
            os.close(segment)
    return ShmStream(here, (outgoing, Ring(ours)), (near, Ring(theirs)), accepting=False)


def _greeted(limits: Limits, connection: socket.socket) -> ShmStream:
    """The accepting end of a new connection.

    Raises:
        OSError: the peer is no client of ours, or its segment cannot be used.
    """
    connection.settimeout(GREETING_SECONDS)
    pid = _check_peer(connection)
    greeting, descriptors, _, _ = socket.recv_fds(
        connection, len(GREETING), 2, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if (
            greeting != GREETING
            or len(descriptors) != 2
            or not stat.S_ISSOCK(os.fstat(descriptors[1]).st_mode)
        ):
            raise OSError(
                f"expected {GREETING!r} with a segment and a socket, got {greeting!r} with "
                f"{len(descriptors)}"
            )
        theirs, ours = shm_ring.attach(descriptors[0])
        back = socket.socket(fileno=os.dup(descriptors[1]))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        connection.sendall(WELCOME)
    except OSError:
        back.close()
        raise
    connection.settimeout(None)
    back.settimeout(None)
    return ShmStream(
        f"process {pid} of this host",
        (back, Ring(ours)),
        (connection, Ring(theirs)),
        True,
        limits.hello_bytes,
    )


def _check_peer(connection: socket.socket) -> int:
    """The process at the other end, which is this user's or root's: any process of the host can
    take the name of a socket, or connect to it.

    Raises:
        OSError: it is another user's.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise OSError(f"expected a process of user {os.geteuid()}, got one of user {user}")
    return int(pid)


def _name(port: int) -> str:
    return f"\0pserver-{port}"
