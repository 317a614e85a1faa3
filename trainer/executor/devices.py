"""Where a program computes: the device that an Executor was given, and moving tensors there."""

from __future__ import annotations

import torch

from transpiler.ir.graph import Storage


def checked_device(device: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: it is no CPU or CUDA device, or does not exist.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"Executor: expected a device such as 'cpu' or 'cuda:0', got {device!r}"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"Executor: expected a cpu or cuda device, got {device!r}")
    if found.type == "cuda" and (
        not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count()
    ):
        raise ValueError(
            f"Executor: expected a device that exists, got {device!r} with "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def move(storage: Storage, device: torch.device) -> None:
    """Moves the module's tensors in place, so that the module and the optimizer go on holding them;
    with their gradients, and the optimizer's state.
    """
    moved = False
    for tensor in storage.tensors.values():
        if tensor.device != device:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(device)
            tensor.grad = None if gradient is None else gradient.to(device)
            moved = True
    if moved and storage.optimizer is not None and storage.optimizer.state:
        # casts every state to its parameter's device
        storage.optimizer.load_state_dict(storage.optimizer.state_dict())
    if moved:
        for held in storage.states.values():
            for key in held.keys() - {"step"}:
                held[key] = held[key].to(device)
