"""What a process learns that sits on a server's port: a random number, and the word of a role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from pserver import wire_pb2 as wire
from pserver.control.control_client import ControlClient
from pserver.errors import NotAllowed, Unreachable
from pserver.security.access import Access, Guard
from pserver.security.tokens import NONCE_BYTES, Role, Secret
from pserver.transport.registry import TRANSPORTS
from pserver.transport.stream import Stream, greet
from pserver.wire_pb2 import Frame, Hello, Kind
from tests.support.one_parameter import SECONDS, Trainer

Answer = Callable[[wire.ChallengeRequest], wire.ChallengeReply]
SILENCE_SECONDS = 0.3


class Squatter(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers health checks and challenges, and writes down all calls."""

    def __init__(self, answer: Answer) -> None:
        self.heard: list[tuple[str, bytes, list[str]]] = []
        self._answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Each call of the service."""
        name = str(details.method).rpartition("/")[2]
        keys = [key for key, _ in details.invocation_metadata]

        def heard(received: bytes, context: grpc.ServicerContext) -> bytes:
            self.heard.append((name, received, keys))
            if name == "Challenge":
                asked = wire.ChallengeRequest.FromString(received)
                return self._answer(asked).SerializeToString()
            return b""

        if "ParameterServer" not in str(details.method):
            return None
        return grpc.unary_unary_rpc_method_handler(heard)


@contextmanager
def squatting(answer: Answer) -> Iterator[tuple[str, Squatter]]:
    """A squatter's endpoint."""
    squatter, pool = Squatter(answer), futures.ThreadPoolExecutor(4)
    server, standing = grpc.server(pool), health.HealthServicer()
    server.add_generic_rpc_handlers((squatter,))
    health_pb2_grpc.add_HealthServicer_to_server(standing, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    standing.set("pserver.ParameterServer", 1)
    yield f"127.0.0.1:{port}", squatter
    server.stop(None).wait()
    pool.shutdown()


SECRET = Secret.make()
ELSEWHERE = Guard(Access(SECRET), 1)  # a live server of the same job, on another port


def passed_on(asked: wire.ChallengeRequest) -> wire.ChallengeReply:
    """The answer of another server, to which the question is passed on."""
    nonce, proof = ELSEWHERE.answer(asked.role, asked.nonce)
    return wire.ChallengeReply(nonce=nonce, proof=proof)


ANSWERS: dict[str, Answer] = {
    "nothing": lambda asked: wire.ChallengeReply(),
    "made up": lambda asked: wire.ChallengeReply(nonce=bytes(32), proof=bytes(32)),
    "an echo": lambda asked: wire.ChallengeReply(nonce=asked.nonce, proof=asked.nonce),
    "passed on": passed_on,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_squatter_on_the_control_port_hears_a_challenge_and_no_more(answer: str) -> None:
    """No plan, no names, no session, whatever he answers and whatever he is asked for."""
    with squatting(ANSWERS[answer]) as (endpoint, squatter):
        access = Access(SECRET.of(Role.TRAINER))
        with pytest.raises(NotAllowed):
            Trainer(endpoint, access=access)
        control = ControlClient(endpoint, SECONDS, access=access)
        calls = control.status, lambda: control.heartbeat(wire.HeartbeatRequest(session="s"))
        for call in calls:
            with pytest.raises(NotAllowed):
                call()
        control.close()

    assert len(squatter.heard) == 3
    for name, received, metadata in squatter.heard:
        asked = wire.ChallengeRequest.FromString(received)
        assert name == "Challenge" and not [key for key in metadata if key.startswith("pserver")]
        assert asked == wire.ChallengeRequest(nonce=asked.nonce, role="trainer")
        assert len(asked.nonce) == NONCE_BYTES


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm", "inprocess"])
@pytest.mark.parametrize("answer", [*ANSWERS, "silence"])
def test_a_squatter_on_the_port_of_tensors_hears_a_nonce_and_no_more(
    transport: str, answer: str
) -> None:
    """No session and no tensor; one who says nothing is waited for as long as the caller says."""
    heard: list[Frame] = []

    def squat(stream: Stream) -> None:
        while (received := stream.receive()) is not None:
            heard.append(received[0])
            if answer != "silence":
                hello = received[0].hello
                said = ANSWERS[answer](wire.ChallengeRequest(nonce=hello.nonce, role=hello.role))
                reply = Hello(nonce=said.nonce, proof=said.proof)
                stream.send(Frame(kind=Kind.HELLO, hello=reply))

    listener = TRANSPORTS[transport].listen(squat)
    stream = TRANSPORTS[transport].connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    access = Access(SECRET.of(Role.TRAINER))
    with pytest.raises(Unreachable if answer == "silence" else NotAllowed):
        greet(stream, Hello(session="sniffed"), access, "127.0.0.1:6174", SILENCE_SECONDS)
    listener.close(0.0)

    assert len(heard) == 1
    assert heard[0].hello == Hello(nonce=heard[0].hello.nonce, role="trainer")
