"""Which sender each lane of a plan has on a trainer: one entry for each update mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trainer.communicator.async_sender import AsyncSender
from trainer.communicator.kstep_senders import DiLoCoSender, GeoSender
from trainer.communicator.lane import LaneSender
from trainer.communicator.options import SendOptions
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.sync_sender import SyncSender
from transpiler.plan.plan import Lane, Plan

SENDERS: Mapping[str, Callable[[Plan, Lane, ParameterSlices, SendOptions], LaneSender]] = {
    "sync": lambda plan, lane, slices, options: SyncSender(
        lane, slices, plan.clip if plan.clips_on_servers else None
    ),
    "async": lambda plan, lane, slices, options: AsyncSender(lane, slices, options.soft_wait_ms),
    "half_async": lambda plan, lane, slices, options: AsyncSender(lane, slices),
    "geo": lambda plan, lane, slices, options: GeoSender(lane, slices, plan.trainers),
    "diloco": lambda plan, lane, slices, options: DiLoCoSender(lane, slices),
}


def sender_of(
    plan: Plan, index: int, tensors: Mapping[str, torch.Tensor], options: SendOptions
) -> LaneSender:
    """The sender for a lane's mode.

    Args:
        index: of the lane.
        tensors: every placed variable by name, the live ones.
        options: of this trainer alone.
    """
    lane = plan.lanes[index]
    slices = ParameterSlices(
        [p for p in plan.placements if p.lane == index and p.group is not None], tensors
    )
    return SENDERS[lane.mode](plan, lane, slices, options)
