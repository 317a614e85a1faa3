"""Sharded parameters that are read where their unit is not running.

[Note: reads outside a unit]  FSDP2 makes a unit's parameters whole around the unit's forward.  A
forward may read a parameter of a module that it does not call: ``F.linear(x, self.up.weight)``, an
embedding's weight as the output layer, a fast path of torch's own layers.  What it then finds is
this rank's shard, a DTensor, which no plain tensor can be combined with.  So each module's table of
parameters gives, while a forward or a backward of the model runs, the whole tensor in the place of
a shard.  Autograd knows where it comes from: its gradient is reduced over the ranks as a unit's is,
and is added to the shard's.  Such a tensor is whole until its last use in backward, whereas a
unit's is freed after forward; so a parameter is better used by calling its module.  Everywhere else
(in the script, for the optimizer, in ``state_dict``) a parameter is its shard.  What
``torch.func.functional_call`` puts in a parameter's place would be lost where FSDP2 puts its own
there; so that raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from trainer.sharding.collectives import all_gather, reduce_scatter


class _Before(NamedTuple):
    """What a rank had of a parameter before FSDP2 divided it: of a DTensor, its part."""

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
    """How a parameter is sharded.

    Attributes:
        mesh: of the sharded tensor: FSDP2's, with that of tensor parallelism behind it.
        over: FSDP2's, of one dimension, or of replicas and shards.
        dim: which dimension is sharded.
        before: what this rank had before.
    """

    mesh: DeviceMesh
    over: DeviceMesh
    dim: int
    before: _Before

    @property
    def length(self) -> int:
        """Elements along the sharded dimension, of what this rank has when it is gathered."""
        return self.before.shape[self.dim]

    def whole(self, sharded: DTensor) -> Tensor:
        """Gathers what FSDP2 has divided; of a tensor that is cut in the tensor parallel direction
        too, a DTensor of that direction.
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
        """The mean of the ranks' gradients, as the shards are."""
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
        """Of a rank's part, as ``torch.chunk`` cuts."""
        return -(-self.length // self._ranks())


def _padded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """With ``dim`` as the first dimension, and zeros behind it up to so many rows."""
    first = tensor.movedim(dim, 0)
    if first.shape[0] == rows:
        return first.contiguous()
    result = first.new_zeros(rows, *first.shape[1:])
    result[: first.shape[0]] = first
    return result


class _Gather(torch.autograd.Function):
    """A shard in, the whole tensor out; its gradient goes the other way."""

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
    """A module's table of parameters.  A read by name, as an attribute's, gives whole ones, and so
    do ``items``, from which ``parameters()`` comes, while a forward runs.
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
        """One by one: who looks at the first parameter alone gathers it alone."""
        if not self._reads.in_forward():
            return super().items()
        return ((name, self[name]) for name in self)

    def __reduce__(self) -> Any:  # a copy of the module is not sharded
        return dict, (list(super().items()),)


class Reads:
    """Gives parameters whole where a model's forward reads them outside their units; see [Note:
    reads outside a unit].

    Made before FSDP2 shards the model, because it looks at the shapes; begins when
    :meth:`begin` is called.  The script's thread and autograd's use it.

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
        self._running = 0  # forwards of modules, one in another
        # of the outermost forward; by parameter, and by how autograd records
        self._whole: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def begin(self) -> None:
        """From here on parameters are given whole."""
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

    # ---- when ----

    def in_forward(self) -> bool:
        """Whether a forward of the model runs."""
        return self._running > 0

    def outermost(self) -> bool:
        """Whether the forward that runs is in no other."""
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

    # ---- what ----

    def whole(self, parameter: DTensor, layout: _Layout) -> Tensor:
        """The whole tensor; one for all reads of a forward, while somebody has it."""
        key = id(parameter), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if self._running and (known := self._whole.get(key)) is not None:
            return known
        gathered: Tensor = _Gather.apply(parameter, layout)  # type: ignore[no-untyped-call]  # torch's own
        if self._running:
            self._whole[key] = gathered
        return gathered
