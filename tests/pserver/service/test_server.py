"""The server as a whole, in this process: ready, serving, draining, gone."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pserver.config import PREFERRED_TRANSPORTS, PROTOCOL, ServerConfig, split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import Draining, Refused, ServerLost, TrainerLost, Unreachable
from pserver.service import server as server_module
from pserver.service.server import Server
from pserver.telemetry.memory import keep_memory
from pserver.transport.registry import connect
from pserver.transport.shm import SEGMENT_BYTES
from pserver.wire_pb2 import (
    Frame,
    Hello,
    JoinRequest,
    Kind,
    StatusRequest,
)
from tests.support.one_parameter import SECONDS, Trainer, plan_of
from transpiler.distribute import pserver_program
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Deployment

# ---- transports ----


@pytest.mark.parametrize("transport", ["auto", *PREFERRED_TRANSPORTS])
def test_a_trainer_trains_over_every_transport(transport: str) -> None:
    """Whichever transports are offered, a trainer joins, installs, steps and leaves; the others are
    not offered.
    """
    with Server(ServerConfig(transport=transport)) as server:
        expected = ["grpc", "shm", "tcp"] if transport == "auto" else [transport]
        control = ControlClient(server.endpoint, SECONDS)
        assert list(control.status().transports) == expected
        trainer = Trainer(server.endpoint)
        done = trainer.step(1, 1.0)
        trainer.client.leave()
        control.close()

        assert trainer.client.transport == ("shm" if transport == "auto" else transport)
        assert done.version == 1
        assert torch.equal(trainer.value, torch.full((1000,), 0.5))
        assert server.job.ended.is_set() and server.job.failure is None


def unreachable_name(server: Server) -> None:
    """The server's socket is not where the trainer looks, as in a container with a network of its
    own.
    """
    server.job.transports["shm"] ^= 1


def no_room(server: Server) -> None:
    """From here on this process may not make a segment."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES // 2, resource.RLIM_INFINITY))


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Restores the limit that :func:`no_room` sets."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("hinder", "reason"),
    [(unreachable_name, "Connection refused"), (no_room, "File too large")],
    ids=["unreachable", "too small"],
)
def test_a_trainer_that_cannot_share_memory_takes_the_next_transport(
    hinder: Callable[[Server], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    file_size_limit: None,
) -> None:
    """Shared memory that is offered and does not work costs one log line; the job runs over TCP,
    and status says so.
    """
    with Server(ServerConfig()) as server, caplog.at_level(logging.WARNING):
        hinder(server)
        trainer = Trainer(server.endpoint)
        assert trainer.step(1, 1.0).version == 1
        transports = [each.transport for each in server.job.status(StatusRequest()).trainers]
        trainer.client.leave()

    assert transports == [trainer.client.transport] == ["tcp"]
    assert torch.equal(trainer.value, torch.full((1000,), 0.5))
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("taking tcp instead of shm") and reason in line


def test_a_trainer_told_to_share_memory_takes_nothing_else() -> None:
    """Where shared memory was the user's only choice and does not work, that is an error."""
    with Server(ServerConfig()) as server:
        unreachable_name(server)
        with pytest.raises(Unreachable, match="no shared memory with 127.0.0.1"):
            Trainer(server.endpoint, transports=("shm",))


def test_a_server_without_the_facility_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a system has no memfd the server offers the rest, with one log line; told to offer
    nothing else, it fails.
    """
    monkeypatch.delattr(os, "memfd_create")
    with caplog.at_level(logging.WARNING), Server(ServerConfig()) as server:
        assert list(server.job.transports) == ["tcp", "grpc"]
        trainer = Trainer(server.endpoint)
        assert trainer.client.transport == "tcp"
        trainer.client.leave()
    with pytest.raises(OSError, match="no shared memory: this system has no memfd_create"):
        Server(ServerConfig(transport="shm")).start()

    assert [record.message for record in caplog.records] == [
        "no shared memory here, trainers take another transport: this system has no memfd_create"
    ]


def test_no_transport_in_common_is_refused() -> None:
    """A trainer that cannot use what the server offers is told what both have."""
    with Server(ServerConfig(transport="grpc")) as server:
        with pytest.raises(
            Refused, match="no transport in common: the server has .*grpc.*, the peer .*tcp"
        ):
            Trainer(server.endpoint, transports=("tcp",))


# ---- jobs, and their end ----


def test_a_second_job_needs_no_restart() -> None:
    """After the first job has left, the same server takes another one, which starts afresh."""
    with Server(ServerConfig()) as server:
        for _ in range(2):
            trainer = Trainer(server.endpoint)
            assert trainer.step(1, 2.0).version == 1
            assert torch.equal(trainer.value, torch.zeros(1000))
            trainer.client.leave()


def test_a_program_given_at_start_needs_no_trainer_0() -> None:
    """A server that is given its program and values serves them to whoever joins."""
    program = pserver_program(Deployment(plan_of(), ("h:1",), server_index=0))
    program = replace(program, storage=Storage({"w": torch.full((1000,), 3.0)}, None))
    with Server(ServerConfig(), program) as server:
        trainer = Trainer(server.endpoint)
        trainer.step(1, 2.0)
        trainer.client.leave()

    assert torch.equal(trainer.value, torch.full((1000,), 2.0))


def test_a_silent_trainer_is_noticed_without_anybody_asking() -> None:
    """The server's own clock finds a trainer that shows no heartbeat for the deadline."""
    with Server(ServerConfig(heartbeat_timeout_seconds=0.3)) as server:
        plan = plan_of()
        control = ControlClient(server.endpoint, SECONDS)
        manifest, fingerprint = plan.manifest(), plan.fingerprint()
        control.join(
            JoinRequest(
                protocol=PROTOCOL,
                incarnation="a",
                manifest=manifest,
                fingerprint=fingerprint,
                transports=["grpc"],
            )
        )
        assert server.job.ended.wait(SECONDS)
        control.close()

        assert isinstance(server.job.failure, TrainerLost)


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_stopping_tells_an_idle_trainer(transport: str) -> None:
    """A trainer that computes while its server drains gets a DRAIN frame, not a broken line; the
    server does not wait long.
    """
    with Server(ServerConfig(transport=transport)) as server:
        trainer = Trainer(server.endpoint)
        trainer.step(1, 1.0)
        answer = trainer.channel.begin(trainer.destination)
        started = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop, 3.0)
            with pytest.raises(ServerLost, match="is shutting down"):
                answer.result(timeout=SECONDS)
            trainer.client.leave("the server left")
            stopping.result(timeout=SECONDS)

    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_stopping_tells_a_trainer_that_waits_for_another(transport: str) -> None:
    """A trainer whose step waits for the others hears that the server drains, and can still say
    goodbye.
    """
    with Server(ServerConfig(transport=transport)) as server, ThreadPoolExecutor(2) as pool:
        first = Trainer(server.endpoint, trainers=2)
        second = Trainer(server.endpoint, 1, trainers=2)
        step = pool.submit(first.step, 1, 1.0)
        deadline = time.monotonic() + SECONDS
        while not any(trainer.activity for trainer in server.job.status(StatusRequest()).trainers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        stopping = pool.submit(server.stop, SECONDS)
        with pytest.raises((Draining, ServerLost)):
            step.result(timeout=SECONDS)
        for trainer in (first, second):
            trainer.client.leave("the server left")
        stopping.result(timeout=SECONDS)

    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_a_trainer_that_does_not_listen_cannot_hold_a_server(transport: str) -> None:
    """A stream whose client ignores DRAIN is cut after the grace."""
    with Server(ServerConfig(transport=transport)) as server:
        plan = plan_of()
        control = ControlClient(server.endpoint, SECONDS)
        manifest, fingerprint = plan.manifest(), plan.fingerprint()
        request = JoinRequest(
            protocol=PROTOCOL,
            incarnation="a",
            manifest=manifest,
            fingerprint=fingerprint,
            transports=[transport],
        )
        reply = control.join(request)
        stream = connect(transport, "127.0.0.1", reply.data_port, timeout_seconds=SECONDS)
        stream.send(Frame(kind=Kind.HELLO, hello=Hello(session=reply.session)))
        stream.send(Frame(kind=Kind.PULL))
        started = time.monotonic()
        server.stop(0.5)
        took = time.monotonic() - started
        control.close()
        stream.cancel()

    assert took < 4.0


# ---- this machine ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": "bogus://x/y"}, "store: bogus://x/y: Protocol not known"),
        ({"data_dir": "/dev/null/nope"}, "data_dir: /dev/null/nope: Not a directory"),
        ({"data_dir": "/dev/null"}, "data_dir: /dev/null: File exists"),
    ],
)
def test_a_place_that_keeps_no_files_is_told_at_the_start(
    settings: dict[str, str], message: str
) -> None:
    """Not by the first save, hours later."""
    with pytest.raises(OSError, match=message):
        Server(ServerConfig(**settings)).start()  # type: ignore[arg-type]


