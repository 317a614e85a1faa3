"""Attacks on the ports of a server, by number: what one sends depends on its number alone."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from random import Random
from typing import Any

import grpc

from pserver.transport import shm
from pserver.transport.frames import PAYLOAD_TAG
from pserver.transport.grpc_port import CLIENT_OPTIONS
from pserver.transport.grpc_stream import SERVICE
from pserver.transport.shm import GREETING, INLINE, PRELUDE
from pserver.transport.tcp import GREETING_MAGIC, PREFIX, Greeting
from pserver.wire_pb2 import Frame, Hello, Kind, ObserveReply, ObserveRequest
from tests.fuzz.http2 import UnfinishedCall, greeting
from tests.fuzz.inputs import FrameInput, Inputs

SECONDS = 5.0
HALF_OPEN = 1500  # connections that stay open and say nothing, or little
UNFINISHED = 32  # calls whose message does not end
LENGTHS = (0, 1, 4096, 4097, 2**22, 2**26, 2**26 + 1, 2**31, 2**32 - 1)
# what anybody may do where no key is asked for; an observer may let the job pause
OPEN_CALLS = ("Drain", "Reset", "Announce", "Join", "Save", "Load", "Observe")


class Attacker:
    """One attacker, in one thread.

    Args:
        seed: of all inputs.
        endpoint: of the control service.
        ports: "tcp" and "shm".
        session: a good trainer's, which a stranger has seen; its streams have greater numbers than
            the attacker's.
        without: calls that the attacker leaves alone.
    """

    def __init__(
        self,
        seed: int,
        endpoint: str,
        ports: Mapping[str, int],
        session: str,
        without: tuple[str, ...],
    ) -> None:
        self._seed, self._endpoint, self._ports = seed, endpoint, ports
        self._session, self._without = session, without
        self._observer = ""  # a session with which one reads, where anybody may
        self._channel = grpc.insecure_channel(endpoint, options=CLIENT_OPTIONS)
        self._half_open: deque[socket.socket] = deque()
        self._unfinished: deque[UnfinishedCall] = deque()
        self.attacks: list[Callable[[Inputs], int]] = [
            self.tcp_bytes,
            self.tcp_frames,
            self.tcp_frames,
            self.grpc_calls,
            self.grpc_calls,
            self.grpc_frames,
            self.control_bytes,
            self.half_open,
            self.unfinished,
            self.shm_frames,
        ]

    def observe(self) -> None:
        """Begins to read what the job holds, or goes on: an observer is forgotten otherwise."""
        if self._observer and self._observe(session=self._observer) is not None:
            return
        reply = self._observe(transports=["tcp"])
        self._observer = "" if reply is None else reply.session

    def _observe(self, **request: Any) -> ObserveReply | None:
        call = self._channel.unary_unary(
            f"/{SERVICE}/Observe", ObserveRequest.SerializeToString, ObserveReply.FromString
        )
        try:
            reply: ObserveReply = call(ObserveRequest(**request), timeout=SECONDS)
        except grpc.RpcError:
            return None
        return reply

    def attack(self, number: int) -> tuple[str, int]:
        """The attack of that number.

        Returns:
            Its name, and how many inputs it had.
        """
        inputs = Inputs(self._seed, number, ("", "0" * 32, self._observer))
        attack = self.attacks[number % len(self.attacks)]
        try:
            return attack.__name__, attack(inputs)
        except (OSError, grpc.RpcError):  # the server has said enough
            return attack.__name__, 1

    def close(self) -> None:
        for each in (*self._half_open, *self._unfinished):
            each.close()
        self._channel.close()

    # ---- sockets ----

    def _connect(self, control: bool = False) -> socket.socket:
        host, _, port = self._endpoint.rpartition(":")
        return socket.create_connection(
            (host, int(port) if control else self._ports["tcp"]), SECONDS
        )

    def tcp_bytes(self, inputs: Inputs) -> int:
        """Bytes in place of a greeting, or a greeting with some changed."""
        with self._connect() as connection:
            greeting = Greeting(inputs.random.choice((0, 0, 1, 63, 2**31)))
            near, far = socket.socketpair()
            with near, far:
                greeting.send(near)
                data = inputs.mutated(far.recv(100))
            if inputs.random.random() < 0.3:
                data = inputs.random.randbytes(99)
            connection.sendall(data)
            _read(connection, inputs.random)
        return 1

    def tcp_frames(self, inputs: Inputs) -> int:
        """A greeting, maybe HELLO, and frames."""
        frames = [self._hello(inputs.random), *inputs.frames(), *inputs.frames()]
        with self._connect() as connection:
            Greeting().send(connection)
            connection.recv(100)
            for frame in frames[inputs.random.random() < 0.2 :]:
                sizes = [len(frame.header), len(frame.payload)]
                if inputs.random.random() < 0.05:
                    sizes[inputs.random.randrange(2)] = inputs.random.choice(LENGTHS)
                connection.sendall(PREFIX.pack(*sizes) + frame.header + frame.payload)
            _read(connection, inputs.random)
        return len(frames)

    def _hello(self, random: Random) -> FrameInput:
        """Of an observer; or of the good trainer, as a stream that was replaced long ago."""
        if random.random() < 0.5:
            hello = Hello(session=self._observer)
        else:
            hello = Hello(session=self._session, stream=1)
        return FrameInput(Frame(kind=Kind.HELLO, hello=hello).SerializeToString(), b"")

    def control_bytes(self, inputs: Inputs) -> int:
        """Bytes in place of HTTP/2, or HTTP/2 with some changed."""
        with self._connect(control=True) as connection:
            data = greeting() + inputs.random.randbytes(inputs.random.choice((0, 9, 200)))
            if inputs.random.random() < 0.5:
                data = inputs.mutated(data)
            connection.sendall(data)
            _read(connection, inputs.random)
        return 1

    def half_open(self, inputs: Inputs) -> int:
        """Connections that stay, and have said little."""
        for _ in range(10):
            control = inputs.random.random() < 0.5
            connection = self._connect(control)
            said = greeting() if control else GREETING_MAGIC
            connection.sendall(said[: inputs.random.randrange(len(said) + 1)])
            self._half_open.append(connection)
        while len(self._half_open) > HALF_OPEN:
            self._half_open.popleft().close()
        return 10

    def unfinished(self, inputs: Inputs) -> int:
        """A call of up to 4 MB, of which the end does not come."""
        host, _, port = self._endpoint.rpartition(":")
        size = inputs.random.choice((2**16, 2**20, 2**22))
        method = f"/{SERVICE}/{inputs.random.choice(('Join', 'Install', 'Meet', 'Exchange'))}"
        call = UnfinishedCall((host, int(port)), method, size, 0.5)
        self._unfinished.append(call)
        if len(self._unfinished) > UNFINISHED:
            self._unfinished.popleft().close()
        call.send(inputs.random.randrange(size))
        return 1

    def shm_frames(self, inputs: Inputs) -> int:
        """A good greeting or a bad one, and frames."""
        near, far = socket.socketpair()
        segment = shm.make() if inputs.random.random() < 0.7 else os.memfd_create("x")
        frames = [self._hello(inputs.random), *inputs.frames()]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, near, far:
            try:
                connection.settimeout(SECONDS)
                connection.connect(f"\0pserver-{self._ports['shm']}")
                said = GREETING if inputs.random.random() < 0.8 else inputs.mutated(GREETING)
                rights = array.array("i", [segment, far.fileno()])
                connection.sendmsg([said or b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                connection.recv(10)
                for frame in frames:
                    kind = inputs.random.choice((INLINE, INLINE, INLINE, 0, 2, 3, 4, 5, 77))
                    sizes = [len(frame.header), len(frame.payload)]
                    if inputs.random.random() < 0.05:
                        sizes[inputs.random.randrange(2)] = inputs.random.choice(LENGTHS)
                    connection.sendall(PRELUDE.pack(kind, *sizes) + frame.header + frame.payload)
            finally:
                os.close(segment)
        return len(frames)

    # ---- gRPC ----

    def grpc_calls(self, inputs: Inputs) -> int:
        """Calls of all names."""
        for _ in range(5):
            call = inputs.call(self._without)
            method = self._channel.unary_unary(f"/{SERVICE}/{call.name}")
            with suppress(grpc.RpcError):
                method(call.message, timeout=SECONDS)
        return 5

    def grpc_frames(self, inputs: Inputs) -> int:
        """An Exchange."""
        frames = [self._hello(inputs.random), *inputs.frames(), *inputs.frames()]

        def messages() -> Iterator[bytes]:
            for frame in frames:
                yield frame.header + payload_bytes(frame.payload)

        call = self._channel.stream_stream(f"/{SERVICE}/Exchange")(messages(), timeout=SECONDS)
        with suppress(grpc.RpcError):
            for _ in call:
                if inputs.random.random() < 0.2:
                    call.cancel()
        return len(frames)


def payload_bytes(payload: bytes) -> bytes:
    """A payload as the field that stands behind a frame's header."""
    size, number = b"", len(payload)
    while number > 127:
        size, number = size + bytes((number & 127 | 128,)), number >> 7
    return bytes((PAYLOAD_TAG,)) + size + bytes((number,)) + payload


def _read(connection: socket.socket, random: Random) -> None:
    """Reads the answer, or leaves without."""
    if random.random() < 0.5:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.05)
        with suppress(OSError):
            while connection.recv(2**16):
                pass
