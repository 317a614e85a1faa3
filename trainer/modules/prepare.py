"""The changes that a strategy may make to a model, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from trainer.modules.recompute import recomputed
from trainer.modules.sparsity import check_keeps_zeros, masked
from trainer.modules.sync_batch_norm import synchronised
from transpiler.precision.mixed_forward import mixed, plain
from transpiler.strategy.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One change of a model.

    Attributes:
        asked: whether a strategy asks for it.
        apply: makes it, in place or in a module that it returns in the model's place.
        undo: makes the model a plain module again, where there is something to undo.
    """

    asked: Callable[[DistributedStrategy], bool]
    apply: Callable[[nn.Module, DistributedStrategy], nn.Module]
    undo: Callable[[nn.Module], None] | None = None


CHANGES: tuple[ModelChange, ...] = (
    ModelChange(lambda strategy: strategy.sync_batch_norm, synchronised),
    ModelChange(lambda strategy: bool(strategy.asp), masked),
    ModelChange(lambda strategy: strategy.recompute, recomputed),
    ModelChange(lambda strategy: strategy.amp, mixed, plain),
)


def prepared(model: nn.Module, strategy: DistributedStrategy | None) -> nn.Module:
    """Changes a model as the strategy of ``fleet.init`` asks.

    Raises:
        ValueError: a setting does not fit the model; the message names it.
    """
    for change in CHANGES:
        if strategy is not None and change.asked(strategy):
            model = change.apply(model, strategy)
    return model


def check_optimizer(optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None) -> None:
    """Checks that an optimizer may train a model that a strategy has changed.

    Raises:
        ValueError: it would break a setting; the message names it.
    """
    if strategy is not None and strategy.asp:
        check_keeps_zeros(optimizer)


def plain_again(model: nn.Module) -> None:
    """Undoes the changes of :func:`prepared` in a model, in the opposite order."""
    for change in reversed(CHANGES):
        if change.undo is not None:
            change.undo(model)
