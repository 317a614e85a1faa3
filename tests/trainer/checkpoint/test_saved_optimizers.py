"""Every optimizer with a table, through ``fleet.save`` and ``fleet.load``, on servers and alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers, assert_same
from tests.support.matrix import crossed
from tests.support.optimizers import OPTIMIZERS
from trainer import DistributedEmbedding, fleet, row_optimizers
from trainer.row_optimizers import RowOptimizer

ROWS = 20
OLD = Path(__file__).parents[2] / "testdata" / "checkpoints"

# optimizers without a rule for rows: their table has one of its own
OWN_RULES: dict[str, Callable[[], RowOptimizer]] = {
    name: functools.partial(row_optimizers.Adagrad, lr=0.1)
    for name in OPTIMIZERS
    if name.partition("_")[0] in ("adamax", "nadam", "radam", "adadelta", "rmsprop", "rprop")
    or name in ("asgd", "adam_amsgrad", "adamw_amsgrad")
}
HPARAMS: dict[str, dict[str, Any]] = {"interval": {"alpha": 0.2}}  # it has no learning rate
ROW_RULES: dict[str, Callable[[], RowOptimizer]] = {
    name: functools.partial(rule, **HPARAMS.get(name, {"lr": 0.1}))
    for name, rule in row_optimizers.BY_TYPE.items()
}
MOVES = [(0, 0), (0, 2), (1, 0), (1, 1), (2, 3), (3, 2)]


class Net(nn.Module):
    """A table and a layer."""

    def __init__(self, seed: int, rule: RowOptimizer | None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = DistributedEmbedding(4, num_embeddings=ROWS, name="emb", optimizer=rule)
        self.fc = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, 3]."""
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


def batches(count: int) -> list[torch.Tensor]:
    """Ids of each step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (6,), generator=generator) for _ in range(count)]


def train(model: Net, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    for ids in data:
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def begun(
    endpoints: str,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    rule: Callable[[], RowOptimizer] | None,
    seed: int = 3,
) -> tuple[Net, Any]:
    """A job on servers, or alone where there are none; of another optimizer's object and seed."""
    if endpoints:
        fleet.init(
            fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
        )
    else:
        fleet.init()
    model = Net(seed, None if rule is None else rule())
    fleet.distributed_model(model)
    make, arguments = optimizer
    return model, fleet.distributed_optimizer(make(model.parameters(), **arguments))


def values(model: Net, optimizer: Any) -> dict[str, Any]:
    """Rows, parameters, and their states."""
    states = optimizer.state_dict()["state"]
    named = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "rows": model.emb(torch.arange(ROWS)).detach().clone(),
        "parameters": [p.detach().clone() for p in model.fc.parameters()],
        "states": {i: state for i, state in states.items() if optimizer.names.get(named[i])},
    }


def assert_resumes(
    servers: Servers,
    path: str,
    optimizer: str,
    rule: Callable[[], RowOptimizer] | None,
    move: tuple[int, int],
) -> None:
    """Three steps, saved, loaded, three steps: as six steps, to the bit."""
    before, after = ("" if not count else servers(count) for count in move)
    kind = OPTIMIZERS[optimizer]
    model, distributed = begun(servers(1), kind, rule)
    train(model, distributed, batches(6))
    expected = values(model, distributed)
    fleet.finish()

    model, distributed = begun(before, kind, rule)
    train(model, distributed, batches(6)[:3])
    fleet.save(path)
    fleet.finish()
    model, distributed = begun(after, kind, rule, seed=9)
    assert fleet.load(path) == 3
    train(model, distributed, batches(6)[3:])

    assert_same(values(model, distributed), expected)


@crossed("checkpoints", optimizer=OPTIMIZERS, move=[f"{a} to {b}" for a, b in MOVES])
def test_every_optimizer_with_a_table_resumes_to_the_bit(
    servers: Servers, tmp_path: Path, optimizer: str, move: str
) -> None:
    """The table follows the script's optimizer where that has a rule for rows."""
    before, _, after = move.split()
    places = int(before), int(after)
    assert_resumes(servers, str(tmp_path), optimizer, OWN_RULES.get(optimizer), places)


@crossed("checkpoints", rule=ROW_RULES, move=[f"{a} to {b}" for a, b in MOVES])
def test_every_rule_of_rows_beside_torchs_adagrad_resumes_to_the_bit(
    servers: Servers, tmp_path: Path, rule: str, move: str
) -> None:
    """Adagrad makes a state for every parameter when it is made, for the table's proxy too."""
    before, _, after = move.split()
    assert_resumes(servers, str(tmp_path), "adagrad", ROW_RULES[rule], (int(before), int(after)))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_checkpoint_with_a_proxy_parameters_state_loads(servers: Servers, count: int) -> None:
    """Files that were written before, with Adagrad and a table, name a state of nothing."""
    kind = OPTIMIZERS["adagrad"]
    model, distributed = begun("", kind, None)
    train(model, distributed, batches(3))
    expected = values(model, distributed)
    fleet.finish()

    model, distributed = begun(servers(count) if count else "", kind, None, seed=9)
    assert fleet.load(str(OLD / "adagrad_and_table")) == 3
    found = values(model, distributed)

    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(found["rows"], expected["rows"])
    assert [state["step"].item() for state in found["states"].values()] == [3.0, 3.0]
    train(model, distributed, batches(1))
