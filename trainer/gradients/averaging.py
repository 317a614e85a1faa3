"""Gradients and values that trainers average among themselves, beside the servers' part.

[Note: a step of both]  If trainers may join and leave, the averaged part of a step counts only when
the servers have decided the rest of it, and for the same trainers::

    a lane is sync    average, commit, wait for the servers; if fewer trainers are in the step than
                      were in the average, it is repeated over those; then apply
    otherwise         average, commit, apply while the servers work, wait for them
    fixed trainers    commit, average, apply while the servers work, wait for them

In the first two cases no trainer commits before it has the average.  So all trainers of a decided
step of a sync lane have the average; and a trainer that waits in an average for a new process has
committed as many steps as it has averages, and the new process continues from these.  In lanes that
are not sync each trainer's step is decided by itself: if a trainer dies, the average of its last
step may count, and the rest not.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pserver.telemetry.trace import SPANS, now
from trainer.collective.dense_allreduce import WHOLE, DenseAllreduce, dense_allreduce_of
from trainer.collective.elastic_means import DenseSteps, LivePeers
from trainer.collective.gradient_means import GradientMeans
from trainer.collective.member_groups import MemberGroups, TrainerProcess
from trainer.environment.environment import Connection
from trainer.gradients.step import Gradients
from transpiler.plan.plan import Plan
from transpiler.strategy.exchange import exchange_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainer.communicator.communicator import Communicator


# ---- averaged step ----
#
# The part of a step that trainers average among themselves, beside the servers' part.


class AveragedStep:
    """The averaged part of one step of some parameters.

    Args:
        lanes: the plan's lanes that take such steps.
        communicator: to the servers.

    Attributes:
        due: whether the trainers average a part of the step.
        first: whether the average comes before the step is closed.
        decided: whether it counts when the servers have decided the step.
    """

    def __init__(self, lanes: Iterable[int], communicator: Communicator) -> None:
        self._plan = communicator.plan
        self._among = communicator.dense_allreduce
        self.due = bool(self._plan.averaged) and self._among is not None
        self.first = self.due and isinstance(self._among, DenseSteps)
        kinds = (self._plan.lanes[lane].kind for lane in lanes)
        self.decided = self.first and any(kind.merges_gradients for kind in kinds)

    @property
    def answers(self) -> bool:
        """Whether the script's position may be sent to others while this trainer waits for servers:
        not if a new process already has the values after the step.
        """
        return self.decided or not self.first

    def average(
        self, trained: Mapping[str, Tensor], gradients: Gradients, overflow: bool
    ) -> GradientMeans:
        """The mean gradients over the trainers.

        Args:
            trained: the parameters, by name.
            gradients: of the step, by parameter.
            overflow: whether one of them is not finite.
        """
        parameters = [trained[name] for name in self._plan.averaged if name in trained]
        own = {p: gradients[p] for p in parameters if p in gradients}
        began = now() if SPANS.on else 0.0
        assert self._among is not None, "they average something"
        means = self._among.average(parameters, own, overflow, self.decided)
        if began:
            SPANS.add("all-reduce", began, now())
        return means

    def settle(self, committed: int) -> GradientMeans:
        """The means that count, with so many trainers in the step that the servers have decided."""
        assert isinstance(self._among, DenseSteps), "servers decide the step"
        return self._among.settle(committed)


# ---- averaged values ----
#
# The values that the trainers of a mixed job step by themselves, equal on all of them, and their
# optimizer states.  A process that joins later gets them from another one.


class Inner(Protocol):
    """The part that steps parameters: the script's optimizer, or the optimizer ops of a program."""

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """Its states, by parameter."""


class Stepper(Protocol):
    """An optimizer of a job, and its number of steps.

    Attributes:
        steps: taken by the job.
    """

    steps: int

    @property
    def inner(self) -> Inner:
        """The optimizer that steps the parameters on this trainer."""

    def trained(self) -> Mapping[str, torch.Tensor]:
        """The parameters, by name."""


class AveragedValues:
    """The averaged parameters of one trainer, with their optimizer states.

    Args:
        plan: of the job.
        optimizers: of the script.
    """

    def __init__(self, plan: Plan, optimizers: Sequence[Stepper]) -> None:
        self._names, self._optimizers = frozenset(plan.averaged), optimizers

    def _each(self) -> Iterator[tuple[str, torch.Tensor, Stepper]]:
        for optimizer in self._optimizers:
            for name, parameter in optimizer.trained().items():
                if name in self._names:
                    yield name, parameter, optimizer

    def give(self) -> dict[str, Any]:
        """Values and states, as :func:`trainer.collective.object_bytes.to_bytes` can hold them."""
        values = {
            name: [parameter.detach(), dict(optimizer.inner.state.get(parameter, {}))]
            for name, parameter, optimizer in self._each()
        }
        return {"values": values, "steps": [each.steps for each in self._optimizers]}

    def load(self, given: Mapping[str, Any]) -> None:
        """Takes the values and states that :meth:`give` gave on another trainer."""
        for each, steps in zip(self._optimizers, given["steps"], strict=True):
            each.steps = steps
        for name, parameter, optimizer in self._each():
            value, state = given["values"][name]
            with torch.no_grad():
                parameter.copy_(value)
            if state:
                optimizer.inner.state[parameter] = {
                    key: _beside(key, held, parameter) for key, held in state.items()
                }


