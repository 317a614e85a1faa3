"""A rank's shards of parameters that are DTensors: their local tensors, on any mesh.

The optimizer sees plain local tensors: parameters on different meshes (cut in two directions, in
one, in none) can share a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.sharding.shards import Shards, Values, after_gradient, average_over, same_memory
from trainer.sharding.units import whole_of


class LocalShards(Shards):
    """The shards of a model's parameters on one rank: the DTensors' local tensors.

    Args:
        parameters: of this rank's model or stage.
        mesh: ("pp", "replicas", "sharding", "mp").
        in_update: whether gradients are averaged over replicas here, before each update, because
            backward does not.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, in_update: bool = False
    ) -> None:
        self.group, self._mesh = mesh["mp"].get_group(), mesh
        self._in_update = in_update
        self.whole = {parameter for parameter in parameters if not isinstance(parameter, DTensor)}
        self.former = {}
        self.of = {}
        for parameter in parameters:
            self.of[parameter] = (
                parameter if parameter in self.whole else nn.Parameter(_local(parameter.detach()))
            )
            if parameter not in self.whole:
                after_gradient(parameter, self._copy_gradient)

    def _copy_gradient(self, parameter: Tensor) -> None:
        """Gives the shard its parameter's gradient, summed first if each rank has a summand."""
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        gradient = parameter.grad
        if gradient is None:
            self.of[parameter].grad = None
            return
        assert isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements:
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        self.of[parameter].grad = _local(gradient.detach())

    def refresh(self) -> None:
        for parameter in self.of:
            if parameter not in self.whole:
                self._copy_gradient(parameter)
        if self._in_update:
            average_over(list(self.of.values()), self._mesh["replicas"].get_group())

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
        """Does nothing: the shards are the parameters' memory."""

    def drop_gradients(self, to_none: bool) -> None:
        for parameter, shard in self.of.items():
            for tensor in (parameter, shard):
                if to_none:
                    tensor.grad = None
                elif tensor.grad is not None:
                    tensor.grad.zero_()

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return value.detach().to(parameter.device, copy=True)
        whole = value.detach().to(self.of[parameter].device)
        return _local(
            distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        ).clone()

    def joined(self, values: Mapping[nn.Parameter, Tensor]) -> Values:
        return {parameter: self._join(parameter, value) for parameter, value in values.items()}

    def _join(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return value.clone()
        form = (value, parameter.device_mesh, parameter.placements)
        return whole_of(
            DTensor.from_local(
                *form, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        )

    def full(self, tensor: Tensor) -> Tensor:
        return whole_of(tensor)

    def summed(self, parameters: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        for name in ("sharding", "mp"):
            cut = torch.tensor(
                [self._cut_in(parameter, name) for parameter in parameters], device=squares.device
            )
            total = squares * cut
            dist.all_reduce(total, group=self._mesh[name].get_group())
            squares = torch.where(cut, total, squares)
        return squares

    def everywhere(self, total: Tensor) -> Tensor:
        total = total.clone()
        dist.all_reduce(total, group=self._mesh["pp"].get_group())  # the other stages' parameters
        return total

    @staticmethod
    def _cut_in(parameter: nn.Parameter, name: str) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        return any(
            one == name and not how.is_replicate()
            for one, how in zip(names, parameter.placements, strict=True)
        )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
