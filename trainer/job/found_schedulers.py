"""The schedulers of a job's optimizers, which a script makes without registering them."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, LRScheduler]:
    """The schedulers of these optimizers, without those that another scheduler holds.

    An optimizer does not know its schedulers; the garbage collector does.

    Args:
        optimizers: the job's optimizers and those that they wrap, alternating.

    Returns:
        By optimizer and type: "0 StepLR".

    Raises:
        ValueError: an optimizer has two schedulers of one type, which cannot be told apart.
    """
    numbers = {id(each): index // 2 for index, each in enumerate(optimizers)}
    found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    found = [each for each in found if id(getattr(each, "optimizer", None)) in numbers]
    held = {id(inner) for each in found for inner in getattr(each, "_schedulers", ())}
    named: dict[str, LRScheduler] = {}
    for each in found:
        if id(each) in held:
            continue
        name = f"{numbers[id(each.optimizer)]} {type(each).__name__}"
        if name in named:
            raise ValueError(
                f"automatic checkpoints: expected one scheduler of a type for each optimizer, got "
                f"two {type(each).__name__}: put them into one ChainedScheduler or SequentialLR"
            )
        named[name] = each
    return named
