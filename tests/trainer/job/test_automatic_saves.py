"""A script that is stopped anywhere and started again ends with what it would have had, to the
bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.support.tiers import RARE
from trainer import fleet
from trainer.job.job import present

DATA = TensorDataset(torch.linspace(-1, 1, 36).reshape(12, 3))
ALWAYS = 1e-6  # seconds between two checkpoints: after every step


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files need not outlive the machine: hundreds of checkpoints are flushed by nobody."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Stopped(Exception):
    """The process is killed here."""


class Steps:
    """Counts steps, and stops the script after one of them."""

    def __init__(self, stop: int) -> None:
        self.taken, self._stop = 0, stop

    def one(self) -> None:
        self.taken += 1
        if self.taken == self._stop:
            raise Stopped


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)
    return fleet.distributed_model(nn.Sequential(*layers))


def adam(model: nn.Module) -> Any:
    return fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))


def trained(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) * np.random.random()).square().mean().backward()
    optimizer.step()


def epochs(steps: Steps) -> nn.Module:
    """Shuffled epochs, a rate by epoch."""
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    batches = fleet.shard(DataLoader(DATA, batch_size=3, shuffle=True))
    for _ in range(3):
        for (x,) in batches:
            trained(model, optimizer, x)
            steps.one()
        scheduler.step()
    return model


def validated(steps: Steps) -> nn.Module:
    """A rate by batch; the model is evaluated after each epoch, and in its middle."""
    model = net()
    optimizer = adam(model)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=12)
    loader, other = DataLoader(DATA, batch_size=3, shuffle=True), DataLoader(DATA, batch_size=4)

    def evaluate() -> None:
        model.eval()
        for (x,) in fleet.shard(other, seed=3):
            model(x)
        model.train()

    for _ in range(3):
        for (x,) in fleet.shard(loader):
            trained(model, optimizer, x)
            scheduler.step()
            if optimizer.steps % 4 == 2:
                evaluate()
            steps.one()
        evaluate()
    return model


def accumulated(steps: Steps) -> nn.Module:
    """A step for every two batches, of which the last one of an epoch has none."""
    model = net()
    optimizer = adam(model)
    for _ in range(8):
        for number, (x,) in enumerate(fleet.shard(DataLoader(DATA, batch_size=4, shuffle=True))):
            model(x).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                steps.one()
        optimizer.zero_grad()
    return model


def two_optimizers(steps: Steps) -> nn.Module:
    """Two models take turns, each with its own rate."""
    one, other = net(), net()
    first = adam(one)
    second = fleet.distributed_optimizer(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9))
    rates = ExponentialLR(first, 0.9), CosineAnnealingLR(second, 5)
    for _ in range(2):
        for (x,) in fleet.shard(DataLoader(DATA, batch_size=4, shuffle=True)):
            trained(one, first, x)
            steps.one()
            trained(other, second, x * one(x).detach())
            steps.one()
        for rate in rates:
            rate.step()
    return nn.ModuleList([one, other])


def two_loaders(steps: Steps) -> nn.Module:
    """Batches of an iterable without a length, together with those of a batch sampler."""
    model = net()
    optimizer = adam(model)

    class Drawn:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.randn(3, 3) for _ in range(4))

    chosen = [[0, 5, 2], [7, 1], [3, 4, 9], [6, 8]]
    for _ in range(3):
        sampled = DataLoader(DATA, batch_sampler=chosen)  # type: ignore[arg-type]  # any iterable
        for x, (y,) in zip(fleet.shard(Drawn()), fleet.shard(sampled), strict=False):
            trained(model, optimizer, torch.cat([x, y]))
            steps.one()
    return model


def singly(steps: Steps) -> nn.Module:
    """Samples that no batch holds; the script leaves each epoch early."""
    model = net().eval()
    optimizer = adam(model)
    for _ in range(3):
        batches = fleet.shard(DataLoader(DATA, batch_size=None, shuffle=True))
        for (x,) in batches:
            trained(model, optimizer, x[None])
            steps.one()
            if optimizer.steps % 6 == 0:
                break
    return model


Script = Callable[[Steps], nn.Module]
SCRIPTS = [epochs, accumulated, two_loaders, *map(RARE, [validated, two_optimizers, singly])]


def run(script: Script, path: Path, stop: int = 0) -> dict[str, torch.Tensor] | None:
    """What it has trained; None where it was stopped."""
    np.random.seed(7)
    fleet.init(checkpoint=str(path), every=ALWAYS, keep=2)
    try:
        model = script(Steps(stop))
        return {name: value.clone() for name, value in model.state_dict().items()}
    except Stopped:
        return None
    finally:
        fleet.finish()


@pytest.mark.parametrize(
    "stops", [(4, 3), *map(RARE, [(1,), (2,), (3,), (5,), (6,), (3, 2), (4, 1, 1)])]
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_that_is_stopped_anywhere_ends_as_if_it_had_not_been(
    script: Script, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Stopped in its beginning, in an epoch, at an end of one, and more than once."""
    whole = run(script, tmp_path / "whole")
    for stop in stops:
        assert run(script, tmp_path / "stopped", stop) is None
    resumed = run(script, tmp_path / "stopped")

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_what_was_given_is_not_given_again(tmp_path: Path) -> None:
    """Whoever is stopped behind the last step of an epoch begins the next one."""
    seen: list[list[float]] = []

    def script(steps: Steps) -> nn.Module:
        model = net()
        optimizer = adam(model)
        for _ in range(2):
            seen.append([])
            for (x,) in fleet.shard(DataLoader(DATA, batch_size=4, shuffle=True)):
                seen[-1] += x[:, 0].tolist()
                trained(model, optimizer, x)
                steps.one()
        return model

    run(script, tmp_path, 2)  # the second batch was not asked to be followed by another one
    assert [len(batch) for batch in seen] == [8]
    first = seen.pop()[:4]
    run(script, tmp_path)

    whole = sorted(x[0].item() for (x,) in DATA)
    assert sorted(first + seen[0]) == whole and sorted(seen[1]) == whole


