"""Ops that torch checks, or counts, by the numbers in a tensor: captured without need to refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import sgd
from trainer import Executor
from transpiler import capture
from transpiler.ir.graph import Role


def positive(model: nn.Module, x: Tensor) -> Tensor:
    """Symmetric positive definite matrices."""
    made = model(x)
    return made.transpose(1, 2) @ made + 3 * torch.eye(3)


def one_hot(model, x, ids):
    return (model(x) * F.one_hot(ids, 3)).square().mean()


def cholesky(model, x):
    return torch.linalg.cholesky(positive(model, x)).square().mean()


def inverse(model, x):
    return torch.inverse(positive(model, x)).square().mean()


def solve(model, x):
    return torch.linalg.solve(positive(model, x), x).square().mean()


def ctc(model, x, targets, lengths, labels):
    logs = model(x).log_softmax(2).transpose(0, 1)
    losses = [
        F.ctc_loss(logs, targets, lengths, labels, reduction=how, zero_infinity=how == "mean")
        for how in ("mean", "sum", "none")
    ]
    return losses[0] + losses[1] + losses[2].square().mean()


def speech(size: int) -> tuple[Tensor, ...]:
    labels = torch.randint(1, 4, (size,))
    return (
        torch.randn(size, 7, 3),
        torch.randint(1, 3, (size, 3)),
        torch.randint(6, 8, (size,)),
        labels,
    )


def matrices(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 3, 3),)


def classes(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 3), torch.randint(0, 3, (size,))


STEPS = [(one_hot, classes), (cholesky, matrices), (inverse, matrices), (solve, matrices)]
STEPS.append((ctc, speech))


@pytest.mark.parametrize(("step", "batch"), STEPS, ids=lambda each: each.__name__)
def test_ops_that_check_their_arguments_are_captured(step: Callable, batch: Callable):
    """Loss and gradients equal eager training to the bit; a clone for tests checks matrices as
    well.
    """
    torch.manual_seed(3)
    model = nn.Linear(3, 3)
    program, _ = capture(model, step, sgd(model), batch(4))
    gradients = [v.name for v in program.main.variables_of(Role.GRADIENT)]
    fed, twin = batch(6), copy.deepcopy(model)
    with Executor() as executor:
        loss, *came = executor.run(program, fed, ["loss", *gradients])
    expected = step(twin, *fed)
    expected.backward()

    assert torch.equal(loss, expected.detach())
    for name, gradient in zip(gradients, came, strict=True):
        assert torch.equal(gradient, twin.get_parameter(name.removesuffix("@GRAD")).grad), name
    checks = {"aten._linalg_check_errors"}
    clone = program.clone(for_test=True)
    assert checks & {op.type for op in program.main.ops} == checks & {
        op.type for op in clone.main.ops
    }


def test_a_check_that_fails_names_the_line():
    """A matrix that is not positive definite raises when the program runs."""
    model = nn.Linear(3, 3)

    def step(model, x):
        return torch.linalg.cholesky(x + 0 * model(x)).mean()

    eyes = torch.eye(3).expand(4, 3, 3).clone()
    program, _ = capture(model, step, sgd(model), (eyes,))
    with Executor() as executor, pytest.raises(RuntimeError, match=r"not positive-definite.*"):
        executor.run(program, (-eyes,))
