"""Level "p_g_os": parameters, gradients and state divided, on torch's FSDP2.

A unit is a module whose parameters are gathered, used and freed together.  See [Note: units].

[Note: units]  Repeated blocks (the elements of the outermost ModuleList, ModuleDict or Sequential)
are units, because that is how large models are written.  An element that holds more than half of
the model is opened, and so is every module outside them.  Opened are modules that call others.  A
module whose own tensors are half or more of all that it holds is a unit: those without children,
and those that read their children's tensors instead of calling them, such as an attention with its
output's.  A module that shares a tensor with another (tied weights) is none, because a tensor can
only be gathered in one place; what is in no unit is gathered with the model itself.  What a forward
reads of a unit that it does not call is gathered there: see [Note: reads outside a unit].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from trainer.sharding.bucket import buckets_of
from trainer.sharding.reads import Reads
from trainer.sharding.reducer import Reducer
from trainer.sharding.segment_runs import follow_runs
from trainer.sharding.shards import Shards, Values, same_memory
from transpiler.ir.plain_names import named_parameters

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _tensors(module: nn.Module, large: set[nn.Parameter]) -> set[nn.Parameter]:
    return large.intersection(module.parameters())


def _bytes(tensors: set[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in tensors)


def units_of(
    model: nn.Module,
    large: set[nn.Parameter],
    most: float = math.inf,
    opened: Collection[nn.Module] = (),
) -> list[nn.Module]:
    """The modules below ``model`` that are units, in the order of their definition; see [Note:
    units].

    Args:
        large: the parameters that are to be sharded.
        most: bytes above which a repeated block is opened.
        opened: modules that are no units, whatever they hold.
    """
    most = min(_bytes(large) / 2, most)

    def owners(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(
            p for part in module.modules() for p in part._parameters.values() if p is not None
        )

    everywhere = owners(model)

    def alone(module: nn.Module) -> bool:
        return all(everywhere[parameter] == count for parameter, count in owners(module).items())

    def below(module: nn.Module) -> Iterator[nn.Module]:
        repeated = isinstance(module, _CONTAINERS)
        for child in module.children():
            here = _tensors(child, large)
            if not here:
                continue
            size, own = _bytes(here), _bytes(large.intersection(child._parameters.values()))
            fits = child not in opened and (2 * own >= size or (repeated and size <= most))
            if fits and alone(child) and not isinstance(child, _CONTAINERS[:2]):
                yield child
            else:
                yield from below(child)

    return list(dict.fromkeys(below(model)))


class _Outermost(nn.Module):
    """Stands for a model that has no forward: its parts are called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def divide(
    model: nn.Module, segments: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, **options: Any
) -> list[nn.Module]:
    """Shards a model by FSDP2.

    Args:
        segments: units of the model; those of a segment are gathered together.
        mesh: of shards, or of replicas and shards.
        options: of ``fully_shard``.

    Returns:
        What FSDP2 has sharded: the model (or what stands for it), and the first units of its
        segments.
    """
    reads = Reads(model, mesh)
    outermost = _Outermost(model) if isinstance(model, _CONTAINERS[:2]) else model
    for segment in (*segments, [outermost]):
        fully_shard(list(segment), mesh=mesh, **options)
        follow_runs(segment, reads.outermost)
        for module in segment:
            module.register_forward_hook(_own_memory, prepend=True)
    assert isinstance(outermost, FSDPModule)
    # now, not when a module is first called, which need not be the outermost one
    outermost._get_fsdp_state()._lazy_init()
    reads.begin()
    for segment in (*segments, [outermost]):
        for module in segment:
            module.register_forward_pre_hook(_check_parameters, prepend=True)
    return [outermost, *(segment[0] for segment in segments)]


def _check_parameters(unit: nn.Module, args: Any) -> None:
    """Checks that a unit has parameters of its own, before FSDP2 makes them whole.

    Raises:
        ValueError: another tensor has a parameter's place.
    """
    for module in unit.modules():
        for name, value in dict.items(module._parameters):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                raise ValueError(
                    f"{name!r} of {type(module).__name__}: expected the module's own parameter, "
                    "got another tensor in its place, which would be lost at level 'p_g_os': "
                    "instead of torch.func.functional_call compute with torch.nn.functional, or "
                    "shard at level 'os_g'"
                )


def _own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Views become copies: where the script writes into a view of an output, autograd forgets the
    hook by which FSDP2 gathers the unit in backward.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output
    )


class BlockingAllGather(DefaultAllGather):
    """FSDP2's all-gather, waited for on the spot."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ends when the output is there."""
        work = super().__call__(*args, **{**kwargs, "async_op": False})
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return work


class BlockingReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, waited for on the spot."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ends when the output is there."""
        work = super().__call__(*args, **{**kwargs, "async_op": False})
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return work


def _overlap(modules: Sequence[nn.Module], cpu: bool, at_once: bool) -> None:
    """Whether a unit's tensors are gathered while the unit before it computes.

    On GPUs streams overlap without being told; on the CPU collectives block unless they are started
    early.
    """
    every = [module for module in modules if isinstance(module, FSDPModule)]
    for module in every if at_once else ():
        module.set_custom_all_gather(BlockingAllGather())
        module.set_custom_reduce_scatter(BlockingReduceScatter())
        module.set_modules_to_backward_prefetch([module])  # itself: nobody else's
    if cpu and not at_once:
        every[0]._set_unshard_async_op(True)
        for module, following in zip(every, every[1:], strict=False):
            module.set_modules_to_forward_prefetch([following])


