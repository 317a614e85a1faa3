"""Deep gradient compression learns as well as momentum SGD."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.support.eager_jobs import Servers
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.job import Job
from transpiler import DistributedStrategy

FOLDS, EPOCHS, BATCH = 3, 12, 32  # images of a batch: of each of two trainers
CONFIGS = {"rampup_step": 60, "sparsity": [0.75, 0.9375, 0.984375, 0.996, 0.999]}


def right(endpoints: str, fold: int, dgc: bool) -> int:
    """How many digits of a fold two trainers get right that have learned the others."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learn, test = order[torch.arange(len(order)) % FOLDS != fold], order[fold::FOLDS]
    torch.manual_seed(fold)
    models = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)) for _ in range(2)]

    def batches(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(fold)
        shuffled = [learn[torch.randperm(len(learn), generator=generator)] for _ in range(EPOCHS)]
        every = [batch for epoch in shuffled for batch in epoch.split(2 * BATCH)]
        return [batch[number::2] for batch in every if len(batch) == 2 * BATCH]

    def play(number: int) -> None:
        strategy = DistributedStrategy()
        strategy.a_sync, strategy.dgc = False, dgc
        strategy.dgc_configs = CONFIGS if dgc else {}
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=2, server_endpoints=endpoints.split(",")
        )
        model, job = models[number], Job(role, strategy)
        job.models.append(model)
        optimizer = job.join(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for batch in batches(number):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        optimizer.finish()

    at_once(lambda: play(0), lambda: play(1))
    with torch.no_grad():
        return int((models[0](images[test]).argmax(1) == labels[test]).sum())


@pytest.mark.long
@pytest.mark.observes("dgc")
def test_digits_are_learned_within_half_a_point(servers: Servers) -> None:
    """Two trainers and two servers, after the paper's ramp a thousandth of each gradient, against
    momentum SGD; every digit is tested once.
    """
    plain, compressed = (
        sum(right(servers(2), fold, dgc) for fold in range(FOLDS)) for dgc in (False, True)
    )
    total = len(load_digits().target)

    assert plain > 0.96 * total
    assert compressed > plain - 0.005 * total
