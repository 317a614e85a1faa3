"""What is said of single parameters beside the model: groups for an optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer import Constant, DistributedEmbedding, Executor, Normal, Uniform
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    DistributeTranspiler,
    L2Decay,
    ParamAttr,
    capture,
    parameter_groups,
)
from transpiler.clip import GradClip, apply

ATTRS = [
    ParamAttr("0.weight", learning_rate=0.5, regularizer=L2Decay(0.3)),
    ParamAttr("0.*", trainable=False),
    ParamAttr("*.bias", need_clip=False, regularizer=L2Decay(0.0)),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(model: nn.Module, x: Tensor) -> Tensor:
    return 9 * model(x).pow(2).sum()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameter_groups(model, ATTRS, learning_rate=0.1), weight_decay=0.2)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(3)]


def test_the_first_pattern_that_matches_holds() -> None:
    """Groups stand in the order of the parameters; the optimizer's own settings hold where nothing
    else is said; a frozen parameter is in none.
    """
    model = net()
    optimizer = adam(model)
    names = {tensor: name for name, tensor in model.named_parameters()}
    found = [
        ([names[each] for each in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]

    assert found == [(["0.weight"], 0.05, 0.3), (["2.weight"], 0.1, 0.2), (["2.bias"], 0.1, 0.0)]
    assert not model[0].bias.requires_grad


def test_parameters_of_one_attribute_share_a_group() -> None:
    """Without attributes there is one group, as torch makes it."""
    model = net()
    (group,) = parameter_groups(model, learning_rate=0.1)

    assert group == {"lr": 0.1, "params": list(model.parameters())}


def test_initializers_fill_the_parameters() -> None:
    """Those of tables, and functions of torch.nn.init, which draw from torch's generator."""
    model = net()
    attrs = [
        ParamAttr("0.weight", Uniform(2, 3)),
        ParamAttr("0.bias", Constant(7)),
        ParamAttr("2.weight", partial(nn.init.normal_, std=0.5)),
        ParamAttr("2.bias", Normal(1.0, 0.0)),
    ]
    torch.manual_seed(5)
    parameter_groups(model, attrs, learning_rate=0.1)
    torch.manual_seed(5)
    first, second = torch.empty(4, 3).uniform_(2, 3), torch.empty(2, 4).normal_(0, 0.5)

    assert torch.equal(model[0].weight, first)
    assert model[0].bias.tolist() == [7.0] * 4
    assert torch.equal(model[2].weight, second)
    assert model[2].bias.tolist() == [1.0] * 2


def trained_eagerly(clip: GradClip | None) -> nn.Module:
    """By hand: what needs no clipping is left out of it."""
    model = net()
    optimizer = adam(model)
    clipped = [model[0].weight, model[2].weight]
    for x in batches():
        optimizer.zero_grad()
        step(model, x).backward()
        if clip is not None:
            grads = [each.grad for each in clipped if each.grad is not None]
            for each, grad in zip(clipped, apply(clip.to_clip(), grads), strict=True):
                each.grad = grad
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "clip", [None, ClipGradByValue(0.1), ClipGradByNorm(0.1), ClipGradByGlobalNorm(0.1)]
)
def test_a_captured_program_does_as_the_groups_say(clip: GradClip | None) -> None:
    """Learning rates, decays and what is not clipped: to the bit as by hand."""
    model = net()
    program, _ = capture(model, step, adam(model), (batches()[0],), grad_clip=clip)
    with Executor() as executor:
        for x in batches():
            executor.run(program, feed=(x,))
    wanted = trained_eagerly(clip)

    assert ("2.bias@GRAD@CLIP" in program.main.variables) is False
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


def test_the_factor_stays_when_a_scheduler_moves_the_rate() -> None:
    """A scheduler multiplies each group's own rate."""
    optimizer = adam(net())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    optimizer.step()
    scheduler.step()

    assert [round(group["lr"], 6) for group in optimizer.param_groups] == [0.005, 0.01, 0.01]


def test_a_plan_clips_all_gradients_or_none() -> None:
    """A program with gradients that are left out is for one process, which transpile says."""
    model = net()
    program, startup = capture(
        model, step, adam(model), (batches()[0],), grad_clip=ClipGradByValue(1)
    )
    with pytest.raises(
        ValueError, match=r"2\.bias@GRAD unclipped .*need_clip=False acts where one"
    ):
        DistributeTranspiler().transpile(0, program, "a:1", 2, startup_program=startup)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"name": 1}, TypeError, "name: expected text, got 1"),
        ({"name": ""}, ValueError, "name: expected a pattern"),
        ({"initializer": 0.5}, TypeError, "initializer: expected Constant, .* got 0.5"),
        ({"learning_rate": "x"}, TypeError, "learning_rate: expected a number, got 'x'"),
        ({"learning_rate": True}, TypeError, "learning_rate: expected a number, got True"),
        ({"learning_rate": -1}, ValueError, "learning_rate: expected a number of 0 or more"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate: .* got nan"),
        ({"regularizer": 0.1}, TypeError, "regularizer: expected an L2Decay or None, got 0.1"),
        ({"trainable": 1}, TypeError, "trainable: expected True or False, got 1"),
        ({"need_clip": None}, TypeError, "need_clip: expected True or False, got None"),
    ],
)
def test_a_wrong_attribute_is_an_error(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message names it."""
    with pytest.raises(error, match=f"ParamAttr: {message}"):
        ParamAttr(**settings)


@pytest.mark.parametrize(
    ("attrs", "error", "message"),
    [
        ("0.*", TypeError, r"expected a list of ParamAttr, got '0\.\*'"),
        (["0.*"], TypeError, r"expected a ParamAttr, got '0\.\*'"),
        ([ParamAttr()], ValueError, "expected a ParamAttr with a name"),
        ([ParamAttr("0.wieght")], ValueError, r"matches no parameter; close names: 0\.weight"),
    ],
)
def test_wrong_patterns_are_an_error(attrs: Any, error: type[Exception], message: str) -> None:
    """One that matches nothing names the closest parameters."""
    with pytest.raises(error, match=message):
        parameter_groups(net(), attrs, learning_rate=0.1)


def test_what_cannot_be_filled_is_an_error() -> None:
    """A lazy parameter has no shape, and a table's rows begin as its init says."""
    attrs = [ParamAttr("*", Constant(0))]
    with pytest.raises(ValueError, match="'weight' has no shape before"):
        parameter_groups(nn.LazyLinear(2), attrs, learning_rate=0.1)
    with pytest.raises(ValueError, match="expected no initializer for a table"):
        parameter_groups(DistributedEmbedding(2), attrs, learning_rate=0.1)
    with pytest.raises(TypeError, match="expected a module, got list"):
        parameter_groups([], learning_rate=0.1)  # type: ignore[arg-type]  # refused
