"""Peers of a server that asks for a key: with none, another job's, a trainer's, an operator's; and
calls and streams that are made by hand, as a stranger makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import grpc
from google.protobuf.message import Message

from pserver import wire_pb2 as wire
from pserver.config import split_endpoint
from pserver.control.rpc_errors import from_rpc_error
from pserver.errors import PServerError
from pserver.security import tokens
from pserver.security.tokens import Challenge, Proof, Role, Secret, client_code, hello_bytes
from pserver.transport.grpc_stream import SERVICE
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Frame, Hello, Kind
from tests.support.stranger import send_bytes

SECONDS = 20.0
NONCE = bytes(range(32))
KEYS = ("no key", "another job's", "a trainer's", "an operator's")


def key_of(name: str, secret: Secret) -> Secret | None:
    """The key that a peer of this name has, where the job's secret is this."""
    return {
        "no key": None,
        "another job's": Secret.make(),
        "a trainer's": secret.of(Role.TRAINER),
        "an operator's": secret,
    }[name]


def role_of(name: str) -> Role:
    """What a peer of this name may do."""
    return {"a trainer's": Role.TRAINER, "an operator's": Role.OPERATOR}.get(name, Role.NOBODY)


class Caller:
    """Control calls made by hand, which no proof of the server holds back.

    Attributes:
        sent: the request and the metadata of each call.
    """

    def __init__(self, endpoint: str, key: Secret | None) -> None:
        self.endpoint, self._key = endpoint, key
        self._port = split_endpoint(endpoint)[1]
        self._channel = grpc.insecure_channel(endpoint)
        self.sent: list[tuple[str, bytes, tokens.Metadata]] = []

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, name: str, request: Message) -> None:
        """One call; its reply is of no interest.

        Raises:
            PServerError: what the server says.
        """
        said = request.SerializeToString()
        self.repeat(name, said, self._metadata(name, said))

    def repeat(self, name: str, said: bytes, metadata: tokens.Metadata) -> None:
        """A call as it was recorded."""
        self.sent.append((name, said, metadata))
        self._ask(name, said, metadata)

    def _metadata(self, name: str, said: bytes) -> tokens.Metadata:
        if self._key is None:
            return ()
        asked = wire.ChallengeRequest(nonce=NONCE, role=self._key.role.word)
        answer = self._ask("Challenge", asked.SerializeToString(), ())
        nonce = wire.ChallengeReply.FromString(answer).nonce
        challenge = Challenge(self._key.role, self._port, NONCE, nonce)
        code = client_code(self._key, challenge, name, said)
        return tokens.to_metadata(Proof(self._key.role.word, NONCE, nonce, code))

    def _ask(self, name: str, said: bytes, metadata: tokens.Metadata) -> bytes:
        call = self._channel.unary_unary(f"/{SERVICE}/{name}")
        try:
            answer: bytes = call(said, timeout=SECONDS, metadata=metadata)
            return answer
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint, name) from error


def say_hello(stream: Stream, key: Secret | None, port: int, hello: Hello) -> list[Frame]:
    """HELLO by hand; returns the frames that were sent."""
    sent = []
    if key is not None:
        first = Frame(kind=Kind.HELLO, hello=Hello(nonce=NONCE, role=key.role.word))
        stream.send(first)
        received = stream.receive()
        assert received is not None and received[0].kind == Kind.HELLO, received
        challenge = Challenge(key.role, port, NONCE, received[0].hello.nonce)
        fields = hello.session, hello.trainer_id, hello.lane, hello.stream, hello.tables
        hello.proof = client_code(key, challenge, "HELLO", hello_bytes(*fields))
        sent.append(first)
    last = Frame(kind=Kind.HELLO, hello=hello)
    stream.send(last)
    return [*sent, last]


def answers(stream: Stream, frames: Sequence[Frame]) -> list[Frame]:
    """Sends frames, and then what the server says until the stream ends or PROBE is answered."""
    found: list[Frame] = []
    # it may end the stream at any of them; what it has said before can still be read
    with suppress(PServerError):
        for frame in (*frames, Frame(kind=Kind.PROBE)):
            if frame.kind:
                stream.send(frame)
            else:  # no client of ours sends that
                send_bytes(stream, Frame(step=1).SerializeToString())
    with suppress(PServerError):
        while (received := stream.receive()) is not None:
            found.append(received[0])
            if received[0].kind == Kind.PROBE:
                break
    stream.cancel()
    return found
