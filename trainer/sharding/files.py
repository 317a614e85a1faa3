"""A sharded model, and its optimizer's state, as files that torch alone can read."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pserver.storage.single_file import joined, written
from trainer.checkpoint.export import export
from trainer.sharding.levels import sharded
from trainer.sharding.optimizer import ShardedOptimizer
from transpiler.files.files import is_url, local_path, write_object
from transpiler.ir.plain_names import plain_name

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"


def save_group_sharded_model(
    model: nn.Module, output: str | os.PathLike[str], optimizer: ShardedOptimizer | None = None
) -> None:
    """Writes ``model.safetensors``, and ``optimizer.pt`` if an optimizer is given, to the directory
    ``output``.

    They are what a single node would save: ``safetensors.torch.load_file`` gives the model's
    ``state_dict()``, ``torch.load`` the state_dict of the optimizer that was given to
    ``group_sharded_parallel``.  All ranks of the group call this; its first writes.

    Example::

        model, optimizer, _ = group_sharded_parallel(net, torch.optim.Adam(net.parameters()), "os")
        save_group_sharded_model(model, "trained", optimizer)

    Args:
        model: that ``group_sharded_parallel`` returned.
        output: the directory, which is made, or a URL.
        optimizer: that ``group_sharded_parallel`` returned.

    Raises:
        ValueError: the model was not sharded by ``group_sharded_parallel``, or ``output`` is a
            file.
        TypeError: the optimizer is not the one that ``group_sharded_parallel`` returned.
        OSError: the directory cannot be written.
    """
    if model not in sharded:
        raise ValueError(
            "model: expected the one that group_sharded_parallel returned, got one that is not "
            "sharded"
        )
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            "optimizer: expected the one that group_sharded_parallel returned, got "
            f"{type(optimizer).__name__}"
        )
    group = sharded[model].group
    if not is_url(output) and local_path(output, "output").is_file():
        raise ValueError(f"output: expected a directory, got the file {str(output)!r}")
    writes = dist.get_rank(group) == 0
    tensors, plain = {}, plain_name(model)
    for name, tensor in model.state_dict().items():
        # one at a time, so that no rank but the first holds more than one of them
        whole = sharded[model].full(tensor)
        if writes:
            tensors[plain(name)] = whole.detach().to("cpu", copy=True)
    state = optimizer.state_dict() if optimizer is not None else None
    failed = _written(output, tensors, state) if writes else None
    _agree(failed, group, next(model.parameters()).device)


def _written(
    directory: str | os.PathLike[str], tensors: dict[str, torch.Tensor], state: Any
) -> OSError | None:
    """Writes both files, each whole or not at all; gives the error, if there was one."""
    try:
        export(joined(directory, MODEL), tensors)
        if state is not None:
            with written(joined(directory, OPTIMIZER)) as file:
                write_object(state, file)
    except OSError as error:
        return error
    except (ImportError, ValueError) as error:  # the URL's
        return OSError(str(error))
    return None


def _agree(failed: OSError | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """No rank goes on before the files are there; all ranks hear of an error."""
    mark = torch.tensor([failed is not None], dtype=torch.int32, device=device)
    dist.broadcast(mark, group=group, group_src=0)
    if failed is not None:
        raise failed
    if mark.item():
        raise OSError(
            "save_group_sharded_model: the group's first rank could not write; its error says why"
        )
