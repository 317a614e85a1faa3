"""Attacks of peers that have a key of the job: a trainer's, or an operator's that only reads.

They prove it, and then send what nobody should.  The trainer's HELLO is that of a stream of the
good trainer which was replaced long ago; an operator has a session to read with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import grpc

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access
from pserver.security.tokens import Role
from pserver.transport.grpc_stream import SERVICE, GrpcStream
from pserver.transport.registry import TRANSPORTS
from pserver.transport.shm import INLINE, PRELUDE, ShmStream
from pserver.transport.stream import Stream
from pserver.transport.tcp import TcpStream
from pserver.wire_pb2 import Frame, Hello, Kind, ObserveRequest
from tests.fuzz.attacks import payload_bytes
from tests.fuzz.inputs import FrameInput, Inputs
from tests.support.keyholders import say_hello

SECONDS = 5.0
# what a role may do, and what would change the job: its own sessions, files, and end
ALLOWED = {
    Role.TRAINER: ("Join", "Announce", "Save", "Load", "Shrink"),
    Role.OPERATOR: (
        "Join",
        "Announce",
        "Save",
        "Load",
        "Shrink",
        "Drain",
        "Reset",
        "Observe",
    ),
}


class Insider:
    """One attacker with a key, in one thread.

    Args:
        seed: of all inputs.
        endpoint: of the control service.
        ports: of the tensors, by transport.
        session: the good trainer's.
        access: what it proves.
        role: whose key that is.
    """

    def __init__(
        self,
        seed: int,
        endpoint: str,
        ports: Mapping[str, int],
        session: str,
        access: Access,
        role: Role,
    ) -> None:
        self._seed, self._endpoint, self._ports, self._session = seed, endpoint, ports, session
        self._access, self._role = access, role
        self._observer = ""
        self._control = ControlClient(endpoint, SECONDS, access=access)
        self._attacks: list[Callable[[Inputs], int]] = [
            self.calls,
            *(self._frames_over(name) for name in self._ports),
            self.calls,
            self._frames_over("grpc"),
        ]

    def observe(self) -> None:
        """An operator begins to read what the job holds, or goes on."""
        if self._role is not Role.OPERATOR:
            return
        known = {"session": self._observer} if self._observer else {"transports": ["tcp"]}
        try:
            self._observer = self._control.observe(ObserveRequest(**known)).session  # type: ignore[arg-type]
        except PServerError:
            self._observer = ""

    def attack(self, number: int) -> tuple[str, int]:
        """The attack of that number.

        Returns:
            Its name, and how many inputs it had.
        """
        inputs = Inputs(self._seed, number, ("", "0" * 32, self._observer))
        attack = self._attacks[number % len(self._attacks)]
        name = f"{self._role.word}: {getattr(attack, '__name__', 'frames')}"
        try:
            return name, attack(inputs)
        except (OSError, grpc.RpcError, PServerError):  # the server has said enough
            return name, 1

    def close(self) -> None:
        """Ends its connection."""
        self._control.close()

    def calls(self, inputs: Inputs) -> int:
        """Calls of all names, each with its proof; sometimes the proof of another call."""
        channel = self._control._dialled.present(SECONDS)
        for _ in range(3):
            call = inputs.call(ALLOWED[self._role])
            other = inputs.call().name if inputs.random.random() < 0.1 else call.name
            with suppress(grpc.RpcError, PServerError):
                proof = self._control._proof(channel, other, call.message, SECONDS)
                method = channel.unary_unary(f"/{SERVICE}/{call.name}")
                method(call.message, timeout=SECONDS, metadata=proof)
        return 3

    def _frames_over(self, transport: str) -> Callable[[Inputs], int]:
        def frames(inputs: Inputs) -> int:
            return self._frames(transport, inputs)

        frames.__name__ = f"{transport} frames"
        return frames

    def _frames(self, transport: str, inputs: Inputs) -> int:
        """HELLO with its proof, and frames."""
        host, _, control = self._endpoint.rpartition(":")
        port = self._ports.get(transport, int(control))
        stream = TRANSPORTS[transport].connect(
            host, port, timeout_seconds=SECONDS, keys=self._access.keys
        )
        impatient = threading.Timer(SECONDS, stream.cancel)  # frames may ask for what never comes
        impatient.start()
        frames = [*inputs.frames(), *inputs.frames()]
        try:
            session = self._observer if inputs.random.random() < 0.7 else ""
            hello = Hello(session=session or self._session, stream=0 if session else 1)
            hello.tables = inputs.random.random() < 0.3
            secret = self._access.secret
            say_hello(stream, None if secret is None else secret.of(self._role), port, hello)
            for frame in frames:
                _send(stream, frame)
            if inputs.random.random() < 0.5:
                stream.send(Frame(kind=Kind.PROBE))
                _read(stream)
        finally:
            impatient.cancel()
            stream.cancel()
        return len(frames)


def _send(stream: Stream, frame: FrameInput) -> None:
    if isinstance(stream, GrpcStream):
        stream.outgoing.put(frame.header + payload_bytes(frame.payload))
        return
    if isinstance(stream, ShmStream):
        prelude = PRELUDE.pack(INLINE, len(frame.header), len(frame.payload))
        stream._out.sendall(prelude + frame.header + frame.payload)
        return
    assert isinstance(stream, TcpStream), "the only other one"
    stream._sockets[0].send(frame.header, (frame.payload,), len(frame.payload))


def _read(stream: Stream) -> None:
    """What the server says until it answers PROBE, or ends the stream."""
    while (received := stream.receive()) is not None:
        if received[0].kind == Kind.PROBE:
            return
