"""``pserver save`` writes what the servers of a job hold, and ``fleet.load`` goes on from it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, PServerError, Refused, Unprepared, Unreachable
from pserver.operations.save import save
from pserver.service.server import Server
from tests.support.eager_jobs import Servers, assert_same, batches, joined, train
from tests.support.normed_jobs import finished, same, statistics, together, trainers
from trainer import DistributedEmbedding, fleet
from transpiler import DistributedStrategy


@pytest.fixture
def servers() -> Iterator[Callable[[int], str]]:
    """``servers(n)``: the endpoints of n servers that have had no job."""
    with ExitStack() as stack:

        def endpoints(count: int) -> str:
            started = [stack.enter_context(Server(ServerConfig())) for _ in range(count)]
            return ",".join(server.endpoint for server in started)

        yield endpoints


@pytest.fixture(autouse=True)
def left(servers: Servers) -> Iterator[None]:
    yield
    with suppress(PServerError):  # of a job that has failed
        fleet.finish()


def saved(endpoints: str, path: Path) -> str:
    out = io.StringIO()
    save(endpoints.split(","), str(path), Console(file=out, width=200))
    return out.getvalue()


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def train_on(model: nn.Module, optimizer: Any, data: Any) -> dict[str, Any]:
    train(model, optimizer, data)
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_saved_job_goes_on_to_the_bit(
    servers: Servers, tmp_path: Path, state: str, count: int
) -> None:
    """Parameters, optimizer state, rate and step, on any number of servers; the job that
    is saved while it runs goes on, too.
    """
    endpoints, data, model = servers(2), batches(6), net()
    optimizer = joined(endpoints, model, adam(model, lr=0.5))
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, data[:3])
    if state == "failed":
        optimizer.close("the data are gone")
    assert f"saved step 3 of the {state} job" in saved(endpoints, tmp_path / "held")
    if state == "failed":
        fleet.finish()
        model = net()
        reference = joined(servers(1), model, adam(model))
        train(model, reference, data[:3])
        expected = train_on(model, reference, data[3:])
    else:
        expected = train_on(model, optimizer, data[3:])
    fleet.finish()

    again = net(seed=9)
    optimizer = joined(servers(count), again, adam(again, lr=0.3))
    assert fleet.load(str(tmp_path / "held")) == 3
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert_same(train_on(again, optimizer, data[3:]), expected)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = DistributedEmbedding(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


def row_steps(model: nn.Module, optimizer: Any, first: int, count: int) -> torch.Tensor:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(torch.arange(step, step + 6)).square().sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(torch.arange(12))
    model.train()
    return out


def test_tables_travel_with_their_states(servers: Servers, tmp_path: Path) -> None:
    """On another number of servers; Adagrad's sums of the rows go on."""

    def rows_of(endpoints: str) -> tuple[nn.Module, Any]:
        model = Rows()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        return model, joined(endpoints, model, optimizer)

    endpoints = servers(2)
    model, optimizer = rows_of(endpoints)
    row_steps(model, optimizer, 0, 3)
    assert "8 rows of 1 tables" in saved(endpoints, tmp_path / "held")
    expected = row_steps(model, optimizer, 3, 3)
    fleet.finish()

    model, optimizer = rows_of(servers(1))
    fleet.load(str(tmp_path / "held"))
    assert torch.equal(row_steps(model, optimizer, 3, 3), expected)


def test_what_the_servers_do_not_know_is_said(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler is refused in words, and a load without one lists what is missing."""
    endpoints, model = servers(1), net()
    optimizer = joined(endpoints, model, adam(model))
    train(model, optimizer, batches(2))
    saved(endpoints, tmp_path / "held")

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(ValueError, match="by pserver save, which does not know it.*to step 2"):
        fleet.load(str(tmp_path / "held"), scheduler=scheduler)
    assert fleet.load(str(tmp_path / "held")) == 2
    assert "lacks the scheduler's state" in caplog.text


@pytest.mark.parametrize(
    ("count", "buffers", "lacks"), [(2, "trainer0", False), (2, "own", True), (1, "trainer0", True)]
)
def test_buffers_that_travel_are_the_servers_too(
    servers: Servers, tmp_path: Path, count: int, buffers: str, lacks: bool
) -> None:
    """Running statistics are in the file as of the last step, where trainers share them; where they
    do not, the file says that it lacks them.
    """
    endpoints = servers(2)
    each = trainers(endpoints, count, "sync", buffers=buffers)
    together(each, 2)
    expected = statistics(each[0].model)
    saved(endpoints, tmp_path / "held")
    finished(each)

    held = checkpoint.reading(str(tmp_path / "held"))
    values = held.tensors()
    found = {name: values[f"model/{name}"] for name in expected}
    assert any("running_mean" in line for line in held.meta["unknown"]) is lacks
    assert same(found, expected) is not lacks


def test_geo_says_that_the_trainers_have_the_optimizer_states(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And gives the parameters that the servers hold."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 2}
    endpoints, model = servers(1), net()
    optimizer = joined(endpoints, model, adam(model), strategy=strategy)
    train(model, optimizer, batches(4))
    optimizer.flush()
    saved(endpoints, tmp_path / "held")
    fleet.finish()

    again = net(seed=9)
    joined(servers(1), again, adam(again))
    fleet.load(str(tmp_path / "held"))
    assert "the optimizer states of 0.weight" in caplog.text
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))


def test_a_job_that_is_being_saved_waits_and_goes_on(servers: Servers) -> None:
    """A pause ends with its observer: nobody is stopped for good by one that is gone."""
    from pserver.operations.save import holding

    endpoints, model = servers(2), net()
    optimizer = joined(endpoints, model, adam(model))
    train(model, optimizer, batches(1))
    with holding(endpoints.split(",")) as held:
        names = [name for name, _ in held.tensors()]
        assert (held.step, held.apart, held.failure) == (1, "", "")
    train(model, optimizer, batches(1))
    assert "model/0.weight" in names and "state/exp_avg/0.weight" in names


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ("empty", Unprepared, "holds nothing"),
        ("missing", Refused, "expected all 2 servers of the job"),
        ("another job", FingerprintMismatch, "have different jobs"),
        ("unreachable", Unreachable, "127.0.0.1:1: connection refused"),
    ],
)
def test_a_wrong_list_of_servers_is_refused(
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    error: type[PServerError],
    text: str,
) -> None:
    """In one sentence that names an endpoint; nothing is written."""
    monkeypatch.setattr("pserver.timeouts.CALL_SECONDS", 1.0)
    other, model = servers(1), net(seed=1)
    optimizer = joined(other, model, adam(model, lr=0.7))
    train(model, optimizer, batches(1))
    optimizer.close("ends")
    fleet.finish()
    endpoints, model = servers(2), net()
    train(model, joined(endpoints, model, adam(model)), batches(1))
    first, second = endpoints.split(",")
    given = {
        "empty": f"{first},{servers(1)}",
        "missing": first,
        "another job": f"{first},{other}",
        "unreachable": f"{first},{second},127.0.0.1:1",
    }[wrong]

    with pytest.raises(error, match=text):
        saved(given, tmp_path / "held")
    assert not (tmp_path / "held").exists()
