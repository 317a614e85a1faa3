"""What the metrics of a trainer say."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.launcher.status import ask
from pserver.service.server import Server
from pserver.wire_pb2 import TrainerReport
from tests.support.scraped import Scraped
from tests.support.table_programs import Tables, batches, begun, transpiled
from tests.support.table_trainers import Net, Trainer
from tests.support.waiting import eventually
from trainer import DistributedEmbedding, Executor, fleet
from trainer.communicator.communicator import Communicator

Servers = Callable[[int], str]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trainer has a page, at any free port."""
    monkeypatch.setenv("PSERVER_METRICS", "0")


def scraped(communicator: Communicator | None) -> Scraped:
    """Its page."""
    assert communicator is not None and communicator.page._exposition is not None
    return Scraped.of(communicator.page._exposition.port)


def test_a_trainers_steps_are_measured(servers: Servers) -> None:
    """How long they take, how long each server takes to answer, how long the script waits."""
    trainer = Trainer(servers(2), 0, 1, Net())
    for _ in range(4):
        trainer.add([1, 2, 3], 1.0, 1.0)
    communicator = trainer.job.communicator
    found = scraped(communicator)

    assert found.value("pserver_step_seconds_count", lane="0") == 3
    for server in range(2):
        assert found.value("pserver_wait_seconds_count", lane="0", peer=f"server {server}") == 4
        assert found.value("pserver_reconnects_total", peer=f"server {server}") == 0
    assert found.value("pserver_blocked_seconds_total", lane="0") > 0
    assert found.value("pserver_queue_steps", lane="0") == 0
    counted = communicator.metrics()
    assert found.value("pserver_bytes_total", direction="out") == counted["bytes_out"]
    assert found.value("pserver_bytes_total", direction="in") == counted["bytes_in"]
    trainer.optimizer.close()


def test_servers_are_told_how_training_goes(servers: Servers) -> None:
    """With heartbeats, within seconds: each server, of its own part; and it tells who asks."""
    endpoints = servers(2)
    trainer = Trainer(endpoints, 0, 1, Net())
    trainer.job.reported.add(64, {"loss": 0.5})
    trainer.job.position.batch_size = 32
    for _ in range(4):
        trainer.add([1, 2, 3], 1.0, 1.0)
    for endpoint in endpoints.split(","):

        def report(endpoint: str = endpoint) -> TrainerReport:
            (found,) = ask(endpoint).trainers
            return found.report

        eventually(lambda report=report: report().lanes and report().lanes[0].steps == 4)
        found = report()
        assert (found.samples, dict(found.values)) == (64, {"loss": 0.5})
        assert found.memory_bytes > 2**20 and found.bytes_in > 0 and found.bytes_out > 0
        assert found.settings["script"] == Path(sys.argv[0]).name
        assert found.settings["arguments"] == shlex.join(sys.argv[1:])
        assert found.settings["batch size"] == "32 a trainer"
        settings = ask(endpoint).settings
        assert settings["versions"] == found.settings["versions"]
        assert f"torch {torch.__version__}" in settings["versions"]
        assert (settings["lane 0: mode"], settings["group 0: lr"]) == ("sync", "1.0")
        assert not [name for name in settings if name.startswith(("variable ", "table "))]
        assert found.lanes[0].waits == 4 and found.lanes[0].step_seconds > 0
        assert 0 < found.lanes[0].blocked_seconds and 0 < found.lanes[0].wait_seconds
        (lane,) = ask(endpoint).lanes
        assert (lane.version, lane.updates, lane.mode) == (4, 4, "sync")
        assert 0 < lane.update_seconds <= lane.step_seconds
    trainer.optimizer.close()


def test_trainers_and_servers_name_the_same_job_and_run() -> None:
    """Without being told: by the plan, and by trainer 0's start."""
    with Server(ServerConfig(metrics="0")) as server:
        assert server._metrics is not None
        trainer = Trainer(server.endpoint, 0, 1, Net())
        here, there = scraped(trainer.job.communicator), Scraped.of(server._metrics.port)
        assert {(each["job"], each["run"]) for each in here.labels()} == {
            (each["job"], each["run"]) for each in there.labels()
        }
        assert {each["process"] for each in here.labels()} == {"trainer 0"}
        trainer.optimizer.close()


