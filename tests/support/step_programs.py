"""A step in a program beside the same step in eager code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer import Executor
from transpiler import capture


def trains_alike(
    model: nn.Module,
    step: Callable[..., Tensor],
    example: Sequence[Tensor],
    *batches: Sequence[Tensor],
) -> None:
    """Asserts that a program of the step trains as eager code does, on batches of any sizes."""
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    program, startup = capture(model, step, optimizer, tuple(example))
    with Executor() as executor:
        executor.run(startup)
        for batch in batches or (example,):
            (loss,) = executor.run(program, tuple(batch), ["loss"])
            other.zero_grad()
            expected = step(twin, *batch)
            expected.backward()
            other.step()
            torch.testing.assert_close(loss, expected.detach())
    for (name, mine), theirs in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        if not name.endswith("table.metadata"):  # counts steps of each kind by itself
            torch.testing.assert_close(mine, theirs, msg=name)
