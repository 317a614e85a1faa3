"""The schedulers of a job's optimizers, which a script makes without registering them."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainer.checkpoint import resume
from trainer.optimizer import DistributedOptimizer


def scheduler_states(optimizers: Sequence[DistributedOptimizer]) -> dict[str, Any]:
    """The states of the schedulers of a job's optimizers, by the names of :func:`schedulers_of`, as
    JSON can hold them.

    Raises:
        ValueError: JSON cannot hold one; or an optimizer has two schedulers of one type.
    """
    found = schedulers_of_job(optimizers)
    return {name: _packed(name, each.state_dict()) for name, each in found.items()}


def schedulers_of_job(optimizers: Sequence[DistributedOptimizer]) -> Mapping[str, LRScheduler]:
    """The schedulers of a job's optimizers, and of those that they wrap.

    Raises:
        ValueError: an optimizer has two schedulers of one type.
    """
    return schedulers_of([each for made in optimizers for each in (made, made.inner)])


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


def _packed(name: str, state: Any) -> Any:
    """A scheduler's state, as JSON can hold it.

    Raises:
        ValueError: it cannot.
    """
    try:
        found = resume.packed(state)
        json.dumps(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected numbers, words, lists and mappings in the state of the scheduler {name}, "
            f"got another: {error}"
        ) from error
    return found
