"""A backward part that is added to a forward program computes what autograd computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import EIGHT, bert
from tests.support.unusual_models import bare
from trainer import Executor
from transpiler import InputSpec, append_backward, capture, gradients, name
from transpiler.ir.graph import Role
from transpiler.verify.invariants import defined_before_use


def loss_of(result: Tensor | dict[str, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result["loss"]


@pytest.mark.parametrize(
    "case",
    [case for case in EIGHT if case != bert],
    ids=lambda case: case.__name__,
)
def test_gradients_equal_those_of_eager_training(case):
    """A forward program of the model in train mode, and its backward part: loss and gradients are
    those of the module's own backward pass, to the bit, at another batch size.
    """
    torch.manual_seed(7)
    model, step, _, batch = case()
    forward, _ = capture(
        model.train(), lambda m, *b: {"loss": loss_of(step(m, *b))}, None, batch(4)
    )
    program = append_backward(forward)
    found = [v.name for v in program.main.variables_of(Role.GRADIENT)]
    fed = batch(6)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())

    assert program.storage is forward.storage and not list(defined_before_use(program))
    with torch.backends.mkldnn.flags(enabled=not recurrent):
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        torch.manual_seed(1)
        with Executor() as executor:
            loss, *came = executor.run(program, fed, ["loss", *found])
        for key, value in model.named_buffers():
            value.copy_(buffers[key])
        torch.manual_seed(1)
        expected = loss_of(step(model, *fed))
        expected.backward()
    assert torch.equal(loss, expected.detach())
    trained = {f"{key}@GRAD": p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(trained)
    for key, gradient in zip(found, came, strict=True):
        assert torch.equal(gradient, trained[key]), key


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(name(torch.tanh(self.one(x)), "hidden"))
        return out


def test_a_list_of_parameters_and_constants():
    """``parameter_list`` chooses, ``no_grad_set`` stops the gradient where a variable is made."""
    model = Chain()
    forward, _ = capture(model, lambda m, x: m(x).square().mean(), example=(torch.ones(3, 4),))

    def names(**options: Any) -> list[str]:
        made = append_backward(forward, "output", **options)
        return sorted(v.of for v in made.main.variables_of(Role.GRADIENT))

    assert names() == ["one.bias", "one.weight", "two.bias", "two.weight"]
    assert names(parameter_list=["two.bias"]) == ["two.bias"]
    assert names(no_grad_set={"hidden"}) == ["two.bias", "two.weight"]
    assert names(no_grad_set={"two.weight", "one.bias"}) == ["one.weight", "two.bias"]


def test_gradients_of_several_targets_reach_inputs_and_parameters():
    """The gradient of the sum of two targets, one of them named inside the step, with respect to an
    input and a parameter.
    """
    model, x = Chain(), torch.randn(5, 4)
    forward, _ = capture(model, lambda m, x: {"logits": m(x)}, example=(torch.ones(3, 4),))
    program = gradients(["logits", "hidden"], ["x", "one.bias"], forward)
    with Executor() as executor:
        of_x, of_bias = executor.run(program, (x,), ["x@GRAD", "one.bias@GRAD"])
    x.requires_grad_()
    hidden = torch.tanh(model.one(x))
    (model.two(hidden).sum() + hidden.sum()).backward()

    assert torch.equal(of_x, x.grad) and torch.equal(of_bias, model.one.bias.grad)
    assert program.main.variables["hidden"].role is Role.TEMPORARY


def test_what_the_step_keeps_out_of_autograd_stays_out():
    """``detach()`` and ``torch.no_grad()`` hold in the backward part."""

    def forward(self, x):
        with torch.no_grad():
            target = self.slow(x)
        return F.mse_loss(self.fast(x) + self.fast(x).detach(), target)

    model = bare(forward, slow=nn.Linear(4, 2), fast=nn.Linear(4, 2))
    fed = torch.randn(6, 4)
    program, _ = capture(model, lambda m, x: {"loss": m(x)}, example=(torch.randn(3, 4),))
    added = append_backward(program)
    assert {v.of for v in added.main.variables_of(Role.GRADIENT)} == {"fast.weight", "fast.bias"}
    with Executor() as executor:
        (gradient,) = executor.run(added, (fed,), ["fast.weight@GRAD"])
    model(fed).backward()
    assert torch.equal(gradient, model.fast.weight.grad)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_recurrent_layer_over_a_free_time_is_differentiated(frozen: bool) -> None:
    """Its parameters have autograd's gradients at another length, to the bit; none where it runs
    under ``torch.no_grad()``.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not frozen):
            states, _ = self.layer(x)
        return self.out(states).mean()

    torch.manual_seed(3)
    model = bare(forward, layer=nn.LSTM(4, 5, batch_first=True), out=nn.Linear(5, 1))
    free = InputSpec([None, None, 4], "float32", "x")
    with torch.backends.mkldnn.flags(enabled=False):
        program, _ = capture(model, lambda m, x: {"loss": m(x)}, example=(free,))
        added, fed = append_backward(program), torch.randn(3, 9, 4)
        found = {f"{v.of}": v.name for v in added.main.variables_of(Role.GRADIENT)}
        with Executor() as executor:
            came = executor.run(added, (fed,), list(found.values()))
        model(fed).backward()
    trained = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(trained) and len(found) == (2 if frozen else 6)
    for key, gradient in zip(found, came, strict=True):
        assert torch.equal(gradient, trained[key]), key


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_what_cannot_be_differentiated_is_told():
    """The user's own backward code, a training program, a loss of several elements, names
    that there are not.
    """
    model, example = Chain(), (torch.ones(3, 4),)
    program, _ = capture(model, lambda m, x: m(x), example=example)
    with pytest.raises(ValueError, match=r"loss: expected one element, got \['batch', 2\]"):
        append_backward(program, "output")
    with pytest.raises(ValueError, match="loss: the program has no variable 'loss'"):
        append_backward(program)
    with pytest.raises(ValueError, match="inputs: the program has no variable 'y'"):
        gradients("output", "y", program)
    with pytest.raises(ValueError, match="parameter_list: the program has no 'three.bias'"):
        append_backward(program, "output", ["three.bias"])
    straight, _ = capture(model, lambda m, x: _Straight.apply(m(x)).mean(), example=example)
    with pytest.raises(ValueError, match="calls _Straight, whose backward is Python code"):
        append_backward(straight, "output")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training, _ = capture(model, lambda m, x: m(x).mean(), optimizer, example)
    with pytest.raises(ValueError, match="expected a forward program, got one that trains"):
        append_backward(training)
