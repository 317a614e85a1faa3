"""A model made parallel in several directions at once, as a strategy says.

::

    strategy.hybrid_configs = {"dp_degree": -1, "mp_degree": 2, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    model = hybrid_parallel(Net(), strategy, tensor_plan=plan, stages=["blocks.2"], loss_fn=loss)
    optimizer = hybrid_optimizer(torch.optim.Adam(model.parameters()), model)

In this order: the model is cut into stages (pp), tensors into parts (mp), attention is made to see
whole sequences (sep), and at last FSDP2 averages gradients (dp, sep) and shards parameters,
gradients and state (sharding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.collective.world import current_peers, naming_trainers
from trainer.hybrid.mesh import Directions, directions, forget_groups, parameter_mesh
from trainer.hybrid.pipeline import Loss, Pipeline, stages_of
from trainer.hybrid.sequence import replace_attention
from trainer.hybrid.tensor import cut_tensors, draw_again, planned
from trainer.sharding.levels import zero_grad_through
from trainer.sharding.optimizer import ShardedOptimizer, keep_on_host, sharded_rule
from trainer.sharding.shards import agree, metadata_of
from transpiler.clip import GradClip
from transpiler.ir.plain_names import plain_name
from transpiler.strategy.parallel_degrees import degree_contradictions
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _HybridModel:
    """The settings of a model that ``hybrid_parallel`` has made."""

    mesh: Any  # of parameters
    names: tuple[str, ...]  # of the whole model's parameters and buffers
    sharding: Mapping[str, Any]  # sharding_configs; all defaults without sharding=True


REDUCED = "_reduced_in_backward"  # an attribute of these models
_made: WeakKeyDictionary[nn.Module, _HybridModel] = WeakKeyDictionary()


def hybrid_parallel(
    model: nn.Module,
    strategy: DistributedStrategy,
    *,
    tensor_plan: Mapping[str, Any] | None = None,
    stages: Sequence[str] = (),
    loss_fn: Loss | None = None,
) -> nn.Module:
    """Makes a model parallel, with rank 0's values.  All ranks call this, with the same whole model
    on their devices.

    Example::

        model = hybrid_parallel(nn.Linear(4, 2), fleet.DistributedStrategy())
        optimizer = hybrid_optimizer(torch.optim.Adam(model.parameters()), model)

    Args:
        model: the whole model.
        strategy: its ``hybrid_configs``, and the settings of ``sharding``, ``pipeline`` and
            ``tensor_parallel``; see ``trainer.hybrid.pipeline`` for how a batch is cut into micro
            batches.
        tensor_plan: the modules that are cut in the "mp" direction, each with its style; see
            ``trainer.hybrid.tensor``.
        stages: the names of the modules that begin stages 1, 2, ... in the "pp" direction; without
            them, ``device_guard`` in the model's forward makes the stages.
        loss_fn: with ``pp_degree``: (output, target) -> the mean loss.

    Returns:
        With a ``pp_degree`` above 1 a :class:`Pipeline`, which has this rank's stage; otherwise the
        same module, changed in place.  Its parameters are not the former ones: make the optimizer
        afterwards.

    Raises:
        ValueError: degrees whose product is not the number of ranks, or a size that does not
            divide evenly.
        FingerprintMismatch: the ranks' models differ.
    """
    # FSDP2 takes half a second to import
    from trainer.hybrid.sample_mean import average_in_backward
    from trainer.sharding.units import anchor_modules

    current_peers()
    if found := list(degree_contradictions(strategy)):
        raise ValueError("; ".join(found))
    here = directions(strategy, dist.get_world_size())
    _check(model, here, tensor_plan, stages, loss_fn)
    if strategy.fp16_allreduce:
        _check_float16(here)
    device = next(model.parameters()).device
    with naming_trainers():
        world: Any = dist.group.WORLD
        agree("model", metadata_of(model), world)
        styles = planned(model, tensor_plan or {}, here.degrees["mp"])
        anchors = anchor_modules(model, strategy.sharding_configs["segment_anchors"])
        if (seed := strategy.tensor_parallel_configs["tensor_init_seed"]) >= 0:
            draw_again(model, styles, seed)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        mesh = parameter_mesh(here, device.type)
        names = tuple(map(plain_name(model), model.state_dict()))
        part, result = _staged(model, here, strategy, mesh, stages, loss_fn)
        cut_tensors(part, styles, mesh["mp"])
        if here.degrees["sep"] > 1:
            replace_attention(part, _sequence_group(here))
        reduced = average_in_backward(part, mesh, strategy, anchors)
    _made[result] = _HybridModel(mesh, names, strategy.sharding_configs)
    # the module that holds all that backward reduces; stored on the model itself, so that nothing
    # else keeps it alive
    object.__setattr__(result, REDUCED, tuple(reduced[:1]))
    return result


def _check_float16(here: Directions) -> None:
    """Raises an error if no gradient travels that could be float16."""
    if all(here.degrees[axis] == 1 for axis in ("dp", "sharding", "sep")):
        raise ValueError(
            "strategy.fp16_allreduce: has no effect where dp_degree, sharding_degree and "
            "sep_degree are 1, because no gradient travels: leave it off"
        )


def _check(
    model: nn.Module, here: Directions, plan: Any, stages: Sequence[str], loss_fn: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if model in _made:
        raise ValueError("model: hybrid_parallel was called for it before")
    if (here.degrees["mp"] > 1) != bool(plan):
        got = f"mp_degree {here.degrees['mp']} and {plan!r}"
        raise ValueError(
            f"tensor_plan: expected one if and only if mp_degree is above 1, got {got}"
        )
    if here.degrees["pp"] == 1 and (stages or loss_fn is not None):
        raise ValueError("stages, loss_fn: they have an effect with a pp_degree above 1 only")
    if here.degrees["pp"] > 1 and loss_fn is None:
        raise ValueError(
            f"loss_fn: expected one with pp_degree {here.degrees['pp']}, got none: the last stage "
            "computes the loss"
        )


def _staged(
    model: nn.Module,
    here: Directions,
    strategy: DistributedStrategy,
    mesh: DeviceMesh,
    begins: Sequence[str],
    loss_fn: Loss | None,
) -> tuple[nn.Module, nn.Module]:
    """This rank's part of the model, and the module that the user gets."""
    if here.degrees["pp"] == 1:
        return model, model
    assert loss_fn is not None
    stage = stages_of(model, list(begins), here.degrees["pp"])[mesh["pp"].get_local_rank()]
    configs = strategy.pipeline_configs
    micro_batches, micro_size = (
        configs[key] if strategy.is_set(f"pipeline_configs.{key}") else None
        for key in ("accumulate_steps", "micro_batch_size")
    )
    return stage.module, Pipeline(
        model,
        stage,
        mesh["pp"].get_group(),
        micro_batches,
        micro_size,
        loss_fn,
        configs["schedule_mode"],
    )