def test_a_page_is_there_as_long_as_the_trainer(servers: Servers) -> None:
    """It ends when the trainer leaves."""
    trainer = Trainer(servers(1), 0, 1, Net())
    exposition = trainer.job.communicator.page._exposition
    trainer.optimizer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", exposition.port), 10)


def test_there_is_none_where_nobody_asks(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are off unless PSERVER_METRICS is set."""
    monkeypatch.delenv("PSERVER_METRICS")
    trainer = Trainer(servers(1), 0, 1, Net())
    assert trainer.job.communicator.page._exposition is None
    trainer.optimizer.close()


def test_a_port_that_is_taken_ends_the_start(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the trainer joins; the message names the place."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("PSERVER_METRICS", place)
        with pytest.raises(OSError, match=f"metrics at {place}: Address already in use"):
            Trainer(servers(1), 0, 1, Net())


def test_a_program_has_a_page_too(servers: Servers) -> None:
    """Of the trainer's program."""
    data, (_, _, main, startup) = batches(3), begun(Tables)
    transpiler = transpiled(main, startup, servers(1), sync_mode=False)
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for batch in data:
            exe.run(transpiler.get_trainer_program(), feed=batch)
        found = scraped(exe._runtimes[0].communicator)

        assert found.value("pserver_step_seconds_count", lane="0") == 2


class Cached(nn.Module):
    """A table with a cache on the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(4, num_embeddings=9, cache_rows=64, cache_staleness=8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.emb(ids)
        return out


@pytest.fixture
def job(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An async job of one trainer with :class:`Cached`: its model and its optimizer."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)])
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(Cached())
    yield model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.finish()


def test_rows_of_the_cache_are_lookups(job: Any) -> None:
    """Of the tier "cache"; the servers' own metrics have the others."""
    model, optimizer = job
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    found = scraped(optimizer.communicator)

    assert found.value("pserver_table_lookups_total", table="emb", tier="cache") == 4


def test_what_a_script_reports_is_shown(job: Any) -> None:
    """Samples are added up, of a value the last one counts; a tensor's element is a value."""
    fleet.report(samples=32, loss=torch.tensor(0.75), auc=0.5)
    fleet.report(samples=32, loss=torch.tensor([0.5]))
    found = scraped(job[1].communicator)

    assert found.value("pserver_samples_total") == 64
    assert found.value("pserver_reported", name="loss") == 0.5
    assert found.value("pserver_reported", name="auc") == 0.5


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"samples": -1}, ValueError, "samples: expected a number of 0 or more, got -1"),
        ({"samples": 1.5}, ValueError, "samples: expected a number of 0 or more, got 1.5"),
        ({"loss": "low"}, TypeError, "loss: expected a number, got 'low'"),
        ({"loss": torch.ones(2)}, ValueError, r"loss: expected one number, got shape \(2,\)"),
    ],
    ids=str,
)
def test_what_is_no_number_is_refused(
    job: Any, said: dict[str, Any], error: type[Exception], message: str
) -> None:
    """And nothing of the call counts."""
    with pytest.raises(error, match=f"fleet.report: {message}"):
        fleet.report(**{"auc": 1.0, **said})
    with pytest.raises(AssertionError, match="0 samples"):
        scraped(job[1].communicator).value("pserver_reported", name="auc")


def test_a_save_of_the_job_is_timed(job: Any, tmp_path: Path) -> None:
    """As ``fleet.save`` takes it."""
    before = job[1].communicator.page.report()
    fleet.save(str(tmp_path / "checkpoint"))
    found, report = scraped(job[1].communicator), job[1].communicator.page.report()

    assert (before.saves, before.since_save_seconds, report.saves) == (0, 0.0, 1)
    assert 0 < report.since_save_seconds < 60
    assert found.value("pserver_checkpoint_seconds_count") == 1
    assert found.value("pserver_checkpoint_seconds_sum") > 0


def test_a_report_needs_a_job() -> None:
    """As every call of ``fleet``."""
    with pytest.raises(RuntimeError, match="call fleet.init"):
        fleet.report(loss=1.0)
