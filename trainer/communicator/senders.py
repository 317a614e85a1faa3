"""Which sender each lane of a plan has on a trainer: one entry for each update mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from pserver.client.channel import Hparams
from trainer.communicator.async_sender import AsyncSender
from trainer.communicator.kstep_senders import DiLoCoSender, GeoSender
from trainer.communicator.lane import LaneSender
from trainer.communicator.options import SendOptions
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.roll import Roll
from trainer.communicator.sync_sender import SyncSender
from trainer.communicator.travelling_buffers import TravellingBuffers, travelling
from transpiler.plan.plan import Lane, Placement, Plan


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sender is made of, besides its slices.

    Attributes:
        plan: of the job.
        lane: of the sender.
        options: of this trainer alone.
        roll: which trainers are there.
        buffers: that travel with the lane's steps.
    """

    plan: Plan
    lane: Lane
    options: SendOptions
    roll: Roll
    buffers: TravellingBuffers

    @property
    def hparams(self) -> Hparams:
        """Those of the plan, by group."""
        return {index: rule.hparams for index, rule in enumerate(self.plan.groups)}


SENDERS: Mapping[str, Callable[[ParameterSlices, Settings], LaneSender]] = {
    "sync": lambda slices, of: SyncSender(
        of.lane, slices, of.plan.clip if of.plan.clips_on_servers else None, of.roll, of.buffers
    ),
    "async": lambda slices, of: AsyncSender(of.lane, slices, of.options.soft_wait_ms, of.buffers),
    "half_async": lambda slices, of: AsyncSender(of.lane, slices, 0, of.buffers),
    "geo": lambda slices, of: GeoSender(of.lane, slices, of.roll, of.hparams, of.buffers),
    "diloco": lambda slices, of: DiLoCoSender(of.lane, slices, of.hparams, of.buffers),
}


def senders_of(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    options: SendOptions,
    roll: Roll,
    held_back: AbstractSet[str],
    buffers: TravellingBuffers,
) -> list[LaneSender]:
    """The senders of a plan's lanes, each for its lane's mode.

    Args:
        plan: of the job.
        tensors: every placed variable by name, the live ones.
        options: of this trainer alone.
        roll: which trainers are there.
        held_back: names of variables that nothing lands on.
        buffers: those of models, which travel with the steps of one lane.
    """
    none = TravellingBuffers([], {}, "own", roll)
    senders = []
    for index, lane in enumerate(plan.lanes):
        slices = ParameterSlices(_placements(plan, index, tensors), tensors, held_back)
        own = buffers if index == buffers.lane else none
        senders.append(SENDERS[lane.mode](slices, Settings(plan, lane, options, roll, own)))
    return senders


def buffers_of(plan: Plan, tensors: Mapping[str, torch.Tensor], roll: Roll) -> TravellingBuffers:
    """The buffers that travel, of all models of a job: with the first lane of gradients, or with
    the first lane where there are none.
    """
    placements = travelling(plan, tensors)
    lane = _held_lane(plan) or 0
    return TravellingBuffers(placements, tensors, plan.lanes[lane].buffers, roll, lane)


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
