"""The ranks of a job in up to five directions: data, pipeline, sharding, sequence and tensor ("mp")
parallel.

A strategy says how many ranks each direction has (see transpiler/strategy/parallel_degrees.py) and
their order from the outermost to the innermost: neighbours in the innermost direction have adjacent
ranks.  One degree may be left to be inferred: ``dp_degree`` -1, or all shards with
``sharding=True``.

[Note: two meshes]  The user's mesh has the five directions in the user's order.  A parameter lives
on another mesh of the same ranks, with the directions that cut or copy parameters in the order that
torch's FSDP2 and tensor parallelism ask for: ("pp", "replicas", "sharding", "mp").  Data and
sequence parallel ranks are both replicas: each sees other samples, or other parts of them, and
gradients are averaged over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.collective.world import current_peers
from transpiler.strategy.parallel_degrees import REST, degrees_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Directions:
    """The number of a job's ranks in each direction.

    Attributes:
        degrees: by the names of ``AXES``.
        order: from the outermost to the innermost.
    """

    degrees: Mapping[str, int]
    order: tuple[str, ...]

    def ranks(self) -> torch.Tensor:
        """The ranks, one dimension for each direction, in ``order``."""
        shape = [self.degrees[axis] for axis in self.order]
        return torch.arange(math.prod(shape)).view(shape)

    def rank_grid(self, axes: tuple[str, ...]) -> torch.Tensor:
        """The ranks with the dimensions in the order of ``axes``."""
        return self.ranks().permute([self.order.index(axis) for axis in axes])


def directions(strategy: DistributedStrategy, world_size: int) -> Directions:
    """The directions that a strategy asks for.

    Raises:
        ValueError: the degrees' product is not, and cannot be made, the number of ranks; or a
            setting has no effect with them.
    """
    given = degrees_of(strategy)
    if given["sharding"] > world_size:
        raise ValueError(
            f"sharding_degree {given['sharding']}: expected at most the number of ranks, which is "
            f"{world_size}"
        )
    rest = math.prod(degree for degree in given.values() if degree != REST)
    said = ", ".join(f"{axis}_degree {degree}" for axis, degree in given.items())
    for axis, degree in given.items():
        if degree == REST:
            if world_size % rest:
                raise ValueError(
                    f"hybrid_configs: the other degrees' product {rest} does not divide the "
                    f"{world_size} ranks, so {axis}_degree "
                    f"cannot be inferred: {said}"
                )
            given[axis] = world_size // rest
    product = math.prod(given.values())
    if product != world_size:
        raise ValueError(
            f"hybrid_configs: expected degrees whose product is the {world_size} ranks, got "
            f"{product}: {said}"
        )
    if strategy.sharding_configs["pp_allreduce_in_optimize"] and given["dp"] * given["sep"] == 1:
        raise ValueError(
            "strategy.sharding_configs.pp_allreduce_in_optimize: has an effect with replicas only, "
            f"which are dp_degree times sep_degree, got {said}"
        )
    return Directions(given, tuple(strategy.hybrid_configs["order"]))


def hybrid_mesh(strategy: DistributedStrategy, device_type: str | None = None) -> DeviceMesh:
    """A DeviceMesh of all ranks with a strategy's five directions, in their order, by name.

    ``mesh["mp"].get_group()`` is the process group of this rank's tensor parallel peers,
    ``mesh["dp"].get_local_rank()`` its place among the data parallel ones.  All ranks call this.

    Example::

        mesh = hybrid_mesh(fleet.DistributedStrategy())
        mesh["dp"].size()    # the number of data parallel ranks

    Args:
        strategy: its ``hybrid_configs``, and its other settings that divide a model.
        device_type: None: "cuda" if there is a GPU, otherwise "cpu".

    Returns:
        A mesh of five dimensions.

    Raises:
        ValueError: wrong degrees.
    """
    return _mesh(directions(strategy, _world_size()), device_type)


def _world_size() -> int:
    current_peers()
    return dist.get_world_size()


def _mesh(directions: Directions, device_type: str | None) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(
        device_type or _device_type(), directions.ranks(), mesh_dim_names=directions.order
    )


def parameter_mesh(directions: Directions, device_type: str | None = None) -> DeviceMesh:
    """The mesh on which parameters live: ("pp", "replicas", "sharding", "mp"); see [Note: two
    meshes].
    """
    from torch.distributed.device_mesh import DeviceMesh

    grid = directions.rank_grid(("pp", "dp", "sep", "sharding", "mp")).flatten(1, 2).contiguous()
    return DeviceMesh(
        device_type or _device_type(), grid, mesh_dim_names=("pp", "replicas", "sharding", "mp")
    )


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def forget_groups(mesh: DeviceMesh) -> None:
    """Releases a mesh's process groups after the job: torch keeps a mesh in its own caches for as
    long as the process lives.
    """
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    for each in (mesh, root):
        getattr(each, "_pg_registry", {}).clear()


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's part of each batch: its number, and the number of parts.

    Data and sharding parallel ranks take different samples; pipeline, tensor and sequence parallel
    ranks take the same samples.
    """
    return (
        mesh["dp"].get_local_rank() * mesh["sharding"].size() + mesh["sharding"].get_local_rank(),
        mesh["dp"].size() * mesh["sharding"].size(),
    )


def divides(what: str, count: int, degree: int, axis: str, where: Any) -> None:
    """Checks that a count divides evenly by a degree.

    Raises:
        ValueError: it does not.
    """
    if count % degree:
        raise ValueError(
            f"{where}: {what} {count} does not divide evenly by {axis}_degree {degree}"
        )
