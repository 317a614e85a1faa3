"""A script that changes gradients between backward and step, where trainers' gradients are averaged
after that: it is told, once, what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.seeded import seeded
from tests.support.table_trainers import Net, Trainer
from tests.support.threads import at_once

Servers = Callable[[int], str]
Change = Callable[[Any, Any], object]
LOGGER = "trainer.gradients.gradient_changes"
STEPS = 4


class Dense(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(7):
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def loss(self, step: int, number: int, second: bool = True) -> Tensor:
        """Of a batch of this trainer."""
        generator = torch.Generator().manual_seed(10 * step + number)
        hidden = self.first(torch.randn(5, 4, generator=generator)).tanh()
        return (self.second(hidden) if second else hidden).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def run(
    endpoints: str, change: Change | None, trainers: int = 2, steps: int = STEPS, **configs: Any
) -> list[nn.Module]:
    """A job whose trainers all change their gradients like that before each step."""
    jobs = [
        Trainer(endpoints, number, trainers, Dense(), sgd, **configs) for number in range(trainers)
    ]

    def play(number: int) -> None:
        model, optimizer = jobs[number].model, jobs[number].optimizer
        for step in range(steps):
            optimizer.zero_grad()
            model.loss(step, number).backward()
            if change is not None:
                change(model, optimizer)
            optimizer.step()

    at_once(*(partial(play, number) for number in range(trainers)))
    for each in jobs:
        each.optimizer.close()
    return [each.model for each in jobs]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def each_gradient(act: Callable[[Tensor], object]) -> Change:
    def change(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            act(parameter.grad)

    return change


def replaced(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def unscaled_and_clipped(model: Any, optimizer: Any) -> None:
    unscaled(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unscaled(model: Any, optimizer: Any) -> None:
    """As a script with GradScaler: a scaled backward in the place of the plain one."""
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(0, 0)).backward()
    scaler.unscale_(optimizer)


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "clip_grad_norm_ one by one": lambda m, o: nn.utils.clip_grad_norm_(
        m.parameters(), 0.1, foreach=False
    ),
    "clip_grad_norm_ of a part": lambda m, o: nn.utils.clip_grad_norm_(m.second.parameters(), 0.1),
    "clip_grad_value_": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "clamp_": each_gradient(lambda g: g.clamp_(-0.01, 0.01)),
    "noise": each_gradient(lambda g: g.add_(torch.randn_like(g))),
    "another tensor": replaced,
    "clamp_ of data": each_gradient(lambda g: g.data.clamp_(-0.01, 0.01)),
    "a factor on data": each_gradient(lambda g: g.data.mul_(0.3)),
    "zeros in data": each_gradient(lambda g: g.data.zero_()),
    "unscale_, then clip": unscaled_and_clipped,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_changed_before_the_mean_is_noticed_once(
    servers: Servers, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One warning of the whole job names the step, the parameter, the number of trainers, and
    ``grad_clip=``.
    """
    run(servers(1), CHANGES[name])
    (said,) = warnings(caplog)
    which = "second.weight" if name == "clip_grad_norm_ of a part" else "first.weight"
    assert said.startswith(f"step 1: the gradient of '{which}' was changed")
    assert "the mean over 2 trainers" in said and "grad_clip=ClipGradByGlobalNorm" in said


def left_out(model: Any, optimizer: Any) -> None:
    """A batch whose gradients are dropped, as of a loss that is not finite."""
    optimizer.zero_grad(set_to_none=False)
    model.loss(0, 0, second=False).backward()


def accumulated(model: Any, optimizer: Any) -> None:
    for step in range(2):
        model.loss(step, 1).backward()


LEFT: dict[str, Change | None] = {
    "nothing": None,
    "accumulation": accumulated,
    "zeros, and another backward": left_out,
    "no gradient": lambda m, o: o.zero_grad(),
    "unscale_": unscaled,
    "a norm that is read": each_gradient(lambda g: g.norm()),
}


@pytest.mark.parametrize("name", LEFT)
def test_gradients_as_backward_left_them_are_not_warned_of(
    servers: Servers, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """What autograd and GradScaler do to a gradient is no change by the script."""
    run(servers(1), LEFT[name])
    assert not warnings(caplog)


ALONE: dict[str, dict[str, Any]] = {
    "one trainer": {"trainers": 1},
    "async": {"send_queue_size": 1},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "geo": {"k_steps": 2},
}


@pytest.mark.parametrize("name", ALONE)
def test_clipping_is_not_warned_of_where_it_is_one_processs(
    servers: Servers, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One trainer, and modes that apply each trainer's own gradient."""
    run(servers(1), CHANGES["clip_grad_norm_"], **ALONE[name])
    assert not warnings(caplog)


def test_only_averaged_gradients_of_a_mixed_job_are_watched(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """All are clipped; the warning names the first that trainers share a step of."""
    modes = {"first.*": "async", "second.bias": "sync", "*": "async"}
    run(servers(1), CHANGES["clip_grad_norm_"], modes=modes)
    (said,) = warnings(caplog)
    assert said.startswith("step 1: the gradient of 'second.bias' was changed")


def test_clipping_goes_on_acting_on_each_trainers_gradient(servers: Servers) -> None:
    """The parameters are those of the mean of clipped gradients, on every trainer."""
    found = run(servers(1), CHANGES["clip_grad_norm_"])
    reference = Dense()
    optimizer = sgd(reference)
    for step in range(STEPS):
        parts = []
        for number in range(2):
            optimizer.zero_grad()
            reference.loss(step, number).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            parts.append([p.grad.clone() for p in reference.parameters() if p.grad is not None])
        for parameter, *own in zip(reference.parameters(), *parts, strict=True):
            parameter.grad = (own[0] + own[1]) / 2
        optimizer.step()
    for model in found:
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_first_change_at_any_step_is_noticed(
    servers: Servers, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """At the step of the change, by its number."""

    def late(model: Any, optimizer: Any) -> None:
        if optimizer.steps >= step:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    run(servers(1), late, steps=step + 2)
    (said,) = warnings(caplog)
    assert said.startswith(f"step {step + 1}: ")


def test_clipping_a_table_before_the_mean_is_noticed(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """A table's gradient is that of its proxy parameter."""
    endpoints = servers(1)
    jobs = [Trainer(endpoints, number, 2, Net()) for number in range(2)]

    def play(number: int) -> None:
        for _ in range(2):
            jobs[number].optimizer.zero_grad()
            jobs[number].model.add([1, 2 + number], 1.0)
            nn.utils.clip_grad_norm_(jobs[number].model.emb.parameters(), 0.1)
            jobs[number].optimizer.step()

    at_once(*(partial(play, number) for number in range(2)))
    for each in jobs:
        each.optimizer.close()
    (said,) = warnings(caplog)
    assert said.startswith("step 1: the gradient of 'emb' was changed")


def test_a_job_leaves_no_hook_on_parameters(servers: Servers) -> None:
    """Neither one that has warned nor one that has not."""
    for change in (None, CHANGES["clip_grad_norm_"]):
        for model in run(servers(1), change):
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
