"""Connections that die, with a word or without one, while new ones are possible: the trainer dials
again, and no job is lost.

The trainers reach their server through a path of real sockets that a test can break.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import torch

from pserver import timeouts
from pserver.client import stream
from pserver.client.client import Client
from pserver.config import ServerConfig
from pserver.errors import ServerLost
from pserver.service.server import Server
from tests.faults.network_path import NetworkPath
from tests.support.one_parameter import NUMBERS, SECONDS, Trainer
from tests.support.tiers import RARE
from tests.support.waiting import eventually

TIMEOUT = 2.5  # the heartbeat's
ADDRESS, MOVED = "127.0.0.2", "127.0.0.3"
NETWORK = ("tcp", "grpc")
STEPS = 4


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(stream, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(timeouts, "WORKING_SECONDS", 0.1)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig(heartbeat_timeout_seconds=TIMEOUT)) as server:
        yield server


def path_to(server: Server, address: str = ADDRESS) -> NetworkPath:
    return NetworkPath(address, [port for _, port in ports(server)])


def ports(server: Server) -> list[tuple[str, int]]:
    return [(name, port) for name, port in server.job.transports.items() if name != "shm"]


@pytest.fixture
def path(server: Server) -> Iterator[NetworkPath]:
    with path_to(server) as path:
        yield path


def through(path: str, server: Server) -> str:
    return f"{path}:{server.job.transports['grpc']}"


def redials(client: Client) -> int:
    return client._control.redials


@pytest.mark.parametrize("transport", NETWORK)
@pytest.mark.parametrize("cut", ["drop", "reset"])
def test_a_dead_connection_is_dialled_again(
    server: Server, path: NetworkPath, transport: str, cut: str
) -> None:
    """Every connection is cut, before a step and in the middle of one; heartbeats and streams go
    over new ones, and each step is applied once.
    """
    trainer = Trainer(through(ADDRESS, server), transports=(transport,))
    trainer.step(1, 1.0)
    getattr(path, cut)()
    trainer.step(2, 1.0)
    eventually(lambda: cut == "reset" or redials(trainer.client) == 1)
    answer = trainer.channel.begin(trainer.destination)
    trainer.channel.push(3, [("w", torch.full((1000,), 1.0))])
    getattr(path, cut)()
    trainer.channel.commit(3, {0: NUMBERS})
    answer.result(timeout=SECONDS)
    eventually(lambda: cut == "reset" or redials(trainer.client) == 2)
    trainer.step(4, 1.0)

    assert trainer.channel.reconnects >= 2
    assert torch.equal(trainer.value, torch.full((1000,), 1.0 - STEPS * 0.5))
    assert server.job.failure is None
    trainer.client.leave()


@pytest.mark.parametrize("transport", ["shm", *map(RARE, NETWORK)])
def test_a_server_that_makes_a_trainer_wait_is_heard(server: Server, transport: str) -> None:
    """A step waits for another trainer for longer than a silence may last: nothing is sent again,
    because the server says that it works on it.
    """
    endpoint = through("127.0.0.1", server)
    first, second = (Trainer(endpoint, number, 2, (transport,)) for number in range(2))
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.step, 1, 1.0)
        threading.Event().wait(1.5 * TIMEOUT)  # the wait itself is what is tested
        assert not waiting.done()
        second.step(1, 1.0)
        waiting.result(timeout=SECONDS)

    assert first.channel.reconnects == 0
    for trainer in (first, second):
        trainer.client.leave()


@pytest.mark.parametrize("cut", ["drop", "reset"])
def test_a_call_on_a_dead_connection_is_asked_again(
    server: Server, path: NetworkPath, cut: str
) -> None:
    """A barrier waits for the other trainer when its connection dies."""
    first = Trainer(through(ADDRESS, server), 0, 2)
    second = Trainer(through("127.0.0.1", server), 1, 2)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.client.meetings.barrier, "epoch")
        eventually(lambda: bool(server.job._members.by_trainer[0].waiting))
        getattr(path, cut)()
        eventually(lambda: cut == "reset" or redials(first.client) == 1)
        second.client.meetings.barrier("epoch")
        waiting.result(timeout=SECONDS)
    for trainer in (first, second):
        trainer.client.leave()


@pytest.mark.parametrize(
    ("transport", "before", "cut"),
    [
        ("tcp", 0, "drop"),
        ("tcp", 1, "reset"),
        ("tcp", 2, "drop"),
        ("grpc", 0, "reset"),
        ("grpc", 1, "drop"),
        ("grpc", 2, "reset"),
        ("grpc", 3, "drop"),
        *(RARE("tcp", before, cut) for before, cut in enumerate(("reset", "drop", "reset"))),
        *(RARE("grpc", before, cut) for before, cut in enumerate(("drop", "reset") * 2)),
    ],
)
def test_a_cut_while_joining_is_tried_again(
    server: Server, path: NetworkPath, transport: str, cut: str, before: int
) -> None:
    """Two connections in a row are dead, from the first one of a trainer to those of its stream."""
    path.spoil(2, cut, after=before)  # gRPC's dial is two connections: one finds the address
    trainer = Trainer(through(ADDRESS, server), transports=(transport,))
    trainer.step(1, 1.0)

    assert torch.equal(trainer.value, torch.full((1000,), 0.5))
    assert path.spoilt > 0
    trainer.client.leave()


@pytest.mark.parametrize("transport", NETWORK)
@pytest.mark.parametrize("count", [1, 9, 64, 1000])
def test_duplicate_bytes_end_a_stream_and_not_the_job(
    server: Server, path: NetworkPath, transport: str, count: int
) -> None:
    """In steps 2, 4, ... some bytes arrive twice, in both directions: no step is lost, none is
    applied twice.
    """
    trainer = Trainer(through(ADDRESS, server), transports=(transport,))
    for step in range(1, 5):
        if step % 2 == 0:
            path.double(count)
        trainer.step(step, 1.0)

    assert torch.equal(trainer.value, torch.full((1000,), -1.0))
    assert server.job.failure is None
    assert count < 64 or trainer.channel.reconnects > 0  # a few may make another valid frame
    trainer.client.leave()


@pytest.mark.parametrize("transport", NETWORK)
def test_every_redial_resolves_the_name_anew(
    server: Server, path: NetworkPath, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's name moves to another address, and the old one does not answer any more: the
    heartbeat and the streams go to the new one.
    """
    now, resolve = [ADDRESS], socket.getaddrinfo

    def resolver(host: Any, *arguments: Any, **named: Any) -> Any:
        return resolve(now[0] if host == "ps.test" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    trainer = Trainer(through("ps.test", server), transports=(transport,))
    trainer.step(1, 1.0)
    with path_to(server, MOVED) as moved:
        now[0] = MOVED
        path.close()
        trainer.step(2, 1.0)
        eventually(lambda: moved.connections >= 2)  # and more for the heartbeat
        trainer.client.meetings.barrier("over the new address")

        assert torch.equal(trainer.value, torch.zeros(1000)) and server.job.failure is None
        trainer.client.leave()


def test_a_barrier_ends_with_what_ends_the_job(server: Server) -> None:
    """Another server is lost: nobody waits at this one for a trainer that waits there."""
    first = Trainer(through("127.0.0.1", server), 0, 2)
    second = Trainer(through("127.0.0.1", server), 1, 2)

    def lost() -> None:
        raise ServerLost("server 1 is lost")

    with pytest.raises(ServerLost, match="server 1 is lost"):
        first.client.meetings.barrier("epoch", meanwhile=lost)
    for trainer in (first, second):
        trainer.client.leave()


def test_a_barrier_ends_with_what_the_heartbeat_has_found(server: Server) -> None:
    """The heartbeat closes the connection of a lost server, and the barrier's call with it: what
    is raised says that the server is lost, and not that a connection was closed.
    """
    first = Trainer(through("127.0.0.1", server), 0, 2)
    second = Trainer(through("127.0.0.1", server), 1, 2)

    def found() -> None:
        first.client._fail(ServerLost("server 0 has not answered"))
        first.client._control.close()

    threading.Timer(0.3, found).start()
    with pytest.raises(ServerLost, match="server 0 has not answered"):
        first.client.meetings.barrier("where the second does not come")
    first.client.leave()
    second.client.leave()
