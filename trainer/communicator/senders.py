"""Which sender each lane of a plan has on a trainer: one entry for each update mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from trainer.communicator.async_sender import AsyncSender
from trainer.communicator.kstep_senders import DiLoCoSender, GeoSender
from trainer.communicator.lane import LaneSender
from trainer.communicator.options import SendOptions
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.sync_sender import SyncSender
from transpiler.plan.plan import Lane, Placement, Plan


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sender is made of, besides its slices.

    Attributes:
        plan: of the job.
        lane: of the sender.
        options: of this trainer alone.
        trainer: its number.
    """

    plan: Plan
    lane: Lane
    options: SendOptions
    trainer: int


SENDERS: Mapping[str, Callable[[ParameterSlices, Settings], LaneSender]] = {
    "sync": lambda slices, of: SyncSender(
        of.lane, slices, of.plan.clip if of.plan.clips_on_servers else None, of.trainer
    ),
    "async": lambda slices, of: AsyncSender(of.lane, slices, of.options.soft_wait_ms),
    "half_async": lambda slices, of: AsyncSender(of.lane, slices),
    "geo": lambda slices, of: GeoSender(of.lane, slices, of.plan.trainers),
    "diloco": lambda slices, of: DiLoCoSender(of.lane, slices),
}


def sender_of(
    plan: Plan,
    index: int,
    tensors: Mapping[str, torch.Tensor],
    options: SendOptions,
    trainer: int,
    held_back: AbstractSet[str],
) -> LaneSender:
    """The sender for a lane's mode.

    Args:
        index: of the lane.
        tensors: every placed variable by name, the live ones.
        options: of this trainer alone.
        trainer: its number.
        held_back: names of variables that nothing lands on.
    """
    lane = plan.lanes[index]
    slices = ParameterSlices(_placements(plan, index, tensors), tensors, held_back)
    return SENDERS[lane.mode](slices, Settings(plan, lane, options, trainer))


def _held_lane(plan: Plan) -> int | None:
    """The lane whose steps assign what servers hold and never update: the first one of gradients;
    None: there is none.
    """
    gradients = (i for i, lane in enumerate(plan.lanes) if not lane.kind.steps_on_trainer)
    return next(gradients, None)


def _held_parameters(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the parameters that servers hold and nobody updates.  Buffers are not among
    them, nor what the trainers average among themselves.
    """
    return {
        placement.name
        for placement in plan.placements
        if placement.group is None
        and placement.name not in plan.averaged
        and isinstance(tensors[placement.name], torch.nn.Parameter)
    }


def written_names(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    """The variables, by lane, into which a script's writing is sent to the servers: those that
    servers update, and parameters that they only hold.
    """
    return {
        index: [placement.name for placement in _placements(plan, index, tensors)]
        for index in range(len(plan.lanes))
    }


def _placements(plan: Plan, index: int, tensors: Mapping[str, torch.Tensor]) -> list[Placement]:
    """The variables that a lane's steps update or assign."""
    held = _held_parameters(plan, tensors) if index == _held_lane(plan) else set()
    return [
        p for p in plan.placements if (p.lane == index if p.group is not None else p.name in held)
    ]
