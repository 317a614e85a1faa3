"""Scripts that leave passes early, ask for lengths, or have changed since they saved: automatic
checkpoints lose no sample, and repeat none.
"""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

from tests.trainer.job.test_automatic_saves import ALWAYS, DATA, Script, Steps, adam, net, run
from tests.trainer.job.test_automatic_saves import trained as train
from trainer import fleet
from trainer.job.position import Position
from trainer.samplers.pass_log import LoggedPass, SavedPasses


def evaluated(steps: Steps) -> nn.Module:
    """Epochs that end early, then an evaluation over data of the script's own, then a step of the
    scheduler.
    """
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        for (x,) in islice(fleet.shard(DataLoader(DATA, batch_size=3, shuffle=True)), 3):
            train(model, optimizer, x)
            steps.one()
        model.eval()
        for (x,) in DataLoader(DATA, batch_size=6):
            model(x)
        model.train()
        scheduler.step()
    return model


def measured(steps: Steps) -> nn.Module:
    """The script asks how long a pass is, before it makes the first one."""
    model = net()
    optimizer = adam(model)
    batches = fleet.shard(DataLoader(DATA, batch_size=3, shuffle=True))
    scheduler = StepLR(optimizer, len(batches), gamma=0.5)  # type: ignore[arg-type]  # it has one
    for _ in range(3):
        for (x,) in islice(batches, 3):
            train(model, optimizer, x)
            scheduler.step()
            steps.one()
    return model


@pytest.mark.parametrize("script", [evaluated, measured], ids=lambda script: script.__name__)
def test_what_follows_a_pass_that_is_left_early_happens_once(
    script: Script, tmp_path: Path
) -> None:
    """The checkpoint is written behind the pass, and before the next one."""
    whole = run(script, tmp_path / "whole")
    assert run(script, tmp_path / "stopped", 4) is None  # the first step behind that checkpoint
    resumed = run(script, tmp_path / "stopped")

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.parametrize(("before", "now", "batch"), [(2, 1, 20), (1, 2, 5)])
def test_batches_go_on_to_be_counted_by_another_number_of_trainers(
    before: int, now: int, batch: int
) -> None:
    """So that the checkpoint after that has the right place, too."""
    passes = {"loaders": {}, "begun": {"a": 3}, "under_way": [["a", 3, 2, 10]]}
    position = Position(3, {}, {trainer: {"passes": passes} for trainer in range(before)})
    found = position.passes(0, now).find("a", 3)

    assert (found.skipped, found.given, found.trained) == (batch, batch, batch)


@pytest.mark.parametrize(("size", "batch"), [(8, 5), (4, 10), (3, 13), (0, 5)])
def test_batches_of_another_size_go_on_at_the_same_sample(size: int, batch: int) -> None:
    """As where a script divides its batch size by the number of trainers."""
    saved = LoggedPass("a", 3, 2, trained=5, size=8)
    found = SavedPasses.of(SavedPasses({}, {"a": 3}, (saved,)).plain()).find("a", 3)
    found.of_size(size)

    assert (found.skipped, found.given, found.trained) == (batch, batch, batch)


def test_a_checkpoint_of_an_earlier_version_knows_no_sizes() -> None:
    """Its batches are those of the script."""
    plain = {"loaders": {}, "begun": {"a": 3}, "under_way": [["a", 3, 2, 10]]}
    found = SavedPasses.of(plain).find("a", 3)
    found.of_size(4)

    assert found.skipped == 10


def one_optimizer(steps: Steps) -> nn.Module:
    model = net()
    optimizer = adam(model)
    for (x,) in fleet.shard(DataLoader(DATA, batch_size=3)):
        train(model, optimizer, x)
        steps.one()
    return model


def test_checkpoints_of_more_optimizers_stop_the_job(tmp_path: Path) -> None:
    """Rather than to begin anew and to remove them."""

    def both(steps: Steps) -> nn.Module:
        one, other = net(), net()
        for model, optimizer in [(one, adam(one)), (other, adam(other))]:
            train(model, optimizer, DATA[:3][0])
            steps.one()
        return one

    run(both, tmp_path)
    with pytest.raises(ValueError, match="expected a job of 2 distributed optimizers, got 1"):
        run(one_optimizer, tmp_path)


def test_checkpoints_that_cannot_be_read_stop_the_job(tmp_path: Path) -> None:
    """Likewise."""
    run(one_optimizer, tmp_path)
    for found in tmp_path.glob("step-*/checkpoint.json"):
        found.write_text("{")
    with pytest.raises(ValueError) as raised:
        run(one_optimizer, tmp_path)

    assert "no checkpoint below" in raised.value.__notes__[0]


class Named:
    """A factor that holds what no file can."""

    def __init__(self) -> None:
        self.epochs = {1, 2}

    def __call__(self, epoch: int) -> float:
        return 1.0


def test_a_scheduler_that_cannot_be_saved_costs_checkpoints_not_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The message names it."""
    fleet.init(checkpoint=str(tmp_path), every=ALWAYS)
    model = net().eval()
    optimizer = adam(model)
    scheduler = LambdaLR(optimizer, Named())
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            train(model, optimizer, DATA[0][0][None])
            scheduler.step()
    fleet.finish()

    assert "in the state of the scheduler 0 LambdaLR, got another" in caplog.text
