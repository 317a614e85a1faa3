"""Lightning's Trainer on two trainers and two servers, as real processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.eager_jobs import Servers, assert_same
from tests.support.launched import EXAMPLES, accuracy, launched
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.job import Job
from trainer.samplers.shard import shard
from transpiler import ClipGradByGlobalNorm

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

from tests.cluster.lightning_trainer import ACCUMULATED, CLIP, adam, loader, net  # noqa: E402

SCRIPT = Path(__file__).with_name("lightning_trainer.py")
pytestmark = pytest.mark.processes


def plain_fleet(endpoints: str, epochs: int) -> dict[str, torch.Tensor]:
    """The same training by a plain script of fleet's, on two trainers: trainer 0's parameters."""
    roles = [
        fleet.UserDefinedRoleMaker(i, worker_num=2, server_endpoints=endpoints.split(","))
        for i in range(2)
    ]
    jobs, models = [Job(role, None) for role in roles], [net(), net()]

    def play(number: int) -> None:
        job, model = jobs[number], models[number]
        job.models.append(model)
        given, scheduler = adam(model)
        optimizer = job.join(given, grad_clip=ClipGradByGlobalNorm(CLIP))
        batches: Any = shard(loader(), 2, number, None, job.passes)
        for _ in range(epochs):
            for count, (x, y) in enumerate(batches, 1):
                (mse_loss(model(x), y) / ACCUMULATED).backward()
                if count % ACCUMULATED == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
        optimizer.finish()

    at_once(*(partial(play, number) for number in range(2)))
    return dict(models[0].state_dict())


def run(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """A job of Lightning's: what its trainers have said."""
    launched(folder, "2 x 2", str(SCRIPT), str(folder / name), *words)
    return [json.loads((folder / name / f"said by {i}.json").read_text()) for i in range(2)]


def state_of(folder: Path, name: str, number: int) -> dict[str, torch.Tensor]:
    state = torch.load(folder / name / f"state of {number}.pt")
    return {key.removeprefix("net."): value for key, value in state.items()}


@pytest.mark.long  # tests/trainer/test_lightning.py stands for it
def test_two_trainers_fit_what_a_plain_script_fits(servers: Servers, tmp_path: Path) -> None:
    """To the bit, on both; they stop early together, validate all samples between them, and
    trainer 0 alone logs and writes checkpoints, whose path both know.
    """
    said = run(tmp_path, "job", "6")

    assert said[0] == said[1]
    assert (said[0]["epochs"], said[0]["steps"], said[0]["seen"]) == (3, 9, 42)
    assert all("of 0" in name for name in said[0]["files"]) and len(said[0]["files"]) == 4
    assert "files of 0" in said[0]["best"]
    state = state_of(tmp_path, "job", 0)
    assert_same(state, state_of(tmp_path, "job", 1))
    assert_same(state, plain_fleet(servers(2), 3))
    with torch.no_grad():
        module = net()
        module.load_state_dict(state)
        x, y = loader().dataset.tensors  # type: ignore[attr-defined]
        assert said[0]["val"] == pytest.approx(float(mse_loss(module(x), y)))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_trainers_go_on_from_a_checkpoint(servers: Servers, tmp_path: Path) -> None:
    """With the orders of the passes that follow: two jobs are one of as many epochs, to the bit."""
    first = run(tmp_path, "first", "2")[0]
    run(tmp_path, "second", "3", first["best"].replace("epoch=0-step=3", "epoch=1-step=6"))

    assert_same(state_of(tmp_path, "second", 1), plain_fleet(servers(2), 3))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_learns_digits(tmp_path: Path) -> None:
    """At least 95 % of them, on a cluster."""
    log = launched(tmp_path, "2 x 2", str(EXAMPLES / "lightning_digits.py"), "--epochs", "8").log

    assert accuracy(log) >= 0.95
