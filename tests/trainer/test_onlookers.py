"""What only looks at training: each of them fails here, and training is the same, to the bit."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pserver import timeouts
from pserver.onlookers import look_again, onlooker
from tests.support.eager_jobs import Servers, batches
from tests.support.onlookers import Looking, all_onlookers
from tests.support.table_trainers import Trainer
from tests.support.threads import PATIENCE, at_once
from trainer import fleet
from transpiler import DistributedStrategy

STEPS = 4
LOGGER = "pserver.onlookers"

# name -> how the jobs below come by it; "-": at a heartbeat, on a terminal or in another process
EVERY = {
    "the dump of steps": "job",
    "a logger": "job",
    "the metrics for loggers": "job",
    "the metrics of steps": "job",
    "the norms of pushes": "job",
    "the progress bar": "job",
    "the trace": "job",
    "values that are not finite": "job",
    "the watch for clipping": "two",
    "the bar of loading": "-",
    "the count of partial steps": "-",
    "the job's page": "-",
    "the lines of fetched values": "-",
    "the list of events": "job",
    "the panel": "-",
    "the process that asks for the panel": "-",
    "the report to the servers": "job",
    "the watch for stragglers": "job",
    "what servers say of norms": "-",
    "what servers say of values that are not finite": "-",
    "what trainers report": "job",
}


class Failed(Exception):
    """What an onlooker raises here."""


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == LOGGER]


def named(name: str) -> list[Looking]:
    return [each for each in all_onlookers() if each.name == name]


def test_every_onlooker_is_in_the_table() -> None:
    """A new one says there how a job comes by it."""
    assert {each.name for each in all_onlookers()} == set(EVERY)


# ---- the mechanism, for each of them ----


@pytest.mark.parametrize("each", all_onlookers(), ids=str)
def test_an_error_is_one_warning_and_it_is_off(
    each: Looking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what it was and what has failed; from there on it is not called any more."""
    looks = bare(each.owner)
    looks._action, looks._lane = "apply", _Lane()  # of judges, which only look then
    each.fail(monkeypatch, Failed("a full disk"), type(looks))  # not of threads of other tests
    for _ in range(3):
        getattr(looks, each.method)()
    (text,) = said(caplog)
    assert text.startswith(f"{each.name}: off from now on; training continues: Failed: a full")
    assert "test_onlookers.py" in text or "onlookers.py:" in text


def bare(owner: Any) -> Any:
    """An object of the class, that is not initialised."""
    made: Any = type("Bare", (owner,), {})
    made.__abstractmethods__ = frozenset()
    return object.__new__(made)


class _Lane:
    outlier_push = on_nonfinite = "apply"


