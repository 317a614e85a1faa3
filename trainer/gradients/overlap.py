"""Gradients that leave while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from transpiler.clip import ClipGradByValue, GradClip

if TYPE_CHECKING:  # which brings the transports
    from trainer.communicator.communicator import Communicator


def send_early(
    names: Mapping[torch.Tensor, str],
    connected: Callable[[], Communicator | None],
    grad_clip: GradClip | None,
    left: set[torch.Tensor],
) -> None:
    """Hooks that send each gradient when backward has finished with it; in autograd's thread.

    Args:
        names: of the parameters.
        connected: gives the present connection, over which they leave.
        grad_clip: of the optimizer.
        left: gets the parameters whose gradient of the present step has left.

    Raises:
        ValueError: clipping has to wait for all gradients on the trainer.
    """

    def send_one(parameter: torch.Tensor) -> None:
        if parameter in left:
            raise RuntimeError(
                f"overlap: {names[parameter]!r} has a second gradient in one step, and the first "
                "one has left"
            )
        communicator, gradient, name = connected(), parameter.grad, names[parameter]
        if communicator is None or gradient is None or name in communicator.plan.averaged:
            return
        plan = communicator.plan
        if not plan.lane_of(plan.placement(name)).kind.steps_on_trainer:
            left.add(parameter)
            communicator.send_whole(name, gradient)

    communicator = connected()
    element_wise = grad_clip is None or isinstance(grad_clip, ClipGradByValue)
    if not element_wise and communicator is not None and not communicator.plan.clips_on_servers:
        raise ValueError(
            "overlap: gradients cannot leave early where grad_clip needs all of them on the trainer"
        )
    for parameter in names:
        parameter.register_post_accumulate_grad_hook(send_one)  # type: ignore[no-untyped-call]  # torch's own
