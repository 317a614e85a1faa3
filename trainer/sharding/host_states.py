"""An optimizer's states in main memory, while the parameters are on a GPU.

States are copied to the GPU for each update and back after it, so that forward and backward have
their memory.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Moves an optimizer's states to pinned main memory after every step, and to their parameters'
    device before it.

    Args:
        optimizer: over parameters on a GPU.

    Raises:
        ValueError: a parameter is on the CPU, where the states are in main memory anyway.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cpu":
                raise ValueError(
                    "strategy.sharding_configs.optimize_offload: expected a model on a GPU, got "
                    "one on the CPU, where the optimizer's states are in main memory anyway; leave "
                    "it at its default"
                )
    optimizer.register_step_pre_hook(_fetch)
    optimizer.register_step_post_hook(_put_away)


def _fetch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _of_elements(value, parameter):
                state[key] = value.to(parameter.device, non_blocking=True)


def _put_away(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _of_elements(value, parameter):
                host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                state[key] = host.copy_(value)


def _of_elements(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state has an element for each of the parameter's; counts of steps stay."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