def _beside(key: str, held: Any, parameter: torch.Tensor) -> Any:
    """A part of a state, on the device where the optimizer keeps it: torch's step counts stay on
    the host.
    """
    if not isinstance(held, torch.Tensor) or key == "step":
        return held
    return held.to(parameter.device)


# ---- dense means ----
#
# The averaging of the gradients that a plan leaves to the trainers of a job with servers.


log = logging.getLogger(__name__)


def dense_means_of(
    communicator: Communicator,
    optimizers: Sequence[Stepper],
    strategy: DistributedStrategy | None = None,
    others: bool = False,
) -> DenseAllreduce | DenseSteps | None:
    """The averaging of the gradients that a plan leaves to the trainers, after all trainers have
    joined it; None if there is nothing to average or sum.

    Args:
        communicator: of a trainer that has joined.
        optimizers: of the script.
        strategy: determines how gradients travel; None: all of one dtype at once.
        others: whether the trainers also compute other sums, which need all trainers of the plan.

    Raises:
        PServerError: other trainers have not joined.
        ValueError: the trainers do not divide into rows; or a grace period is set, and preempted
            trainers cannot leave.
    """
    plan = communicator.plan
    if plan.averaged and plan.trainers > 1 and plan.outlives_trainers and not others:
        return dense_steps_of(communicator, optimizers, strategy)
    clients, own = communicator.clients, communicator.trainer_id
    return dense_allreduce_of(plan, clients, own, strategy, others)


@contextmanager
def keeping_told(communicator: Communicator | None) -> Iterator[None]:
    """Keeps received averaged parameters over a call of the script that writes parameters, such as
    loading a checkpoint, if the others made the call before this trainer joined.
    """
    there = None if communicator is None else communicator.dense_allreduce
    if communicator is None or not (isinstance(there, DenseSteps) and there.arrived):
        yield
        return
    told = there.values()
    yield
    if communicator.joint.past:
        there.load(told)


@contextmanager
def _waiting(communicator: Communicator) -> Iterator[None]:
    """Marks a wait for the other trainers, whose time counts as blocked."""
    with communicator.position.waiting(), communicator.page.steps.waits():
        yield


def drain_before(communicator: Communicator) -> None:
    """Waits until the servers have decided this trainer's steps, before a new process continues
    from them.  A lane with bounded staleness is left out: it waits for each of its steps anyway,
    and perhaps for the new process.
    """
    for index, lane in enumerate(communicator.plan.lanes):
        if lane.kind.queues and lane.staleness is None:
            communicator.lanes[index].drain()


def dense_steps_of(
    communicator: Communicator,
    optimizers: Sequence[Stepper],
    strategy: DistributedStrategy | None,
) -> DenseSteps:
    """The averaging of the gradients that a plan leaves to the trainers, in a job that continues
    without lost trainers; all have joined it when this returns.

    Args:
        communicator: of a trainer that has joined.
        optimizers: of the script.
        strategy: determines how gradients travel; None: all of one dtype at once.

    Raises:
        PServerError: other trainers have not joined.
        ValueError: the trainers do not divide into rows.
    """
    plan, client = communicator.plan, communicator.clients[0]
    log.info("training collectively, beside: %s", ", ".join(plan.averaged))
    values = AveragedValues(plan, optimizers)
    peers = LivePeers(
        lambda text, after, ends, averages, overflows: client.meetings.round(
            text, after, communicator.check, ends, averages, overflows
        ),
        lambda: communicator.live.changes,
        communicator.check,
        lambda: max(0, communicator.position.step - 1),
        partial(_waiting, communicator),
        client.late,
        partial(drain_before, communicator),
    )
    member = TrainerProcess(communicator.trainer_id, secrets.token_hex(8))
    steps = DenseSteps(
        peers,
        partial(MemberGroups, member, communicator.clients, Connection.from_environment()),
        WHOLE if strategy is None else exchange_of(strategy),
        values.give,
        values.load,
    )
    for lane in communicator.lanes:
        lane.meanwhile = steps.attend
    communicator.joint.attend = steps.attend
    return steps
