"""Level "p_g_os": parameters, gradients and state divided, on torch's FSDP2.

A unit is a module whose parameters are gathered, used and freed together.  See [Note: units].

[Note: units]  Repeated blocks (the elements of the outermost ModuleList, ModuleDict or Sequential)
are units, because that is how large models are written.  An element that holds more than half of
the model is opened, that is, searched for units, and so is every module outside repeated blocks
that mainly calls others.  A module whose own tensors are half or more of its total is a unit:
modules without children, and those that read their children's tensors instead of calling them, such
as an attention that reads its output layer's.  A module that shares a tensor with another (tied
weights) is not a unit, because a tensor can only be gathered in one place; parameters outside all
units are gathered with the model itself.  Parameters of a unit that a forward reads without calling
it are gathered at the read: see [Note: reads outside a unit].

[Note: reads outside a unit]  FSDP2 makes a unit's parameters whole around the unit's forward.  A
forward may read a parameter of a module that it does not call: ``F.linear(x, self.up.weight)``, an
embedding's weight as the output layer, a fast path of torch's own layers.  It would find this
rank's shard, a DTensor, which cannot be combined with plain tensors.  So while a forward or a
backward of the model runs, each module's table of parameters gives the whole tensor in place of a
shard.  The gather is recorded by autograd: the gradient is reduced over the ranks as a unit's is,
and is added to the shard's.  Such a tensor is whole until its last use in backward, whereas a
unit's is freed after forward; so a parameter is better used by calling its module.  Everywhere else
(in the script, for the optimizer, in ``state_dict``) a parameter is its shard.  A tensor that
``torch.func.functional_call`` puts in a parameter's place would be overwritten by FSDP2's own; so
that raises an error.

[Note: runs of a segment]  FSDP2 gathers a segment when the first of its modules is called, and
takes the output of the module that is called last for that of the segment: there its backward
begins.  A forward may use an earlier module's output elsewhere, or the last one's without a
gradient; then FSDP2 would neither gather the segment for backward, nor reduce its gradients.  So
backward is followed from the output of each of its modules.  Autograd goes through them in the
reverse order of their calls, so the first one's inputs are the last to be reached, as FSDP2
expects.  A module that the script calls by itself, outside of its model's forward, ends the run:
otherwise the segment would stay gathered, with values that the next update makes stale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._pytree import tree_map_only

from trainer.sharding.shards import (
    Reducer,
    Shards,
    Values,
    all_gather,
    buckets_of,
    reduce_scatter,
    same_memory,
)
from transpiler.ir.plain_names import named_modules, named_parameters

# ---- reads outside units ----
#
# Sharded parameters that are read while their unit is not running.


class _Before(NamedTuple):
    """The form of a rank's parameter before FSDP2 divided it; of a DTensor, its local part."""

    shape: torch.Size
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> _Before:
        if not isinstance(parameter, DTensor):
            return cls(parameter.shape, None, ())
        return cls(parameter.to_local().shape, parameter.device_mesh, parameter.placements)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The sharding of a parameter.

    Attributes:
        mesh: of the sharded tensor: FSDP2's mesh, followed by that of tensor parallelism.
        over: FSDP2's mesh, of one dimension, or of replicas and shards.
        dim: the dimension that is sharded.
        before: the form of this rank's part before.
    """

    mesh: DeviceMesh
    over: DeviceMesh
    dim: int
    before: _Before

    @property
    def length(self) -> int:
        """The number of elements along the sharded dimension in this rank's gathered tensor."""
        return self.before.shape[self.dim]

    def whole(self, sharded: DTensor) -> Tensor:
        """Gathers a tensor that FSDP2 has divided.  The result is a DTensor if the tensor is also
        cut in the tensor parallel direction.
        """
        part = _padded(self._on_device(sharded.to_local()), self.dim, self._rows())
        gathered = part.new_empty(part.shape[0] * self._ranks(), *part.shape[1:])
        all_gather(gathered, part, group=self._group())
        value = gathered[: self.length].movedim(0, self.dim).contiguous()
        if self.before.mesh is None:
            return value
        return DTensor.from_local(
            *(value, self.before.mesh, self.before.placements),
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )

    def shard(self, gradient: Tensor, sharded: DTensor) -> Tensor:
        """The mean of the ranks' gradients, sharded like the parameter."""
        value = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        rows = self._rows()
        summed = _padded(value, self.dim, rows * self._ranks()) / self.over.size()
        part = summed.new_empty(rows, *summed.shape[1:])
        reduce_scatter(part, summed, group=self._group())
        if self.over.ndim > 1:
            dist.all_reduce(part, group=self.over.get_group(0))
        local = sharded.to_local()
        mine = part[: local.shape[self.dim]].movedim(0, self.dim).contiguous().to(local.device)
        return DTensor.from_local(
            *(mine, sharded.device_mesh, sharded.placements),
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )

    def _on_device(self, part: Tensor) -> Tensor:
        kind = self.over.device_type
        return part if part.device.type == kind else part.to(kind)  # offloaded

    def _group(self) -> dist.ProcessGroup:
        return self.over.get_group(self.over.ndim - 1)

    def _ranks(self) -> int:
        return self.over.size(self.over.ndim - 1)

    def _rows(self) -> int:
        """The number of rows of a rank's part, as ``torch.chunk`` cuts."""
        return -(-self.length // self._ranks())


def _padded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """The tensor with ``dim`` as the first dimension, padded with zeros to ``rows`` rows."""
    first = tensor.movedim(dim, 0)
    if first.shape[0] == rows:
        return first.contiguous()
    result = first.new_zeros(rows, *first.shape[1:])
    result[: first.shape[0]] = first
    return result


class _Gather(torch.autograd.Function):
    """Gathers a shard to the whole tensor; backward shards the gradient."""

    @staticmethod
    def forward(ctx: Any, sharded: DTensor, layout: _Layout) -> Tensor:
        ctx.sharded, ctx.layout = sharded, layout
        return layout.whole(sharded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = ctx.layout.shard(gradient, ctx.sharded)
        if result.to_local().is_cuda and ctx.sharded.grad is not None:
            torch.cuda.synchronize()  # FSDP2 adds to the same gradient in another stream
        return result, None


class _Parameters(dict[str, Any]):
    """A module's table of parameters.  A read by name, as for an attribute, gives whole parameters,
    and so does ``items``, which ``parameters()`` uses, while a forward runs.
    """

    def __init__(self, present: dict[str, Any], reads: Reads, layouts: dict[str, _Layout]) -> None:
        super().__init__(present)
        self._reads, self._layouts = reads, layouts

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        layout = self._layouts.get(name)
        if layout is None or not isinstance(parameter, DTensor) or not self._reads.computing():
            return parameter
        if parameter.device_mesh != layout.mesh:
            return parameter  # its unit is running: it is cut in the tensor parallel direction only
        return self._reads.whole(parameter, layout)

    def items(self) -> Any:
        """Gives parameters one by one, so that a read of the first one gathers only that one."""
        if not self._reads.in_forward():
            return super().items()
        return ((name, self[name]) for name in self)

    def __reduce__(self) -> Any:  # a copy of the module is not sharded
        return dict, (list(super().items()),)


class Reads:
    """Gives whole parameters to a model's forward that reads them outside their units; see [Note:
    reads outside a unit].

    Created before FSDP2 shards the model, because it notes the shapes; active from :meth:`begin`
    on.  The script's thread and autograd's use it.

    Args:
        model: to be sharded.
        over: FSDP2's mesh.
    """

    def __init__(self, model: nn.Module, over: DeviceMesh) -> None:
        self._model, self._over = model, over
        self._before = {
            (module, name): _Before.of(parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self._running = 0  # nested forwards of modules
        # of the outermost forward; by parameter and autograd's mode
        self._whole: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def begin(self) -> None:
        """Starts giving whole parameters."""
        holders: set[nn.Module] = set()
        for module in self._model.modules():
            layouts = {
                name: found
                for name, parameter in module._parameters.items()
                if (found := self._layout(module, name, parameter)) is not None
            }
            if layouts:
                holders.add(module)
                module._parameters = _Parameters(module._parameters, self, layouts)
        for module in self._model.modules():
            if module is self._model or not holders.isdisjoint(module.modules()):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)
        self._before.clear()

    def _layout(self, module: nn.Module, name: str, parameter: Any) -> _Layout | None:
        if not isinstance(parameter, DTensor):
            return None
        # a Shard, or torch's own for a tensor that is cut in the tensor parallel direction too
        dim = int(getattr(parameter.placements[self._over.ndim - 1], "dim"))  # noqa: B009
        return _Layout(parameter.device_mesh, self._over, dim, self._before[module, name])

    # ---- running forwards ----

    def in_forward(self) -> bool:
        """Whether a forward of the model runs."""
        return self._running > 0

    def outermost(self) -> bool:
        """Whether the running forward is the outermost one."""
        return self._running == 1

    def computing(self) -> bool:
        """Whether a forward of the model runs, or a backward, which may run one again."""
        return self.in_forward() or torch._C._current_graph_task_id() != -1

    def _enter(self, *_: Any) -> None:
        if not self._running:
            self._whole.clear()
        self._running += 1

    def _leave(self, *_: Any) -> None:
        self._running -= 1
        if not self._running:
            self._whole.clear()

    # ---- whole tensors ----

    def whole(self, parameter: DTensor, layout: _Layout) -> Tensor:
        """The whole tensor; reads of one forward share it, while it is referenced."""
        key = id(parameter), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if self._running and (known := self._whole.get(key)) is not None:
            return known
        gathered: Tensor = _Gather.apply(parameter, layout)  # type: ignore[no-untyped-call]  # torch's own
        if self._running:
            self._whole[key] = gathered
        return gathered


# ---- segment runs ----
#
# Segments of several modules; a forward need not run all of them, or in order.


def follow_runs(segment: Sequence[nn.Module], outermost: Callable[[], bool]) -> None:
    """Follows backward from each module of a segment; see [Note: runs of a segment].

    Args:
        segment: modules that FSDP2 shards together.
        outermost: tells whether the running forward is the outermost one.
    """
    first = segment[0]
    if len(segment) == 1:
        return
    assert isinstance(first, FSDPModule)
    state = first._get_fsdp_state()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1  # which runs a forward again
        if in_backward or not state._modules_to_run_forward:
            return output
        if not outermost():
            return state._register_pre_backward_hook(output)
        state._modules_to_run_forward.clear()
        return state._post_forward(module, args, output)

    for module in segment:
        module.register_forward_hook(after)


# ---- units ----


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
        large: the parameters to shard.
        most: bytes above which a repeated block is opened.
        opened: modules that are never units.
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
    """A stand-in for a model without a forward, whose parts are called."""

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
        The modules that FSDP2 has sharded: the model (or its stand-in), and the first units of its
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
    """Checks that a unit has its own parameters, before FSDP2 makes them whole.

    Raises:
        ValueError: another tensor is in a parameter's place.
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
    """Copies views in an output: if the script writes into a view, autograd forgets the hook by
    which FSDP2 gathers the unit in backward.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output
    )


class BlockingAllGather(DefaultAllGather):
    """FSDP2's all-gather, waited for at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operation, and returns when the output is complete."""
        work = super().__call__(*args, **{**kwargs, "async_op": False})
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return work


class BlockingReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, waited for at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operation, and returns when the output is complete."""
        work = super().__call__(*args, **{**kwargs, "async_op": False})
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return work


def _overlap(modules: Sequence[nn.Module], cpu: bool, at_once: bool) -> None:
    """Sets whether a unit's tensors are gathered while the unit before it computes.

    On GPUs streams overlap by themselves; on the CPU collectives block unless they are started
    early.
    """
    every = [module for module in modules if isinstance(module, FSDPModule)]
    for module in every if at_once else ():
        module.set_custom_all_gather(BlockingAllGather())
        module.set_custom_reduce_scatter(BlockingReduceScatter())
        module.set_modules_to_backward_prefetch([module])  # itself: no other module's
    if cpu and not at_once:
        every[0]._set_unshard_async_op(True)
        for module, following in zip(every, every[1:], strict=False):
            module.set_modules_to_forward_prefetch([following])


def _placement(ranks: int) -> Any:
    """The function that chooses a parameter's dimension to shard: rows, unless there are fewer than
    ranks and another dimension divides evenly.
    """

    def chosen(parameter: nn.Parameter) -> Shard:
        if parameter.shape[0] >= ranks:
            return Shard(0)
        even = [dim for dim, length in enumerate(parameter.shape) if length and length % ranks == 0]
        return Shard(max(even, key=lambda dim: parameter.shape[dim], default=0))

    return chosen


class Units(Shards):
    """The shards of a model that FSDP2 has sharded.  Its small tensors are whole on every rank,
    with averaged gradients.

    Args:
        names: the trainable parameters that an optimizer has.
        segment_size: elements of the smallest tensor that is sharded.
        most: the most elements of a bucket of small gradients.
        at_once: whether collectives are waited for at once, so that nothing overlaps.
        offload: whether shards, gradients and state are on the host.
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
        """Does nothing: the optimizer has the gradients themselves, not copies."""

    def publish(self) -> None:
        """Does nothing: the shards are the DTensors' memory, which the next forward gathers."""

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
    """A sharded tensor made whole, on its mesh's device; all ranks of the mesh call this.

    Other tensors are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    host = tensor.to_local().device.type != tensor.device_mesh.device_type  # offloaded
    whole = (tensor.to(tensor.device_mesh.device_type) if host else tensor).full_tensor()  # type: ignore[attr-defined]  # a DTensor too
    assert isinstance(whole, Tensor)
    return whole


# ---- segments ----
#
# Segments: units of a model whose parameters are gathered, used and freed together.
#
# A single unit is the finest segment, see [Note: units].  Larger ones need fewer collectives and
# more memory.  Segments are runs of units in the order of their definition, by size or by the names
# of their first modules::
#
#   units       blocks.0  blocks.1  blocks.2  blocks.3  head
#   by 2 units' size     | blocks.0  blocks.1 | blocks.2  blocks.3 | head |
#   by anchors blocks.1  | blocks.0 | blocks.1  blocks.2  blocks.3  head |
#
# A segment has parameters of one dtype, because they travel as one tensor.


Segments = list[list[nn.Module]]
_MB = 2**20


def segments_by_size(model: nn.Module, parameters: set[nn.Parameter], megabytes: float) -> Segments:
    """Segments that end where their parameters reach a size; a larger repeated block is opened.

    Args:
        parameters: the sharded ones.
        megabytes: the size, of whole parameters.
    """
    size = megabytes * _MB
    found: Segments = []
    filled = size  # of the last segment, in bytes
    for unit in units_of(model, parameters, most=size):
        if filled >= size or _dtypes(unit) != _dtypes(found[-1][-1]):
            found.append([])
            filled = 0
        found[-1].append(unit)
        filled += sum(
            p.numel() * p.element_size() for p in parameters.intersection(unit.parameters())
        )
    return found


def segments_by_anchors(
    model: nn.Module, parameters: set[nn.Parameter], anchors: Collection[str]
) -> Segments:
    """Segments that begin with the model and with the given modules.

    Args:
        parameters: the sharded ones.
        anchors: names of modules, as :func:`anchor_modules` gives them; names that this part of the
            model lacks are ignored.
    """
    opened = {
        module
        for name, module in named_modules(model)
        if any(anchor.startswith(f"{name}." if name else "") for anchor in anchors)
    }
    names = {module: name for name, module in named_modules(model)}
    found: Segments = []
    left = list(anchors)
    for unit in units_of(model, parameters, opened=opened):
        begins = [a for a in left if names[unit] == a or names[unit].startswith(f"{a}.")]
        if begins or not found or _dtypes(unit) != _dtypes(found[-1][-1]):
            found.append([])
            left = [anchor for anchor in left if anchor not in begins]
        found[-1].append(unit)
    return found


def _dtypes(unit: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in unit.parameters()}


def anchor_modules(model: nn.Module, anchors: Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that anchors name, directly or by a parameter.

    Raises:
        ValueError: the model has no module or parameter of a name, or the module has no parameter.
    """
    modules, parameters = dict(named_modules(model)), dict(named_parameters(model))
    found = []
    for anchor in anchors:
        name = anchor.rpartition(".")[0] if anchor in parameters else anchor
        if name not in modules or not name:
            known = ", ".join(name for name in modules if name)
            raise ValueError(
                f"segment_anchors: {anchor!r}: expected a module below the model, or a parameter "
                f"of one, got none of the model's, which has {known}"
            )
        if not any(True for _ in modules[name].parameters()):
            raise ValueError(
                f"segment_anchors: {anchor!r}: expected a module with parameters, got one without"
            )
        found.append(name)
    return tuple(found)
