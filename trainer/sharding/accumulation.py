"""Accumulation: the gradients of several steps become one update of their mean, after one
reduction.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Accumulation:
    """Counts steps, and lets FSDP2 reduce gradients in the last backward before an update only.

    Until then a rank keeps its own gradients, whole.

    Args:
        steps: the number of steps of an update.
        modules: those whose gradients FSDP2 reduces; the setting covers their submodules.
    """

    def __init__(self, steps: int, modules: Iterable[nn.Module]) -> None:
        self._steps, self._taken = steps, 0
        self._modules = [module for module in modules if isinstance(module, FSDPModule)]
        self._reduce()

    @property
    def under_way(self) -> bool:
        """Whether accumulated gradients wait for those of further steps."""
        return self._taken > 0

    def ends(self) -> bool:
        """Counts a step, and tells whether an update is due."""
        self._taken = (self._taken + 1) % self._steps
        self._reduce()
        return not self._taken

    def _reduce(self) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(self._taken + 1 == self._steps)

    @torch.no_grad()
    def average(self, gradients: Iterable[Tensor]) -> None:
        """Turns sums into means."""
        if self._steps > 1:
            for gradient in gradients:
                gradient.div_(self._steps)
