"""A client that knows the .proto files, gRPC and HMAC proves a key, and has the server prove its
own: what the files say is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.wire_pb2_grpc import ParameterServerStub

KEY = bytes(range(32))


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A server that asks for a key."""
    path = tmp_path / "operator.token"
    path.touch(0o600)
    path.write_text(f"operator:{KEY.hex()}")
    with Server(ServerConfig(token_file=str(path))) as server:
        yield server.endpoint


def code(key: bytes, *parts: str | bytes) -> bytes:
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    said = b"".join(struct.pack("<I", len(part)) + part for part in encoded)
    return hmac.new(key, said, hashlib.sha256).digest()


def test_the_proto_files_are_enough_to_prove_a_key(endpoint: str) -> None:
    """A trainer's, in Join and in HELLO."""
    port = endpoint.rpartition(":")[2]
    key = hmac.new(KEY, b"pserver trainer", hashlib.sha256).digest()
    with grpc.insecure_channel(endpoint) as channel:
        stub = ParameterServerStub(channel)  # type: ignore[no-untyped-call]  # generated
        mine = os.urandom(32)
        theirs = stub.Challenge(wire.ChallengeRequest(nonce=mine, role="trainer"), timeout=10)
        both = port, mine, theirs.nonce
        assert theirs.proof == code(key, "pserver 1", "server", "trainer", *both, "", "")

        request = wire.JoinRequest(
            protocol=3,
            fingerprint="f",
            manifest={"trainers": "1", "lane 0: mode": "sync"},
            transports=["grpc"],
        )
        digest = hashlib.sha256(request.SerializeToString()).digest()
        proof = code(key, "pserver 1", "client", "trainer", *both, "Join", digest)
        metadata = (
            ("pserver-role", "trainer"),
            ("pserver-client-nonce-bin", mine),
            ("pserver-server-nonce-bin", theirs.nonce),
            ("pserver-proof-bin", proof),
        )
        session = stub.Join(request, metadata=metadata, timeout=10).session
        assert session

        out: queue.Queue[wire.Frame | None] = queue.Queue()
        back = stub.Exchange(iter(out.get, None), timeout=30)
        out.put(wire.Frame(kind=wire.HELLO, hello=wire.Hello(nonce=mine, role="trainer")))
        hello = next(back).hello
        both = port, mine, hello.nonce
        assert hello.proof == code(key, "pserver 1", "server", "trainer", *both, "", "")
        fields = hashlib.sha256(f"{session}\n0\n0\n1\n0\n".encode()).digest()
        proof = code(key, "pserver 1", "client", "trainer", *both, "HELLO", fields)
        out.put(
            wire.Frame(kind=wire.HELLO, hello=wire.Hello(session=session, stream=1, proof=proof))
        )
        out.put(wire.Frame(kind=wire.PROBE))
        assert next(back).kind == wire.PROBE
        out.put(wire.Frame(kind=wire.BYE))
        out.put(None)