def _sequence_group(here: Directions) -> dist.ProcessGroup:
    """The group of the ranks with parts of the same sequences."""
    grid = here.rank_grid(("dp", "pp", "sharding", "mp", "sep")).flatten(0, 3)
    group, _ = dist.new_subgroups_by_enumeration(grid.tolist())  # type: ignore[no-untyped-call]  # torch's own
    assert isinstance(group, dist.ProcessGroup)
    return group


def hybrid_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, grad_clip: GradClip | None = None
) -> ShardedOptimizer:
    """The optimizer of a model that :func:`hybrid_parallel` returned; it steps this rank's part of
    each parameter.

    Example::

        model = hybrid_parallel(nn.Linear(4, 2), fleet.DistributedStrategy())
        optimizer = hybrid_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Args:
        optimizer: element-wise, over the returned model's parameters.
        model: that ``hybrid_parallel`` returned.
        grad_clip: clips the averaged gradient of the whole model, all stages together, as a single
            node would.

    Returns:
        The optimizer to step; its ``state_dict()`` is whole.

    Raises:
        ValueError: the model was not made by ``hybrid_parallel``, the optimizer's rule needs whole
            tensors, or ``optimize_offload`` is set on the CPU.
    """
    from trainer.hybrid.shards import LocalShards
    from trainer.sharding.accumulation import Accumulation

    if model not in _made:
        raise ValueError("model: expected the one that hybrid_parallel returned")
    for group in optimizer.param_groups:
        sharded_rule(optimizer, group)
    mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strange = mine.difference(model.parameters())
    if strange:
        raise ValueError(
            f"optimizer: a parameter of shape {tuple(strange.pop().shape)} is none of the "
            "model's: make it after hybrid_parallel"
        )
    parameters = [
        parameter
        for parameter in model.parameters()
        if parameter in mine and parameter.requires_grad
    ]
    if not parameters:
        raise ValueError("optimizer: expected a trainable parameter of the model, got none")
    if grad_clip is None:
        grad_clip = getattr(optimizer, "grad_clip", None)
    made = _made[model]
    shards = LocalShards(parameters, made.mesh, made.sharding["pp_allreduce_in_optimize"])
    steps = made.sharding["gradient_merge_acc_step"]
    accumulation = Accumulation(steps, getattr(model, REDUCED)) if steps > 1 else None
    device = parameters[0].device
    sharded = ShardedOptimizer(
        optimizer,
        shards,
        device,
        grad_clip,
        lambda: {parameter: name for name, parameter in model.named_parameters()},
        None,
        accumulation,
    )
    sharded.watch(model)
    if accumulation is not None:
        zero_grad_through(model, sharded.zero_grad)
    if made.sharding["optimize_offload"]:
        keep_on_host(optimizer)
    return sharded


