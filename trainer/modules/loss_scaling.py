"""The loss scales of an optimizer's models, at its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from transpiler.ir.loss_scale import LossScale
from transpiler.precision.mixed_forward import mixed_forward


class LossScaling:
    """Skips steps whose gradients are not finite, and updates the loss scales of the models.

    Args:
        scales: of the models that the optimizer trains; they change alike.
    """

    def __init__(self, scales: Sequence[LossScale]) -> None:
        self._scales = scales

    @property
    def scale(self) -> float:
        """The present loss scale."""
        return self._scales[0].value

    def overflowed(self, optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor]) -> bool:
        """Whether a gradient is not finite.

        Raises:
            RuntimeError: the script scales the loss by itself.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "strategy.amp scales gradients by itself, and a torch.amp.GradScaler does as well: "
                "leave the GradScaler out, or strategy.amp"
            )
        norm = get_total_norm([gradient.detach() for gradient in gradients], float("inf"))
        return not bool(norm.isfinite())

    def update(self, overflow: bool) -> None:
        """Updates the scales after one step."""
        for scale in self._scales:
            scale.update(overflow)

    def state(self) -> list[dict[str, float]]:
        """The state of each scale, for a checkpoint."""
        return [scale.state() for scale in self._scales]

    def load(self, states: Sequence[Mapping[str, float]]) -> None:
        """Restores the result of :meth:`state`."""
        for scale, state in zip(self._scales, states, strict=True):
            scale.load(state)


def loss_scaling_of(
    models: Sequence[nn.Module], groups: Iterable[Mapping[str, Any]]
) -> LossScaling | None:
    """The loss scales of the models that have parameters in an optimizer's groups.

    Returns:
        None where none of them scales its loss.
    """
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    scales = [
        forward.scale
        for model in models
        if (forward := mixed_forward(model)) is not None and forward.scale is not None
        if any(id(parameter) in trained for parameter in model.parameters())
    ]
    return LossScaling(scales) if scales else None


def check_overlap(overlap: bool, scaling: LossScaling | None) -> None:
    """Checks that gradients may be sent while backward runs.

    Args:
        overlap: whether they are.
        scaling: of the models' losses; None: there is none.

    Raises:
        ValueError: they are, and a step that overflows is skipped.
    """
    if overlap and scaling is not None:
        raise ValueError(
            "overlap, strategy.amp: gradients cannot leave early where a step whose float16 "
            "gradients overflow is skipped; leave overlap off, or set "
            "amp_configs['use_pure_bf16']"
        )