def _placement(ranks: int) -> Any:
    """Rows, unless there are fewer than ranks and another dimension divides evenly."""

    def chosen(parameter: nn.Parameter) -> Shard:
        if parameter.shape[0] >= ranks:
            return Shard(0)
        even = [dim for dim, length in enumerate(parameter.shape) if length and length % ranks == 0]
        return Shard(max(even, key=lambda dim: parameter.shape[dim], default=0))

    return chosen


class Units(Shards):
    """A model sharded by FSDP2, its small tensors whole on every rank, their gradients averaged.

    Args:
        names: the trainable parameters that an optimizer has.
        segment_size: elements of the smallest tensor that is sharded.
        most: elements of a bucket of small gradients.
        at_once: nothing overlaps.
        offload: shards, gradients and state lie on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        segment_size: int,
        most: int,
        at_once: bool,
        offload: bool,
    ) -> None:
        self.group = mesh.get_group()
        ranks = mesh.size()
        small = {p for p in model.parameters() if p.numel() < segment_size or p.dim() == 0}
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)
        self.units = units_of(model, set(model.parameters()) - small)
        options: dict[str, Any] = {
            "reshard_after_forward": True,
            "shard_placement_fn": _placement(ranks),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
            "ignored_params": small,
        }
        every = divide(model, [[unit] for unit in self.units], mesh, **options)
        _overlap(every, mesh.device_type == "cpu", at_once)
        self._take(dict(named_parameters(model)), names, small)
        small_here = [parameter for parameter in names.values() if parameter in self.whole]
        self.reducer = Reducer(
            buckets_of(small_here, ranks, most), self.group, False, at_once, self._take_small
        )

    def _take(
        self,
        now: Mapping[str, nn.Parameter],
        names: Mapping[str, nn.Parameter],
        small: set[nn.Parameter],
    ) -> None:
        """Pairs each former parameter with its DTensor, and the DTensor with the optimizer's shard:
        its local tensor.
        """
        self.whole = {parameter for parameter in names.values() if parameter in small}
        self.former = {
            parameter: now[name] for name, parameter in names.items() if parameter not in small
        }
        self.of = {now[name]: now[name] for name in names}
        for sharded in self.former.values():
            shard = nn.Parameter(_local(sharded.detach()))
            self.of[sharded] = shard
            hook = partial(_copy_gradient, shard=shard)
            sharded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own

    @staticmethod
    def _take_small(bucket: Any, result: Tensor, anywhere: set[nn.Parameter]) -> None:
        for parameter, begin, end in bucket.spans():
            if parameter in anywhere:
                parameter.grad = result[begin:end].view(parameter.shape)

    def full(self, tensor: Tensor) -> Tensor:
        return whole_of(tensor)

    def refresh(self) -> None:
        self.reducer.forget()
        for sharded, shard in self.of.items():
            if sharded not in self.whole:
                _copy_gradient(sharded, shard)

    def moved(self) -> Iterator[nn.Parameter]:
        """See :class:`Shards`."""
        for parameter, shard in self.of.items():
            if parameter not in self.whole:
                assert isinstance(parameter, DTensor)
                if not same_memory(parameter._local_tensor, shard):
                    yield parameter

    def multiply_gradients(self, factor: Tensor) -> None:
        """The optimizer has no copies, but the gradients themselves."""

    def publish(self) -> None:
        """The shards are the DTensors' memory: the next forward gathers them."""

    def drop_gradients(self, to_none: bool) -> None:
        for parameter, shard in self.of.items():
            for tensor in (parameter, shard):
                if to_none:
                    tensor.grad = None
                elif tensor.grad is not None:
                    tensor.grad.zero_()

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        if parameter in self.whole:
            return value.detach().to(parameter.device, copy=True)
        sharded = parameter.detach()
        assert isinstance(sharded, DTensor)
        (placement,) = sharded.placements
        assert isinstance(placement, Shard)
        rows = list(value.detach().chunk(sharded.device_mesh.size(), placement.dim))
        rank = sharded.device_mesh.get_local_rank()
        shard = self.of[parameter]
        if rank >= len(rows):
            return torch.empty(shard.shape, dtype=value.dtype, device=shard.device)
        return rows[rank].to(shard.device, copy=True).contiguous()

    def joined(self, values: Mapping[nn.Parameter, Tensor]) -> Values:
        return {parameter: self._join(parameter, value) for parameter, value in values.items()}

    def _join(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        if parameter in self.whole:
            return value.clone()
        sharded = parameter.detach()
        assert isinstance(sharded, DTensor)
        return whole_of(
            DTensor.from_local(
                *(value, sharded.device_mesh, sharded.placements),
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _copy_gradient(sharded: Tensor, shard: nn.Parameter) -> None:
    """Gives the shard its DTensor's gradient."""
    shard.grad = None if sharded.grad is None else _local(sharded.grad.detach())


def whole_of(tensor: Tensor) -> Tensor:
    """A sharded tensor whole, on its mesh's device; all ranks of the mesh call this.

    Others are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    host = tensor.to_local().device.type != tensor.device_mesh.device_type  # offloaded
    whole = (tensor.to(tensor.device_mesh.device_type) if host else tensor).full_tensor()  # type: ignore[attr-defined]  # a DTensor too
    assert isinstance(whole, Tensor)
    return whole
