"""Which gradients of a step this process applies, and which the servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from transpiler.plan.plan import Plan

Gradients = dict[torch.Tensor, torch.Tensor]  # by parameter


@contextmanager
def hidden(gradients: Gradients) -> Iterator[None]:
    """In this context these parameters have no gradient."""
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def tables_in(plan: Plan, lanes: Sequence[int]) -> list[str]:
    """The tables whose rows the steps of these lanes update."""
    return [table.name for table in plan.tables if table.lane in lanes]


def divided(
    gradients: Gradients, names: Mapping[torch.Tensor, str], plan: Plan
) -> tuple[Gradients, Gradients]:
    """The gradients of parameters that this process updates by itself (the k-step modes), and those
    of the servers'.
    """
    local = {
        each.name
        for each in plan.placements
        if each.group is not None and plan.lane_of(each).kind.steps_on_trainer
    }
    here: Gradients = {}
    there: Gradients = {}
    for parameter, gradient in gradients.items():
        name = names.get(parameter)
        if name in local:
            here[parameter] = gradient
        elif name is not None and name not in plan.averaged:
            there[parameter] = gradient
    return here, there
