"""What trainers tell one another between steps, three trainers in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.table_trainers import Servers, Trainer
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.exchange import Exchange
from trainer.job.job import present

TRAINERS = 3


@pytest.fixture(scope="module")
def exchanges(servers: Servers) -> list[Exchange]:
    """One for each trainer of a job."""
    jobs = at_once(
        *(partial(Trainer, servers(1), i, TRAINERS, nn.Linear(1, 1)) for i in range(TRAINERS))
    )
    return [Exchange(each.job) for each in jobs]


def all_say(exchanges: list[Exchange], say: Callable[[Exchange, int], Any]) -> list[Any]:
    """What each trainer gets."""
    return at_once(*(partial(say, each, number) for number, each in enumerate(exchanges)))


@pytest.mark.parametrize(
    ("kind", "expected"), [("sum", 0.6), ("mean", 0.2), ("max", 0.3), ("min", 0.1)]
)
def test_reductions_are_alike_on_all(exchanges: list[Exchange], kind: str, expected: float) -> None:
    """Equal to the bit, in the dtype of what is reduced."""
    found = all_say(exchanges, lambda e, i: e.reduce(torch.tensor([0.1 * (i + 1)] * 2), kind))

    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].dtype == torch.float32 and found[0].tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_arrive_as_they_were(exchanges: list[Exchange], dtype: torch.dtype) -> None:
    """Of any dtype, of shapes of their own, with no dimension and with no element."""
    shapes = [(), (2, 3), (0, 4)]
    sent = [torch.arange(12).to(dtype)[: max(1, torch.Size(s).numel())] for s in shapes]
    sent = [each[: torch.Size(s).numel()].reshape(s) for each, s in zip(sent, shapes, strict=True)]
    found = all_say(exchanges, lambda e, i: e.gather(sent[i]))

    for each in found:
        assert [value.dtype for value in each] == [dtype] * TRAINERS
        assert all(torch.equal(one, two) for one, two in zip(each, sent, strict=True))


def test_one_trainers_value_is_told_to_all(exchanges: list[Exchange]) -> None:
    """A path becomes a text elsewhere; its own trainer keeps the object."""
    paths = [Path(f"of {number}") for number in range(TRAINERS)]
    found = all_say(exchanges, lambda e, i: e.first(paths[i], 1))

    assert found == ["of 1", paths[1], "of 1"] and found[1] is paths[1]


def test_what_cannot_be_told_is_said_here(exchanges: list[Exchange]) -> None:
    """Nobody waits for a trainer that could not say it."""
    with pytest.raises(TypeError, match="broadcast: expected a value that JSON can hold"):
        exchanges[0].first(object())
    with pytest.raises(ValueError, match="gather: expected at most 1048576 bytes"):
        exchanges[0].gather(torch.zeros(2**20))
    with pytest.raises(ValueError, match="expected one of sum, mean, max, min, got 'product'"):
        exchanges[0].reduce(torch.zeros(1), "product")


def test_alone_a_trainer_tells_itself() -> None:
    """Nothing travels, whatever the value is; nothing is reduced."""
    fleet.init()
    alone, value = Exchange(present()), object()

    assert alone.size == 1 and alone.first(value) is value
    assert alone.reduce(torch.tensor(2), "mean").item() == 2
