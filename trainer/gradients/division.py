"""Which gradients of a step this process applies, and which the servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from trainer.embedding.proxy import ProxyParameter
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

    Raises:
        ValueError: one is of a parameter that was in no group when the trainers joined.
    """
    local = {
        each.name
        for each in plan.placements
        if each.group is not None and plan.lane_of(each).kind.steps_on_trainer
    }
    held = {each.name for each in plan.placements if each.group is not None}
    here: Gradients = {}
    there: Gradients = {}
    for parameter, gradient in gradients.items():
        name = names.get(parameter)
        if name in local:
            here[parameter] = gradient
        elif name in plan.averaged or isinstance(parameter, ProxyParameter):
            continue
        elif name in held:
            there[parameter] = gradient
        else:
            said = f"of shape {list(parameter.shape)}" if name is None else repr(name)
            raise ValueError(
                f"optimizer.step(): parameter {said} has a gradient, and was in no group of the "
                "optimizer when the trainers joined: give the optimizer its group from the start, "
                "frozen by requires_grad_(False), and unfreeze it when it is to be trained"
            )
    return here, there
