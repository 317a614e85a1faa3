"""Promises of a server that writes what it holds while its trainers go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.errors import Busy, Refused
from pserver.launcher.status import ask
from pserver.service.server import Server
from pserver.storage.local import LocalPlace
from pserver.telemetry.job_view import notices
from tests.support.one_parameter import SECONDS, Trainer
from tests.support.scraped import Scraped
from tests.support.waiting import eventually


class SlowDisk:
    """A disk that takes tensors when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()
        real = LocalPlace.write_tensors

        def write(place: LocalPlace, name: str, tensors: Any, wrote: Any) -> tuple[int, str]:
            self.asked.set()
            assert self.goes_on.wait(SECONDS)
            return real(place, name, tensors, wrote)

        patch.setattr(LocalPlace, "write_tensors", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.goes_on.set()


def noticed(server: Server) -> list[str]:
    """The notices of ``pserver status``."""
    return [each.text for each in notices({server.endpoint: ask(server.endpoint)})]


def serving(tmp_path: Path) -> Server:
    return Server(ServerConfig(metrics="0", data_dir=str(tmp_path)))


def held(path: Path) -> float:
    """The value that a save has of the only parameter, all of whose elements are equal."""
    tensors, _ = checkpoint.load(path / "server-0")
    (value,) = set(torch.cat([tensor.view(-1) for tensor in tensors.values()]).tolist())
    return float(value)


def test_steps_go_on_while_a_save_is_written(tmp_path: Path, disk: SlowDisk) -> None:
    """The save has the values of its moment; `status` and the metrics say that it is written."""
    with serving(tmp_path) as server:
        trainer = Trainer(server.endpoint)
        trainer.step(1, 1.0)
        state = trainer.client.saves.in_background("a", 1)
        assert disk.asked.wait(SECONDS) and not state.done and not state.failure
        trainer.step(2, 1.0)
        with pytest.raises(Busy, match="a save is being written here"):
            trainer.client.saves.in_background("b", 2)
        found = Scraped.of(server._metrics.port)  # type: ignore[union-attr]
        assert found.value("pserver_checkpoint_in_progress") == 1
        lines = [line for line in noticed(server) if "saves to" in line]
        disk.goes_on.set()
        eventually(lambda: trainer.client.saves.in_background("a", 1).done)
        state = trainer.client.saves.in_background("a", 1)
        found = Scraped.of(server._metrics.port)  # type: ignore[union-attr]

        assert held(tmp_path / "a") == 0.5 and float(trainer.value[0]) == 0.0
        assert state.failure == "" and state.bytes > 4000 and len(lines) == 1
        assert state.seconds > state.pause_seconds > 0
        assert found.value("pserver_checkpoint_in_progress") == 0
        assert found.value("pserver_checkpoint_bytes_total") == state.bytes
        assert found.value("pserver_checkpoint_failures_total") == 0
        assert found.value("pserver_checkpoint_seconds_count") == 1
        assert any("saved to" in line for line in noticed(server))
        trainer.client.leave()


def test_a_save_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To who asks, in `status` and in the metrics; steps go on, and so may saves."""

    def full(place: LocalPlace, name: str, tensors: Any, wrote: Any) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    with serving(tmp_path) as server:
        trainer = Trainer(server.endpoint)
        with monkeypatch.context() as patch:
            patch.setattr(LocalPlace, "write_tensors", full)
            trainer.client.saves.in_background("a", 1)
            eventually(lambda: trainer.client.saves.in_background("a", 1).done)
        state = trainer.client.saves.in_background("a", 1)
        found = Scraped.of(server._metrics.port)  # type: ignore[union-attr]

        assert "No space left" in state.failure and not (tmp_path / "a/checkpoint.json").exists()
        assert found.value("pserver_checkpoint_failures_total") == 1
        assert any("a save has failed" in line for line in noticed(server))
        trainer.step(1, 1.0)
        trainer.client.saves.in_background("a", 2)
        eventually(lambda: trainer.client.saves.in_background("a", 2).done)
        assert held(tmp_path / "a") == 0.5
        with pytest.raises(Refused, match="expected the number of a new save"):
            trainer.client.saves.in_background("a", 1)
        trainer.client.leave()


def test_a_server_that_drains_writes_its_save_to_the_end(tmp_path: Path, disk: SlowDisk) -> None:
    """It waits for the disk before it ends."""
    server = serving(tmp_path)
    server.start()
    trainer = Trainer(server.endpoint)
    trainer.client.saves.in_background("a", 1)
    trainer.client.leave()
    assert disk.asked.wait(SECONDS)
    ends = threading.Thread(target=server.stop)
    ends.start()
    eventually(lambda: server.draining)
    assert ends.is_alive() and not (tmp_path / "a/server-0/checkpoint.json").exists()
    disk.goes_on.set()
    ends.join(SECONDS)

    assert not ends.is_alive() and held(tmp_path / "a") == 1.0


def test_a_server_that_drains_does_not_wait_beyond_its_grace(
    tmp_path: Path, disk: SlowDisk
) -> None:
    """What was saved before stays, whole."""
    server = serving(tmp_path)
    server.start()
    trainer = Trainer(server.endpoint)
    disk.goes_on.set()
    trainer.client.saves.in_background("a", 1)
    eventually(lambda: trainer.client.saves.in_background("a", 1).done)
    trainer.step(1, 1.0)
    disk.goes_on.clear()
    trainer.client.saves.in_background("a", 2)
    trainer.client.leave()
    server.stop(0.2)

    assert held(tmp_path / "a") == 1.0
    disk.goes_on.set()
    assert server.job.saves.wait(SECONDS)