def test_steps_of_a_loop_of_the_script_s_own_go_on(tmp_path: Path) -> None:
    """Without fleet.shard the job saves after a step; where the loop is only the script knows."""

    def script(steps: Steps) -> nn.Module:
        model = net().eval()
        optimizer = adam(model)
        scheduler = StepLR(optimizer, 2, gamma=0.5)
        while optimizer.steps < 6:
            optimizer.zero_grad()
            model(DATA[optimizer.steps][0][None]).sum().backward()
            optimizer.step()
            steps.one()
            scheduler.step()
        return model

    whole = run(script, tmp_path / "whole")
    assert run(script, tmp_path / "stopped", 4) is None
    resumed = run(script, tmp_path / "stopped")

    assert whole is not None and resumed is not None
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_newest_that_is_whole_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged one is named, and left."""
    assert run(epochs, tmp_path, 4) is None
    newest = max(tmp_path.glob("step-*"))
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        run(epochs, tmp_path, 1)

    assert f"{newest} cannot be taken" in caplog.text
    assert "after 2 steps" in caplog.text


def test_checkpoints_of_another_model_stop_the_job(tmp_path: Path) -> None:
    """Rather than to begin anew and to remove them."""
    run(epochs, tmp_path, 4)
    fleet.init(checkpoint=str(tmp_path))
    model = fleet.distributed_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected the model's variables: only the") as raised:
        adam(model)
    fleet.finish()

    assert "give another path" in raised.value.__notes__[0]


def test_a_script_may_load_by_itself(tmp_path: Path) -> None:
    """Then it knows where it is: passes begin with the next one, whole."""
    run(epochs, tmp_path / "automatic", 4)
    fleet.init(checkpoint=str(tmp_path / "automatic"), every=ALWAYS)
    model = net()
    adam(model)
    fleet.save(str(tmp_path / "own"))
    fleet.load(str(tmp_path / "own"))
    many = [len(list(fleet.shard(DataLoader(DATA, batch_size=3)))) for _ in range(2)]
    with pytest.raises(ValueError, match="delta: expected False"):
        fleet.save(str(tmp_path / "own"), delta=True)
    fleet.finish()

    assert many == [4, 4]


def test_a_job_goes_on_where_it_cannot_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs checkpoints, not the job."""
    whole = run(epochs, tmp_path / "whole")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR):
        trained_on = run(epochs, tmp_path / "file" / "folder")

    assert whole is not None and trained_on is not None
    assert all(torch.equal(whole[name], trained_on[name]) for name in whole)
    assert "no checkpoint after step 1, the job continues" in caplog.text


def test_what_a_checkpoint_says_of_the_script(tmp_path: Path) -> None:
    """Where it is in its data, and its scheduler's state."""
    run(epochs, tmp_path, 6)  # the sixth step itself is not saved yet
    content = json.loads((tmp_path / "step-000005" / "checkpoint.json").read_text())
    place = content["meta"]["place"]

    ((trainer, mine),) = place["trainers"]
    ((loader, number, drawn, trained_on, size),) = mine["passes"]["under_way"]
    assert (trainer, number, drawn, trained_on, size) == (0, 2, 1, 1, 3)
    assert "epochs" in loader and mine["passes"]["begun"] == {loader: 2}
    assert list(place["schedulers"]) == ["0 StepLR"]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000004", "step-000005"]


def test_settings_that_cannot_act_are_refused(tmp_path: Path) -> None:
    """And no job is under way after that."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"every": 3.0}, "every: has no effect without checkpoint="),
        ({"keep": 3}, "keep: has no effect without checkpoint="),
        ({"checkpoint": str(tmp_path), "every": 0.0}, "every: expected"),
        ({"checkpoint": str(tmp_path), "keep": 0}, "keep: expected 1 checkpoint or more, got 0"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ValueError, match=words):
            fleet.init(**arguments)
    with pytest.raises(RuntimeError, match=r"call fleet.init\(\) first"):
        present()


def test_two_schedulers_of_one_type_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They could not be told apart; the job says so and goes on."""
    fleet.init(checkpoint=str(tmp_path), every=ALWAYS)
    model = net().eval()
    optimizer = adam(model)
    kept = [StepLR(optimizer, 2), StepLR(optimizer, 3)]
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            trained(model, optimizer, DATA[0][0][None])
    fleet.finish()

    assert "expected one scheduler of a type for each optimizer" in caplog.text
    assert len(kept) == 2 and not (tmp_path / "checkpoints.json").exists()
