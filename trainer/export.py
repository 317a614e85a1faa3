"""A trained model as one file that torch alone can read: names and tensors, and nothing of the cluster that trained it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch


def export(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a state_dict to the file ``path``: whole, or not at all.

    Args:
        path: "NAME.safetensors" is written for ``safetensors.torch.load_file``, any other name for ``torch.load``.

    Raises:
        OSError: the file cannot be written; the one that was there stays.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
    try:
        if target.suffix == ".safetensors":
            safetensors.torch.save_file(plain, temporary)
        else:
            torch.save(plain, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
