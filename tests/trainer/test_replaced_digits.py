"""Digits are learned as well with another update rule, and with half of the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.support.eager_jobs import Servers
from tests.support.threads import at_once
from tests.support.tiers import RARE
from trainer import fleet
from trainer.job.job import Job
from trainer.modules.prepare import prepared
from transpiler import DistributedStrategy

EPOCHS, BATCH = 16, 32  # images of a batch of each of two trainers
SGD = partial(torch.optim.SGD, momentum=0.9)
Adam = torch.optim.Adam
# switch -> its settings, and the optimizers of a script with it and without
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "lars": (
        {
            "lars_coeff": 0.2,
            "lars_weight_decay": 0.0005,
            "epsilon": 0,
            "exclude_from_weight_decay": ["batch_norm", ".b_0"],
        },
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1),
    ),
    "lamb": (
        {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": []},
        partial(Adam, lr=0.03),
        partial(Adam, lr=0.003),
    ),
    "adam_d2sum": ({}, partial(Adam, lr=0.02), partial(Adam, lr=0.003)),
    "asp": ({}, partial(Adam, lr=0.003), partial(Adam, lr=0.003)),
}


def right(endpoints: str, switch: str | None, made: Any) -> float:
    """The part of digits that two trainers get right that have learned others."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learn, test = order[600:], order[:600]
    strategy = DistributedStrategy()
    strategy.a_sync = False
    if switch is not None:
        setattr(strategy, switch, True)
        if CASES[switch][0]:
            setattr(strategy, f"{switch}_configs", CASES[switch][0])
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)) for _ in range(2)]

    def batches(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        shuffled = [learn[torch.randperm(len(learn), generator=generator)] for _ in range(EPOCHS)]
        every = [batch for epoch in shuffled for batch in epoch.split(2 * BATCH)]
        return [batch[number::2] for batch in every if len(batch) == 2 * BATCH]

    def play(number: int) -> None:
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=2, server_endpoints=endpoints.split(",")
        )
        model, job = prepared(models[number], strategy), Job(role, strategy)
        job.models.append(model)
        optimizer = job.join(made(model.parameters()))
        every = batches(number)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, len(every))
        for batch in every:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        optimizer.finish()

    at_once(lambda: play(0), lambda: play(1))
    with torch.no_grad():
        return float((models[0](images[test]).argmax(1) == labels[test]).float().mean())


@pytest.mark.observes(
    "lars",
    "lamb",
    "adam_d2sum",
    "asp",
)
@pytest.mark.parametrize("switch", [next(iter(CASES)), *map(RARE, list(CASES)[1:])])
def test_digits_are_learned_within_a_point(servers: Servers, switch: str) -> None:
    """Two trainers and two servers, against the script's own optimizer on dense weights."""
    _, made, usual = CASES[switch]
    plain = right(servers(2), None, usual)

    assert plain > 0.96
    assert right(servers(2), switch, made) > plain - 0.01
