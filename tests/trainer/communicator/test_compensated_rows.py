"""Delay compensation for rows of tables: g + lambda (w - w_then) g g, where w_then is the row as
the gradient's trainer looked it up.

Real servers in this process; one thread makes the steps of two trainers, so that their order is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pserver.table.gradient import RowGradient
from tests.support.table_programs import transpiled
from tests.support.table_trainers import Servers, Trainer
from tests.support.threads import at_once
from trainer import DistributedEmbedding, Executor, fleet
from transpiler import capture

ROWS, DIM, LAMBDA = 12, 4, 0.125
# rates are powers of two, so that a product does not round: torch fuses it with a sum or not
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2**-6),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=2**-6, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}
TOLERANCES = {"sgd": 0.0, "momentum": 0.0, "adagrad": 1e-6, "adam": 1e-6}


class Near(nn.Module):
    """Rows, and how far they are from what they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(DIM, num_embeddings=ROWS, seed=4)
        self.fc = nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.emb(ids) - wanted).square().sum() + self.fc.sum()
        return out


def schedule(count: int) -> list[tuple[int, str]]:
    """Who looks up, and who steps: now and then one looks up before the other steps."""
    generator = torch.Generator().manual_seed(2)
    found: list[tuple[int, str]] = []
    for _ in range(count):
        first = int(torch.randint(0, 2, (), generator=generator))
        found += [(first, "reads"), (1 - first, "reads"), (1 - first, "steps")]
        found += [(1 - first, "reads"), (1 - first, "steps"), (first, "steps")]
    return found


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randperm(ROWS, generator=generator)[: ROWS // 2]
    return ids, torch.randn(len(ids), DIM, generator=generator)


class Reference:
    """The same by hand: one matrix, one optimizer of torch's, and what each trainer has read."""

    def __init__(self, start: torch.Tensor, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.rows = nn.Parameter(start.clone())
        self.optimizer = make([self.rows])
        self.read: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def reads(self, trainer: int, ids: torch.Tensor, wanted: torch.Tensor) -> None:
        then = self.rows.detach()[ids].clone().requires_grad_()
        (then - wanted).square().sum().backward()
        assert then.grad is not None
        self.read[trainer] = ids, then.detach(), then.grad

    def steps(self, trainer: int) -> None:
        ids, then, g = self.read.pop(trainer)
        moved = self.rows.detach()[ids] - then
        self.rows.grad = torch.zeros_like(self.rows)
        self.rows.grad[ids] = g + g * g * moved * LAMBDA
        self.optimizer.step()


@pytest.fixture
def pair(servers: Servers) -> Iterator[Callable[..., list[Trainer]]]:
    joined: list[Trainer] = []

    def made(count: int, name: str, trainers: int = 2, **configs: Any) -> list[Trainer]:
        joined.extend(
            Trainer(
                servers(count),
                number,
                trainers,
                Near(),
                lambda model: MAKERS[name](model.parameters()),
                dc_asgd=LAMBDA,
                **{"send_queue_size": 1, **configs},
            )
            for number in range(trainers)
        )
        return joined

    yield made
    for each in joined:
        each.optimizer.close()
    fleet.finish()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("count", [1, 2])
def test_two_trainers_equal_the_rule_by_hand(pair: Any, name: str, count: int) -> None:
    """Each step is compensated for what the other has changed since its lookup: to the bit, where
    torch rounds everywhere alike.
    """
    trainers, generator = pair(count, name), torch.Generator().manual_seed(1)
    every = torch.arange(ROWS)
    with torch.no_grad():
        reference = Reference(trainers[0].model.emb(every), MAKERS[name])
    for who, what in schedule(6):
        trainer = trainers[who]
        if what == "reads":
            ids, wanted = batch(generator)
            trainer.optimizer.zero_grad()
            trainer.model(ids, wanted).backward()
            reference.reads(who, ids, wanted)
        else:
            trainer.optimizer.step()
            reference.steps(who)
    with torch.no_grad():
        found = trainers[0].model.emb(every)

    assert (found - reference.rows).abs().max() <= TOLERANCES[name]


@pytest.mark.parametrize("name", MAKERS)
def test_one_trainer_trains_as_plain_torch(pair: Any, name: str) -> None:
    """Nothing has moved since its lookup."""
    (trainer,) = pair(2, name, trainers=1)
    generator, every = torch.Generator().manual_seed(1), torch.arange(ROWS)
    with torch.no_grad():
        rows = nn.Parameter(trainer.model.emb(every))
    plain = MAKERS[name]([rows])
    for _ in range(5):
        ids, wanted = batch(generator)
        trainer.optimizer.zero_grad()
        trainer.model(ids, wanted).backward()
        trainer.optimizer.step()
        plain.zero_grad()
        (rows[ids] - wanted).square().sum().backward()
        plain.step()
    with torch.no_grad():
        found = trainer.model.emb(every)

    assert (found - rows).abs().max() <= TOLERANCES[name]


def test_a_cache_of_rows_is_refused(servers: Servers) -> None:
    """Servers do not know when a cached row was read."""
    model = Near()
    model.emb = DistributedEmbedding(DIM, num_embeddings=ROWS, cache_rows=8)
    with pytest.raises(ValueError, match="table 'emb': cache_rows.*dc_asgd"):
        Trainer(servers(1), 0, 1, model, lambda m: MAKERS["sgd"](m.parameters()), dc_asgd=LAMBDA)


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


def with_step_between(exe: Executor, others: Callable[[], object]) -> None:
    """In the next step of this Executor the other trainer steps before gradients leave."""
    communicator = exe._runtimes[0].communicator
    send = type(communicator).send_rows

    def send_rows(gradients: Mapping[str, RowGradient]) -> None:
        del communicator.send_rows  # once
        others()
        send(communicator, gradients)

    communicator.send_rows = send_rows  # type: ignore[method-assign]


def test_programs_of_two_trainers_equal_the_rule_by_hand(servers: Servers) -> None:
    """To the bit: trainer 1 steps between the lookup and the step of trainer 0."""
    generator = torch.Generator().manual_seed(1)
    jobs = []
    for number in range(2):
        model = Word()
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
        main, startup = capture(model, far, optimizer, batch(generator))
        job = transpiled(main, startup, servers(2), 2, number, dc_asgd=LAMBDA, send_queue_size=1)
        jobs.append((model, job))
    reference = Reference(Word().word.weight.detach(), MAKERS["sgd"])
    first, second = Executor(), Executor()
    for exe, (_, job) in zip((first, second), jobs, strict=True):
        exe.run(job.get_startup_program())
    programs = [job.get_trainer_program() for _, job in jobs]
    for _ in range(4):
        mine, others = batch(generator), batch(generator)
        reference.reads(0, *mine)
        reference.reads(1, *others)
        reference.steps(1)
        reference.steps(0)
        with_step_between(first, partial(second.run, programs[1], feed=others))
        first.run(programs[0], feed=mine)
    at_once(first.close, second.close)
    found = jobs[0][0].word.weight.detach()

    assert torch.equal(found, reference.rows.detach())