def hybrid_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's ``state_dict()``, plain tensors on every rank; all ranks call this.

    Example::

        model = hybrid_parallel(nn.Linear(4, 2), fleet.DistributedStrategy())
        whole = hybrid_state_dict(model)    # {"weight": ..., "bias": ...}

    Args:
        model: that ``hybrid_parallel`` returned.

    Returns:
        Values by the names in the whole model.

    Raises:
        ValueError: the model was not made by ``hybrid_parallel``.
    """
    from trainer.sharding.units import whole_of

    if model not in _made:
        raise ValueError("model: expected the one that hybrid_parallel returned")
    made = _made[model]
    group = made.mesh["pp"].get_group()
    plain = plain_name(model)
    mine = {plain(name): whole_of(each.detach()) for name, each in model.state_dict().items()}
    found: dict[str, Tensor] = {}
    for name in made.names:
        found[name] = _from_stage(mine.get(name), group)
    return found


def hybrid_load_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a whole ``state_dict()`` into a model that :func:`hybrid_parallel` returned; each rank
    takes its part.

    Example::

        model = hybrid_parallel(nn.Linear(4, 2), fleet.DistributedStrategy())
        hybrid_load_state_dict(model, nn.Linear(4, 2).state_dict())

    Args:
        model: that ``hybrid_parallel`` returned.
        state_dict: of the whole model, on every rank.

    Raises:
        ValueError: the model was not made by ``hybrid_parallel``, or names or shapes differ from
            the model's.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if model not in _made:
        raise ValueError("model: expected the one that hybrid_parallel returned")
    odd = sorted(set(_made[model].names).symmetric_difference(state_dict))
    if odd:
        raise ValueError(
            f"state_dict: expected the whole model's names, got others: {', '.join(odd[:5])}"
        )
    plain = plain_name(model)
    with torch.no_grad():
        for name, mine in model.state_dict().items():
            value = state_dict[plain(name)].detach().to(mine.device)
            if value.shape != mine.shape:
                raise ValueError(
                    f"state_dict: {name!r}: expected the shape {tuple(mine.shape)}, got "
                    f"{tuple(value.shape)}"
                )
            if isinstance(mine, DTensor):
                value = distribute_tensor(
                    value, mine.device_mesh, mine.placements, src_data_rank=None
                )
            mine.copy_(value)


def forget_model_groups(model: nn.Module) -> None:
    """Releases the process groups of a model that :func:`hybrid_parallel` returned."""
    if model in _made:
        forget_groups(_made[model].mesh)


def _from_stage(tensor: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Copies a tensor that one stage has (or several have, equal) to all stages."""
    if dist.get_world_size(group) == 1:
        assert tensor is not None
        return tensor
    rank, none = dist.get_rank(group), dist.get_world_size(group)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else torch.device("cpu")
    )
    # owner, dtype, dimensions, shape
    head = torch.full((12,), -1, dtype=torch.int64, device=device)
    owner = torch.tensor(none if tensor is None else rank, device=device)
    dist.all_reduce(owner, op=dist.ReduceOp.MIN, group=group)
    source = int(owner.item())
    if rank == source:
        assert tensor is not None
        form = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        head[: len(form)] = torch.tensor(form)
    dist.broadcast(head, group=group, group_src=source)
    kind, dimensions, *shape = head.tolist()
    if rank == source:
        assert tensor is not None
        value = tensor.contiguous()
    else:
        value = torch.empty(shape[:dimensions], dtype=_DTYPES[kind], device=device)
    dist.broadcast(value, group=group, group_src=source)
    return value


_DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    ),
    *(torch.uint8, torch.bool),
]
