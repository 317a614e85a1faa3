"""DiLoCo for rows of tables: every k steps the mean change of a row is the gradient of an outer
optimizer on the servers.

Real servers in this process, a thread a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.diloco_rows import DIM, INNER, OUTER, ROWS, Batch, batches, by_hand
from tests.support.table_programs import transpiled
from tests.support.table_trainers import Servers, Trainer
from tests.support.threads import at_once
from trainer import DistributedEmbedding, Executor, fleet
from transpiler import capture

STEPS, K = 8, 2


class Near(nn.Module):
    """Rows, and how far they are from what they should be; nothing else is trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(DIM, **{"num_embeddings": ROWS, "seed": 4, **options})

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.emb(ids) - wanted).square().sum()
        return out

    def rows(self) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.emb(torch.arange(ROWS))
        return found


def learn(trainer: Trainer, data: list[Batch]) -> None:
    for ids, wanted in data:
        trainer.optimizer.zero_grad()
        trainer.model(ids, wanted).backward()
        trainer.optimizer.step()


@pytest.fixture
def join(servers: Servers) -> Iterator[Callable[..., list[Trainer]]]:
    """``join(servers, trainers, inner, outer)``: all trainers of a job."""
    joined: list[Trainer] = []

    def made(
        count: int, trainers: int, inner: str, outer: str, k_steps: int = K, **options: Any
    ) -> list[Trainer]:
        joined.extend(
            Trainer(
                servers(count),
                number,
                trainers,
                Near(**options),
                lambda model: INNER[inner](model.parameters()),
                k_steps=k_steps,
                outer_optimizer=OUTER[outer][0],
            )
            for number in range(trainers)
        )
        return joined

    yield made
    at_once(*(each.optimizer.close for each in joined))
    fleet.finish()


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("count", [1, 2])
def test_two_trainers_equal_diloco_by_hand(join: Any, count: int, inner: str, outer: str) -> None:
    """Also of rows that one of them, or neither, has touched between two exchanges."""
    trainers = join(count, 2, inner, outer)
    data = [batches(number, STEPS) for number in range(2)]
    start = trainers[0].model.rows()
    at_once(*(partial(learn, *each) for each in zip(trainers, data, strict=True)))
    expected = by_hand(start, data, K, INNER[inner], OUTER[outer][1])

    # the rules of Adam, and rows that move untouched, round in another order
    tolerance = 0.0 if (inner, outer) == ("sgd", "sgd") else 1e-6
    for trainer in trainers:
        assert (trainer.model.rows() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("inner", INNER)
def test_one_trainer_that_exchanges_each_step_trains_as_alone(join: Any, inner: str) -> None:
    """Under an outer SGD with rate 1, but for the rounding of a difference."""
    (trainer,) = join(2, 1, inner, "sgd", k_steps=1)
    data, rows = batches(0, STEPS), nn.Parameter(trainer.model.rows())
    learn(trainer, data)
    plain = INNER[inner]([rows])
    for ids, wanted in data:
        plain.zero_grad(set_to_none=False)
        (rows[ids] - wanted).square().sum().backward()
        plain.step()

    assert (trainer.model.rows() - rows).abs().max() <= 1e-6


def test_between_two_exchanges_a_trainer_has_its_own_rows(join: Any) -> None:
    """Others see them after the exchange, and only rows that were touched have travelled."""
    first, second = join(1, 2, "sgd", "sgd")
    start, ids = first.model.rows(), torch.tensor([3])
    one = [(ids, torch.ones(1, DIM))]
    learn(first, one)

    assert not torch.equal(first.model.rows()[3], start[3])
    assert torch.equal(second.model.rows(), start)
    learn(second, one)
    out = first.bytes["bytes_out"]
    at_once(partial(learn, first, one), partial(learn, second, one))
    assert first.bytes["bytes_out"] - out <= 2 * (8 + DIM * 4)
    assert torch.equal(first.model.rows(), second.model.rows())


@pytest.mark.parametrize("inner", INNER)
def test_state_dict_has_the_servers_rows_after_an_exchange(join: Any, inner: str) -> None:
    """Also those that this trainer held before it, and has not looked up since."""
    trainers = join(2, 2, inner, "nesterov")
    data = [batches(number, K) for number in range(2)]
    at_once(*(partial(learn, *each) for each in zip(trainers, data, strict=True)))
    states = [each.model.state_dict() for each in trainers]

    for state, trainer in zip(states, trainers, strict=True):
        ids, values = state["emb.table.ids"], state["emb.table.values"]
        assert len(ids) and torch.equal(values, trainer.model.rows()[ids])
    assert torch.equal(states[0]["emb.table.values"], states[1]["emb.table.values"])


def test_loaded_rows_leave_with_the_next_exchange(join: Any) -> None:
    """Every trainer loads the same; the outer optimizer takes the difference for a change."""
    trainers = join(2, 2, "sgd", "sgd")
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))

    def load(trainer: Trainer) -> None:
        state = trainer.model.state_dict()
        state |= {"emb.table.ids": torch.arange(ROWS), "emb.table.values": rows}
        trainer.model.load_state_dict(state)
        learn(trainer, [(torch.tensor([0]), rows[:1])] * K)  # no gradient

    at_once(*(partial(load, each) for each in trainers))

    assert (trainers[0].model.rows() - rows).abs().max() <= 1e-6


# ---- programs ----


class Word(nn.Module):
    """A weight of torch's, which a program makes a table of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.word = nn.Embedding(ROWS, DIM, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.word(ids)
        return out


def far(model: nn.Module, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = (model(ids) - wanted).square().sum()
    return out


@pytest.mark.parametrize("outer", ["sgd", "nesterov"])
def test_programs_of_two_trainers_equal_diloco_by_hand(servers: Servers, outer: str) -> None:
    """The steps after the last exchange are exchanged when the Executors are closed, and the rows
    are then in the weight that they came from.
    """
    data = [batches(number, STEPS + 1) for number in range(2)]
    jobs = []
    for number in range(2):
        model = Word()
        optimizer = INNER["sgd"](model.parameters())
        main, startup = capture(model, far, optimizer, data[number][0])
        fields = {"k_steps": K, "outer_optimizer": OUTER[outer][0]}
        jobs.append((model, transpiled(main, startup, servers(2), 2, number, **fields)))

    def run(number: int) -> torch.Tensor:
        model, job = jobs[number]
        with Executor() as executor:
            executor.run(job.get_startup_program())
            for batch in data[number]:
                executor.run(job.get_trainer_program(), feed=batch)
        return model.word.weight.detach()

    found = at_once(*(partial(run, number) for number in range(2)))
    expected = by_hand(Word().word.weight.detach(), data, K, INNER["sgd"], OUTER[outer][1])

    for each in found:
        assert (each - expected).abs().max() <= (0.0 if outer == "sgd" else 1e-6)
