"""``group_sharded_parallel``: a model, its optimizer and scaler, sharded over the ranks of a group.

========  =====================  ============================================
level     sharded                bytes on each of n ranks, with Adam
========  =====================  ============================================
"os"      the optimizer's state  P + G + 2P/n
"os_g"    and gradients          P + (G + 2P)/n
"p_g_os"  and parameters         (P + G + 2P)/n, and the unit in use
========  =====================  ============================================

P bytes of parameters, G of gradients.  (Rajbhandari et al.: ZeRO, memory optimizations toward
training trillion parameter models, 2020; Zhao et al.: PyTorch FSDP, 2023.)  Each option's effect:

- ``offload``: the tensors that the optimizer steps, and its state, are on the host; at "p_g_os" the
  model's shards too.  With a model on the CPU it has no effect.
- ``sync_buffers``: after each step the buffers take the values of the group's first rank.
- ``buffer_max_size``: the most elements of the gradients that travel in one reduction (at "p_g_os":
  of those too small to be sharded).
- ``segment_size``: elements of the smallest tensor that is sharded ("p_g_os" only; the others are
  kept whole on every rank).
- ``sync_comm``: collectives are waited for where they start, so that nothing overlaps with
  computation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from pserver.storage.single_file import file_to_write, joined
from trainer.checkpoint.export import export
from trainer.collective.world import current_peers
from trainer.modules.sparsity import is_masked
from trainer.optimizer import DistributedOptimizer
from trainer.sharding.optimizer import ShardedOptimizer, sharded_rule
from trainer.sharding.shards import FlatShards, Shards, agree, metadata_of
from transpiler.clip import GradClip
from transpiler.files.files import is_url, local_path, write_object
from transpiler.ir.plain_names import named_parameters, plain_name

# ---- levels ----


LEVELS = ("os", "os_g", "p_g_os")
SEGMENT_SIZE = 2**20

log = logging.getLogger(__name__)
# the shards of this rank, by model
sharded: WeakKeyDictionary[nn.Module, Shards] = WeakKeyDictionary()


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = SEGMENT_SIZE,
    sync_comm: bool = False,
) -> tuple[nn.Module, ShardedOptimizer, torch.amp.GradScaler | None]:
    """Shards a model's training over the ranks of a group, with the values of the group's first
    rank.

    Training equals that of one process on the concatenated batch.  All ranks of the group call
    this.  The docstring of :mod:`trainer.sharding.levels` has a table of the levels and options.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g")
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    Args:
        model: on its device already; the same module is returned.  At "os_g" its parameters have no
            ``grad`` between backward and step; at "p_g_os" they are DTensors.
        optimizer: element-wise, over parameters of the model; its groups, hyper-parameters, state
            and ``grad_clip`` are kept.
        scaler: its state is kept; the returned scaler skips a step on all ranks if one overflows.
        group: None: all ranks.

    Returns:
        The model, the optimizer and the scaler to train with.

    Raises:
        ValueError, TypeError: an argument is of the wrong kind, or has no effect at this level; or
            a rule is not element-wise.
        FingerprintMismatch: another rank has another model, or other arguments.
        RuntimeError: there are other trainers, and init_parallel_env() has not been called.
    """
    _check(
        model,
        optimizer,
        level,
        scaler,
        offload,
        sync_buffers,
        buffer_max_size,
        segment_size,
        sync_comm,
    )
    ranks, (inner, clip) = _group(group), _unwrapped(optimizer)
    names = _trainable(model, inner)
    asked = {
        "level": level,
        "buffer_max_size": str(buffer_max_size),
        "segment_size": str(segment_size),
    }
    agree("group_sharded_parallel", metadata_of(model) | asked, ranks)
    device = next(iter(names.values())).device
    how = buffer_max_size, sync_comm, offload and not _already_there(device)
    if level == "p_g_os":
        shards = _units(model, names, ranks, segment_size, *how)
    else:
        shards = FlatShards(list(names.values()), ranks, level == "os_g", *how)
    _same_buffers(model, ranks)
    wrapped = ShardedOptimizer(
        inner,
        shards,
        device,
        clip,
        lambda: {parameter: name for name, parameter in named_parameters(model)},
        (lambda: _same_buffers(model, ranks)) if sync_buffers else None,
    )
    wrapped.watch(model)
    if level == "os_g":
        zero_grad_through(model, wrapped.zero_grad)
    sharded[model] = shards
    return model, wrapped, _scaler(scaler, ranks, device)


def _already_there(device: torch.device) -> bool:
    if device.type == "cpu":
        log.info(
            "group_sharded_parallel: offload: the model is on the CPU, and so is the optimizer's "
            "state anyway"
        )
    return device.type == "cpu"


def _units(
    model: nn.Module,
    names: dict[str, nn.Parameter],
    group: dist.ProcessGroup,
    least: int,
    *rest: Any,
) -> Shards:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.sharding.units import Units  # FSDP2 takes half a second to import

    mesh = DeviceMesh.from_group(group, next(iter(names.values())).device.type)
    shards = Units(model, names, mesh, least, *rest)
    if len(shards.whole) == len(names):
        log.warning(
            "group_sharded_parallel: level p_g_os: nothing is sharded: no tensor has "
            "segment_size=%d elements",
            least,
        )
    return shards


def _check(model: Any, optimizer: Any, level: Any, scaler: Any, *options: Any) -> None:
    """Checks types, ranges, and that each option has an effect."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if model in sharded:
        raise ValueError("model: group_sharded_parallel was called for it before")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
    if level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    offload, sync_buffers, buffer_max_size, segment_size, sync_comm = options
    for name, value in (
        ("offload", offload),
        ("sync_buffers", sync_buffers),
        ("sync_comm", sync_comm),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
    for name, value in (("buffer_max_size", buffer_max_size), ("segment_size", segment_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name}: expected a whole number of elements, 1 or more, got {value!r}"
            )
    if level != "p_g_os" and segment_size != SEGMENT_SIZE:
        raise ValueError(
            f"segment_size: has an effect at level 'p_g_os' only, got {segment_size} at {level!r}"
        )
    if level == "p_g_os" and any(map(is_masked, model.parameters())):
        raise ValueError(
            "strategy.asp: its masks are of whole weights, and level 'p_g_os' puts parts in their "
            "place: use level 'os' or 'os_g'"
        )
    if sync_buffers and not any(True for _ in model.buffers()):
        raise ValueError("sync_buffers: the model has no buffers; leave it out")


def _group(group: Any) -> dist.ProcessGroup:
    current_peers()  # its error says what to call first
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # set, since torch.distributed is initialized
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(
            f"group: rank {dist.get_rank()} is not in the group; only its ranks call "
            "group_sharded_parallel"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected what new_group returns, got {type(group).__name__}")
    return group


def _unwrapped(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, GradClip | None]:
    """The optimizer of torch.optim, and the clipping that goes with it."""
    clip = getattr(optimizer, "grad_clip", None)
    if clip is not None and not isinstance(clip, GradClip):
        raise TypeError(
            "optimizer.grad_clip: expected one of transpiler's ClipGradBy..., got "
            f"{type(clip).__name__}"
        )
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.communicator is not None:
            raise ValueError(
                "optimizer: its steps are taken by parameter servers; group_sharded_parallel "
                "needs none"
            )
        optimizer = optimizer.inner
    for group in optimizer.param_groups:
        sharded_rule(optimizer, group)  # its error says why the rule cannot be cut
    return optimizer, clip


def _trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's trainable parameters, by their names in the model, in the model's order."""
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    known = dict(named_parameters(model))
    for parameter in given.difference(known.values()):
        raise ValueError(
            f"optimizer: a parameter of shape {tuple(parameter.shape)} is none of the model's"
        )
    found = {
        name: parameter
        for name, parameter in known.items()
        if parameter in given and parameter.requires_grad
    }
    if not found:
        raise ValueError("optimizer: expected a trainable parameter of the model, got none")
    devices = sorted({str(parameter.device) for parameter in found.values()})
    if len(devices) > 1:
        raise ValueError(f"model: expected all of it on one device, got {', '.join(devices)}")
    return found


def _same_buffers(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copies the buffers of the group's first rank to all ranks."""
    works = [
        dist.broadcast(buffer, group=group, group_src=0, async_op=True)
        for buffer in model.buffers()
    ]
    for work in works:
        work.wait()


def zero_grad_through(model: nn.Module, zero_grad: Callable[[bool], None]) -> None:
    """Makes ``model.zero_grad()`` call the optimizer's, which also handles gradients that no
    parameter of the model shows, and those that wait for an update.
    """
    object.__setattr__(model, "zero_grad", zero_grad)


def _scaler(
    scaler: torch.amp.GradScaler | None, group: dist.ProcessGroup, device: torch.device
) -> torch.amp.GradScaler | None:
    if scaler is None or not scaler.is_enabled():
        return scaler
    from trainer.sharding.scaler import SharedGradScaler  # FSDP takes half a second to import

    shared = SharedGradScaler(device.type, process_group=group)
    shared.load_state_dict(scaler.state_dict())
    return shared


# ---- files ----
#
# A sharded model, and its optimizer's state, as files that torch alone can read.


MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"


def save_group_sharded_model(
    model: nn.Module, output: str | os.PathLike[str], optimizer: ShardedOptimizer | None = None
) -> None:
    """Writes ``model.safetensors``, and ``optimizer.pt`` if an optimizer is given, to the directory
    ``output``.

    They have the contents that a single node would save: ``safetensors.torch.load_file`` gives the
    model's ``state_dict()``, ``torch.load`` the state_dict of the optimizer that was given to
    ``group_sharded_parallel``.  All ranks of the group call this; the first rank writes.

    Example::

        model, optimizer, _ = group_sharded_parallel(net, torch.optim.Adam(net.parameters()), "os")
        save_group_sharded_model(model, "trained", optimizer)

    Args:
        model: the one that ``group_sharded_parallel`` returned.
        output: the directory, which is created, or a URL.
        optimizer: the one that ``group_sharded_parallel`` returned.

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
        # one at a time, so that only the first rank holds more than one of them
        whole = sharded[model].full(tensor)
        if writes:
            tensors[plain(name)] = whole.detach().to("cpu", copy=True)
    state = optimizer.state_dict() if optimizer is not None else None
    failed = _written(output, tensors, state) if writes else None
    _agree(failed, group, next(model.parameters()).device)


def _written(
    directory: str | os.PathLike[str], tensors: dict[str, torch.Tensor], state: Any
) -> OSError | None:
    """Writes both files, each whole or not at all; returns the error, if there was one."""
    try:
        export(joined(directory, MODEL), tensors)
        if state is not None:
            with file_to_write(joined(directory, OPTIMIZER)) as file:
                write_object(state, file)
    except OSError as error:
        return error
    except (ImportError, ValueError) as error:  # the URL's
        return OSError(str(error))
    return None


def _agree(failed: OSError | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes all ranks wait for the files, and raises an error on all of them if writing failed."""
    mark = torch.tensor([failed is not None], dtype=torch.int32, device=device)
    dist.broadcast(mark, group=group, group_src=0)
    if failed is not None:
        raise failed
    if mark.item():
        raise OSError(
            "save_group_sharded_model: the group's first rank could not write; its error says why"
        )
