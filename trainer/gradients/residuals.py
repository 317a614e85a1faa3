"""Velocity and residual of large parameters, from step to step.  See [Note: deep gradient
compression] in transpiler/optim/dgc.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from pserver.finite import is_finite
from transpiler.optim.dgc import Compressed, Ramp, compress


class Residuals:
    """What a trainer keeps of its large parameters.  The script's thread uses it.

    Args:
        ramp: how sparse the steps are.
    """

    def __init__(self, ramp: Ramp) -> None:
        self.ramp = ramp
        self._kept: dict[Hashable, tuple[Tensor, Tensor]] = {}  # velocity and residual
        self._next: dict[Hashable, tuple[Tensor, Tensor]] = {}  # those of the step under way

    def compress(
        self,
        key: Hashable,
        parameter: Tensor,
        gradient: Tensor,
        hparams: Mapping[str, Any],
        step: int,
    ) -> Compressed:
        """What leaves of a gradient; :meth:`end` says whether the step counts.

        Where it is not finite, it is sent, so that servers see it, and leaves nothing behind.

        Args:
            key: of the parameter.
            gradient: of this trainer, clipped.
            hparams: momentum, weight_decay, nesterov and maximize of its update.
            step: of the job, from 0.
        """
        if decay := float(hparams["weight_decay"]):
            gradient = gradient.add(parameter, alpha=-decay if hparams["maximize"] else decay)
        zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        # in the parameter's dtype, which a script may have cast since
        velocity, residual = (each.to(zeros) for each in self._kept.get(key, (zeros, zeros)))
        kept = self.ramp.kept(parameter.numel(), step)
        momentum, nesterov = float(hparams["momentum"]), bool(hparams["nesterov"])
        made = compress(gradient, velocity, residual, kept, momentum, nesterov)
        self._next.pop(key, None)
        if is_finite(made.values):  # those are the largest
            self._next[key] = made.velocity, made.residual
        return made

    def end(self, applied: bool) -> None:
        """The step has ended; where it was not applied, nothing has changed."""
        if applied:
            self._kept.update(self._next)
        self._next = {}

    def forget(self) -> None:
        """Begins again: parameters and states are others now."""
        self._kept, self._next = {}, {}