@pytest.mark.parametrize("each", all_onlookers(), ids=str)
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_end_that_is_asked_for_rises(
    each: Looking, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler, or the script, ends the process also from inside of an onlooker."""
    looks = bare(each.owner)
    each.fail(monkeypatch, error(), type(looks))
    with pytest.raises(error):
        getattr(looks, each.method)()


def test_what_decides_about_a_step_is_no_onlooker(caplog: pytest.LogCaptureFixture) -> None:
    """Where servers refuse by a norm, a norm that cannot be measured is an error."""

    class Judge:
        def __init__(self, decides: bool) -> None:
            self.decides = decides

        @onlooker("a judge", otherwise=int, where=lambda judge: not judge.decides)
        def judge(self) -> int:
            raise Failed("no norm")

    assert Judge(decides=False).judge() == 0
    with pytest.raises(Failed):
        Judge(decides=True).judge()
    assert len(said(caplog)) == 1


def test_its_end_may_fail_too_and_it_may_look_again(caplog: pytest.LogCaptureFixture) -> None:
    """A trace that has failed is followed by another one."""

    class Looks:
        calls = 0

        @onlooker("a look", end=lambda looks: looks.nothing())
        def look(self) -> None:
            self.calls += 1
            raise Failed("once")

    looks = Looks()
    looks.look()
    looks.look()
    assert looks.calls == 1
    look_again(looks)
    looks.look()
    assert looks.calls == 2 and len(said(caplog)) == 2


# ---- training, with all that can look at it ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def strategy(folder: Path) -> DistributedStrategy:
    made = DistributedStrategy()
    made.a_sync = True
    keys = {"nonfinite": "apply", "outlier_push": "apply", "modes": {"*": "sync"}}
    made.a_sync_configs = keys
    made.trainer_desc_configs = {
        "dump_fields_path": str(folder / "dump"),
        "dump_fields": ["first"],
        "stat_var_names": ["second"],
    }
    return made


def watched(endpoints: str, folder: Path) -> list[torch.Tensor]:
    """A job of one trainer that is traced, dumped, reported and shown."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy(folder))
    model = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    fleet.trace(str(folder / "trace.json"), steps=2)
    for x, y in fleet.shard(batches(STEPS), progress=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        fleet.report(samples=len(x), loss=1.0)
    fleet.save(str(folder / "checkpoint"))
    beaten(optimizer.communicator)
    fleet.finish()
    return [each.detach().clone() for each in model.parameters()]


def beaten(communicator: Any) -> None:
    """Returns when each server has heard of the trainer after this moment."""
    heard, client = threading.Event(), communicator.clients[0]
    told = client.learn

    def learn(absences: Any) -> None:
        told(absences)
        heard.set()

    client.learn = learn
    assert heard.wait(PATIENCE)
    client.learn = told


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    monkeypatch.setenv("PSERVER_TENSORBOARD", str(tmp_path / "events"))
    monkeypatch.setattr(timeouts, "BEAT_SECONDS", 0.02)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.filterwarnings("ignore")  # of what TensorBoard imports
@pytest.mark.parametrize("name", [name for name, where in EVERY.items() if where == "job"])
def test_training_is_the_same_where_an_onlooker_fails(
    name: str,
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the bit, with one warning of each object that looks."""
    plain = Net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()

    for each in named(name):
        each.fail(monkeypatch, Failed(each.method))
    found = watched(servers(2), tmp_path)
    assert all(map(torch.equal, found, plain.parameters()))
    assert [text for text in said(caplog) if text.startswith(f"{name}: off")]


@pytest.mark.parametrize("method", ["_note", "check"])
def test_a_job_of_two_is_the_same_where_the_watch_for_clipping_fails(
    method: str,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two trainers the first one watches what its script does to gradients."""
    expected = two(servers(2))
    (each,) = (each for each in named("the watch for clipping") if each.method == method)
    each.fail(monkeypatch, Failed("no elements"))
    assert all(map(torch.equal, two(servers(2)), expected))
    assert len(said(caplog)) == 1


def two(endpoints: str) -> list[torch.Tensor]:
    jobs = [
        Trainer(endpoints, number, 2, Net(), partial(_sgd), modes={"*": "sync"})
        for number in range(2)
    ]

    def play(number: int) -> None:
        for x, y in batches(STEPS, seed=number):
            jobs[number].optimizer.zero_grad()
            F.cross_entropy(jobs[number].model(x), y).backward()
            jobs[number].optimizer.step()

    at_once(*(partial(play, number) for number in range(2)))
    for each in jobs:
        each.optimizer.close()
    return [parameter.detach().clone() for parameter in jobs[0].model.parameters()]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.filterwarnings("ignore")  # of what TensorBoard imports
def test_a_server_looks_again_in_its_next_job(
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error in one job turns nothing off in those that come after it."""
    for each in named("what trainers report"):
        each.fail(monkeypatch, Failed(each.method))
    for job in ("first", "second"):
        watched(servers(1), tmp_path / job)
    assert sum(text.startswith("what trainers report: off") for text in said(caplog)) == 2
