"""Whether a step's gradients were averaged over the trainers: a forward of a registered model leads
to them, and not one of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.collective.data_parallel import DataParallel


class AveragedGradients:
    """Compares the forwards of registered models with the gradients that their parameters have.

    Args:
        wrapped: the models, whose forwards make a backward average.
    """

    def __init__(self, wrapped: Sequence[DataParallel]) -> None:
        self._wrapped = wrapped
        # by model, at the last step: its forwards, and which gradient its first parameter had
        self._forwards: dict[nn.Module, int] = {}
        self._gradients: dict[nn.Module, tuple[int, int]] = {}

    def check(self) -> None:
        """Returns if no gradient is this trainer's alone.  One that was there at the last step was
        averaged then.

        Raises:
            RuntimeError: a model's parameters have gradients, and it was not called.
        """
        for model in self._wrapped:
            gradient = _first(model)
            called = model.forwards != self._forwards.get(model, 0)
            if gradient is None or called or _known(gradient) == self._gradients.get(model):
                continue
            raise RuntimeError(
                "optimizer.step(): expected gradients of a forward of the registered model, got "
                "others, which no trainer has averaged: call the model itself, model(...), not its "
                "layers or another method"
            )

    def note(self) -> None:
        """A step has been taken with the gradients as they are."""
        for model in self._wrapped:
            self._forwards[model] = model.forwards
            if (gradient := _first(model)) is not None:
                self._gradients[model] = _known(gradient)


def _first(model: nn.Module) -> torch.Tensor | None:
    """A model's first gradient."""
    return next((p.grad for p in model.parameters() if p.grad is not None), None)


def _known(gradient: torch.Tensor) -> tuple[int, int]:
    """What shows that it is another gradient, or was written to."""
    return gradient.data_ptr(), gradient._version
