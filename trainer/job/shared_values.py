"""Values computed by all trainers of a job: ``fleet.all_reduce`` and the like.

All trainers make the same calls in the same order, in any job: alone, with servers or without.
Nothing travels through parameters: with servers the trainers connect to one another at the first of
these calls, as they do in the mode "collective". docs/evaluation.md has more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.collective.dense_allreduce import DenseAllreduce, dense_allreduce_of
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.values import (
    ElasticLink,
    NoLink,
    ServedLink,
    TrainerLink,
    TrainerValues,
    WorldLink,
)
from trainer.communicator.communicator import Communicator
from trainer.environment.environment import Connection, Role
from trainer.job.collective import CollectiveJob
from trainer.job.job import Job, present, present_or_none


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduces a tensor over all trainers.

    On GPUs it travels by NCCL in a job without servers, and otherwise through main memory.

    Args:
        tensor: of one shape and dtype on all trainers; it is not changed.  Integers are exact, and
            those of up to 32 bits raise an error if the result is out of their dtype's range;
            16-bit floating-point numbers are added up as float32.
        op: "sum", "mean", "max", "min" or "prod".  A NaN on one trainer is a NaN in the result.

    Returns:
        A new tensor of the same shape and dtype, on the same device; equal to the bit on all
        trainers.

    Raises:
        ValueError: the op is unknown, or the trainers' calls differ, as in their shapes.
        TypeError: it is not a dense tensor, or its dtype lacks this op: bool has "max" and "min".
        OverflowError: an integer is out of its dtype's range.
        RuntimeError: there are servers, and ``distributed_optimizer`` has not been called.
        PServerError: another trainer is lost.

    Example::

        total = fleet.all_reduce(torch.tensor([correct, seen]))
        accuracy = (total[0] / total[1]).item()
    """
    return values_of(present()).all_reduce(tensor, op)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Gives every trainer's tensor to all.

    Args:
        tensor: of one dtype on all trainers; shapes may differ in their first dimension only.

    Returns:
        New tensors, by trainer, on this tensor's device.

    Raises:
        ValueError: the trainers' calls differ, as in their dtypes.
        TypeError: it is not a dense tensor.
        RuntimeError: there are servers, and ``distributed_optimizer`` has not been called.
        PServerError: another trainer is lost.

    Example::

        scores = torch.cat(fleet.all_gather(scores))
    """
    return values_of(present()).all_gather(tensor)


def broadcast_object(obj: Any, src: int = 0) -> Any:
    """Gives one trainer's object to all.

    Args:
        obj: of numbers, strings, bytes, lists, tuples, dicts, None, tensors and numpy arrays; the
            other trainers' objects are ignored.
        src: the trainer.

    Returns:
        The object itself on ``src``; elsewhere an equal one, its tensors in main memory.

    Raises:
        ValueError: there is no such trainer, or the trainers' calls differ.
        TypeError: the object holds something else.
        RuntimeError: there are servers, and ``distributed_optimizer`` has not been called.
        PServerError: another trainer is lost.

    Example::

        settings = fleet.broadcast_object({"threshold": 0.3})
    """
    return values_of(present()).broadcast_object(obj, src)


def all_gather_object(obj: Any) -> list[Any]:
    """Gives every trainer's object to all.

    Args:
        obj: as :func:`broadcast_object` takes it.

    Returns:
        The objects, by trainer.

    Raises:
        ValueError: the trainers' calls differ.
        TypeError: the object holds something else.
        RuntimeError: there are servers, and ``distributed_optimizer`` has not been called.
        PServerError: another trainer is lost.

    Example::

        names = fleet.all_gather_object({"file": "part-0.gz", "samples": 1000})
    """
    return values_of(present()).all_gather_object(obj)


def values_of(job: Job) -> TrainerValues:
    """This trainer's part in the collective calls of a job.

    Raises:
        RuntimeError: this process is a server, or has not joined its servers.
    """
    return TrainerValues(_link(job))


def present_values() -> TrainerValues:
    """This trainer's part in the collective calls of the present job.  Without a job the calls go
    over torch's default process group, if it is initialized, as with ``DataParallel``; otherwise
    they are of this process alone.

    Raises:
        RuntimeError: see :func:`values_of`.
    """
    job = present_or_none()
    if job is not None:
        return values_of(job)
    return TrainerValues(WorldLink() if dist.is_initialized() else NoLink())


def _link(job: Job) -> TrainerLink:
    if job.role.role is Role.PSERVER:
        raise RuntimeError("this process is a server: trainers make this call")
    if job.role.trainers == 1:
        return NoLink()
    if isinstance(job, CollectiveJob):
        return WorldLink()
    if job.communicator is None:
        raise RuntimeError(
            "call fleet.distributed_optimizer first: trainers find one another through the servers"
        )
    communicator, rank, size = job.communicator, job.role.trainer_id, job.role.trainers
    if communicator.plan.outlives_trainers:
        return ElasticLink(rank, size, gathered(communicator), lambda: communicator.live.absent)
    barrier = partial(communicator.barrier, "values of all trainers")
    return ServedLink(rank, size, barrier, partial(groups_of_trainers, communicator))


def groups_of_trainers(communicator: Communicator) -> DenseAllreduce:
    """The dense all-reduce by which the trainers sum.  The first call, which all of them make,
    brings it up; it ends with the job.
    """
    if communicator.dense_allreduce is None:
        communicator.dense_allreduce = dense_allreduce_of(
            communicator.plan, communicator.clients, communicator.trainer_id, needed=True
        )
    found = communicator.dense_allreduce
    assert isinstance(found, DenseAllreduce), "the job ends with a trainer"
    return found


def gathered(communicator: Communicator) -> ElasticGroup:
    """The group of the live trainers, which ends with the job."""
    if communicator.group is None:
        communicator.group = ElasticGroup(
            communicator.trainer_id,
            communicator.clients,
            communicator.barrier,
            lambda: communicator.live.absent,
            Connection.from_environment(),
            lambda: communicator.joint.past,
        )
    return communicator.group
