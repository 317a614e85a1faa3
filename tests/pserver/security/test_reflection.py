"""gRPC reflection: whom a server tells of its service."""

from __future__ import annotations

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pserver.config import ServerConfig
from pserver.control.control_server import ControlServer
from pserver.job.job import Job
from pserver.security.access import OPEN, Access
from pserver.security.tokens import Secret
from pserver.transport.grpc_port import CLIENT_OPTIONS
from pserver.transport.grpc_security import open_channel
from tests.support.cluster_keys import keys_of

SECONDS = 10.0


@pytest.mark.parametrize(
    ("access", "insecure", "answers"),
    [
        (OPEN, False, False),
        (OPEN, True, True),
        (Access(Secret.make()), False, False),
        (Access(keys=keys_of("server")), False, True),
    ],
    ids=["open", "insecure", "a key", "keys"],
)
def test_reflection_is_for_those_who_have_a_certificate(
    access: Access, insecure: bool, answers: bool
) -> None:
    """Or where the user has said that nobody else is there."""
    server = ControlServer("127.0.0.1", 0, access, insecure=insecure)
    server.start(Job(ServerConfig(), {}), None)
    keys = None if access.keys is None else keys_of("trainer")
    with open_channel("127.0.0.1", server.port, CLIENT_OPTIONS, SECONDS, keys) as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        try:
            assert next(stub.ServerReflectionInfo(asked, timeout=SECONDS)) is not None
        except grpc.RpcError as error:
            assert not answers and error.code() is grpc.StatusCode.UNIMPLEMENTED
        else:
            assert answers
    server.stop(0.0)
