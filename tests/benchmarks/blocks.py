"""Rows: an optimizer block as a server runs it, and a captured program's step, beside torch itself;
all in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from harness import Promise, Row, alternate, timed
from torch import nn

from pserver.dense.update import SliceUpdater
from trainer import Executor
from transpiler import capture
from transpiler.ir.rules import hparams_of, rule_of

SETTING = "one process, 1 thread, 16 M elements of float32"
FUSED = Promise(
    "wire/block Adam(fused=True) 64 MB",
    "one call of torch's fused kernel on the same memory",
    0.95,
    setting=SETTING,
)
DEFAULT = Promise(
    "wire/block Adam 64 MB", "torch.optim.Adam in its default form", 2, setting=SETTING
)
PROGRAM = Promise(
    "wire/program step",
    "the eager loop",
    0.95,
    setting="one process, 1 thread, MLP of three layers of 256, Adam, batch 32",
)
PROMISES = (FUSED, DEFAULT, PROGRAM)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    elements = 1000 if tiny else 16_000_000
    if FUSED in wanted:
        yield _fused(elements, runs)
    if DEFAULT in wanted:
        yield _default(elements, runs)
    if PROGRAM in wanted:
        yield _program(16 if tiny else 256, runs)


def _block(values: torch.Tensor, fused: bool | None) -> tuple[SliceUpdater, dict[str, float]]:
    optimizer = torch.optim.Adam([values], fused=fused)
    group = optimizer.param_groups[0]
    return SliceUpdater(rule_of(optimizer, group), values), hparams_of("adam", group)


def _fused(elements: int, runs: int) -> Row:
    values, gradient = torch.zeros(elements), torch.randn(elements)
    updater, row = _block(values, True)
    updater.update(gradient, row)
    (state,) = updater._optimizer.state.values()  # the same memory for both
    averages, squares, steps = [state["exp_avg"]], [state["exp_avg_sq"]], [state["step"]]

    def kernel() -> None:
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            [values],
            [gradient],
            averages,
            squares,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    medians = alternate(
        {"ours": timed(lambda: updater.update(gradient, row)), "torch": timed(kernel)}, runs
    )
    return Row(FUSED, medians["ours"], medians["torch"], runs)


def _default(elements: int, runs: int) -> Row:
    gradient = torch.randn(elements)
    updater, row = _block(torch.zeros(elements), None)
    parameter = torch.zeros(elements)
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = gradient
    medians = alternate(
        {"ours": timed(lambda: updater.update(gradient, row)), "torch": timed(optimizer.step)}, runs
    )
    return Row(DEFAULT, medians["ours"], medians["torch"], runs)


def _net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU()))
    )


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def _program(width: int, runs: int) -> Row:
    x, y = torch.randn(32, width), torch.randn(32, width)
    model, eager = _net(width), _net(width)
    program, startup = capture(model, _loss, torch.optim.Adam(model.parameters()), (x, y))
    optimizer = torch.optim.Adam(eager.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = _loss(eager, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    with Executor() as executor:
        executor.run(startup)
        ours = timed(lambda: executor.run(program, feed=(x, y), fetch_list=["loss"])[0].item())
        medians = alternate({"ours": ours, "eager": timed(step)}, runs)
    return Row(PROGRAM, medians["ours"], medians["eager"], runs)
