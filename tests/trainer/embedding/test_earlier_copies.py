"""A copy that was made of an embedding before its rows have moved: it keeps its own values, and
loads the state of the one that moved, as target networks do every few steps.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from trainer import fleet

IDS = torch.arange(6)
FORMS: dict[str, Any] = {
    "embedding": lambda: nn.Embedding(6, 3),
    "bag": lambda: nn.EmbeddingBag(6, 3, mode="sum"),
    "padding": lambda: nn.Embedding(6, 3, padding_idx=2),
}


class Net(nn.Module):
    """A table and a layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = FORMS[form](), nn.Linear(3, 1)


@pytest.mark.parametrize("place", ["alone", "servers"])
@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_copy_loads_the_rows(form: str, place: str, servers: Servers) -> None:
    """Its own values stay until then; what it has loaded does not follow the online model."""
    model = Net(form)
    fleet.distribute_embedding(model.emb)
    target = copy.deepcopy(model)
    before = target.state_dict()["emb.weight"].clone()
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role if place == "servers" else None)
    online = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(online.parameters(), lr=0.3))

    def step() -> None:
        optimizer.zero_grad()
        bag = (IDS, torch.arange(6)) if form == "bag" else (IDS,)
        online.out(online.emb(*bag)).square().sum().backward()
        optimizer.step()

    step()
    assert torch.equal(target.emb.weight, before)
    target.load_state_dict(online.state_dict())
    with torch.no_grad():
        bag = (IDS, torch.arange(6)) if form == "bag" else (IDS,)
        loaded = online.emb(*bag).clone()
        assert torch.equal(target.emb(*bag), loaded)
        step_free = target.emb.weight.clone()
    assert not torch.equal(step_free, before)
    step()
    assert torch.equal(target.emb.weight, step_free)
    fleet.finish()


def test_a_state_without_all_rows_is_refused() -> None:
    """In our words, and nothing but them."""
    model = Net("embedding")
    fleet.distribute_embedding(model.emb)
    target = copy.deepcopy(model)
    fleet.init()
    state = fleet.distributed_model(model).state_dict()
    fleet.finish()
    for key in ("ids", "values"):
        state[f"emb.table.{key}"] = state[f"emb.table.{key}"][:4]
    with pytest.raises(RuntimeError) as raised:
        target.load_state_dict(state)
    assert "emb: its rows have moved to servers after this copy was made" in str(raised.value)
    assert "4 of its 6 rows: copy from a file of fleet.export" in str(raised.value)
    assert "Missing" not in str(raised.value) and "Unexpected" not in str(raised.value)
