"""The part of a program that merges gradients over runs, and decides whether a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from transpiler.ir.graph import Op, Storage, refs

log = logging.getLogger(__name__)


class MergeSegment:
    """The sums of a program's gradients over some runs; they are in its storage, which the copies
    of a program share.

    Args:
        op: a gradient_merge.
        storage: the program's; None: it keeps the sums itself.
    """

    def __init__(self, op: Op, storage: Storage | None) -> None:
        k_steps, avg = op.arguments["k_steps"], op.arguments["avg"]
        assert isinstance(k_steps, int) and isinstance(avg, bool), "the catalogue checks it"
        self.inputs, self.outputs = tuple(refs(op.arguments["x"])), op.outputs
        self._k_steps, self._avg = k_steps, avg
        self._storage = Storage({}, None) if storage is None else storage

    @property
    def complete(self) -> bool:
        """Whether the last run was the last one of its window."""
        return self._storage.summed == 0

    def __call__(self, values: Mapping[str, Any]) -> Sequence[Tensor]:
        """Adds a run's gradients; gives the sums so far, or what an update takes."""
        sums, gradients = self._storage.sums, [values[name] for name in self.inputs]
        for name, gradient in zip(self.outputs, gradients, strict=True):
            sums[name] = gradient.clone() if self.complete else sums[name].add_(gradient)
        self._storage.summed = (self._storage.summed + 1) % self._k_steps
        if self.complete and self._avg:
            for name in self.outputs:
                sums[name].div_(self._k_steps)
        return [sums[name] for name in self.outputs]

    def end(self) -> None:
        """Says how many runs have made no update, where an Executor closes within a window."""
        if not self.complete:
            log.warning(
                "gradient_merge: the last %d runs have made no update, for one takes %d",
                self._storage.summed,
                self._k_steps,
            )
            self._storage.summed = 0