def test_the_directory_of_files_is_made(tmp_path: Path) -> None:
    """Where it is missing."""
    with Server(ServerConfig(data_dir=str(tmp_path / "new" / "er"))):
        assert (tmp_path / "new" / "er").is_dir()


def test_a_port_in_use_is_one_sentence() -> None:
    """Two servers on one port, or on one data port, are an error that names it; nothing is left
    behind.
    """
    with Server(ServerConfig()) as first:
        port = split_endpoint(first.endpoint)[1]
        with pytest.raises(
            OSError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"
        ):
            Server(ServerConfig(endpoint=first.endpoint)).start()
        data_port = first.job.transports["tcp"]
        with pytest.raises(
            OSError, match=f"^cannot listen on 127.0.0.1:{data_port}: Address already in use$"
        ):
            Server(ServerConfig(data_port=data_port)).start()


@pytest.mark.parametrize(
    ("host", "warned"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("example.org", True),
    ],
)
def test_listening_beyond_loopback_warns(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without protection, an endpoint that others can reach is worth one line in the log."""
    with caplog.at_level(logging.WARNING):
        server_module._warn_if_open(host, f"{host}:1")

    assert ("open to the network" in caplog.text) is warned


def test_malloc_takes_the_advice_here() -> None:
    """On glibc every setting is accepted; elsewhere nothing happens."""
    assert keep_memory() is (
        os.confstr("CS_GNU_LIBC_VERSION") is not None if hasattr(os, "confstr") else False
    )
