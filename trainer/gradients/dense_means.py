"""What averages the gradients that a plan leaves to the trainers of a job with servers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from trainer.collective.dense_allreduce import WHOLE, DenseAllreduce, dense_allreduce_of
from trainer.collective.elastic_means import Company, DenseSteps
from trainer.collective.member_groups import Member, MemberGroups
from trainer.environment.environment import Connection
from trainer.gradients.averaged_values import AveragedValues, Stepper
from transpiler.strategy.exchange import exchange_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:  # which brings the transports
    from trainer.communicator.communicator import Communicator

log = logging.getLogger(__name__)


def dense_means_of(
    communicator: Communicator,
    optimizers: Sequence[Stepper],
    strategy: DistributedStrategy | None = None,
    others: bool = False,
) -> DenseAllreduce | DenseSteps | None:
    """What averages those gradients; all trainers have come when it returns.  None: there are none.

    Args:
        communicator: of a trainer that has joined.
        optimizers: of the script.
        strategy: says how gradients travel; None: all of one dtype at once.
        others: the trainers sum other things, too, of which each needs all of the plan.

    Raises:
        PServerError: other trainers have not come.
        ValueError: the trainers do not divide into rows; or they are to leave when they are
            preempted, and cannot.
    """
    plan = communicator.plan
    if plan.averaged and plan.trainers > 1 and plan.outlives_trainers and not others:
        return dense_steps_of(communicator, optimizers, strategy)
    clients, own = communicator.clients, communicator.trainer_id
    return dense_allreduce_of(plan, clients, own, strategy, others)


@contextmanager
def keeping_told(communicator: Communicator | None) -> Iterator[None]:
    """Inside, a script's call writes parameters, as one that loads a checkpoint: where the others
    have made it before this trainer came, what it has been told of averaged parameters stays.
    """
    there = None if communicator is None else communicator.dense_allreduce
    if communicator is None or not (isinstance(there, DenseSteps) and there.arrived):
        yield
        return
    told = there.values()
    yield
    if communicator.joint.past:
        there.take(told)


@contextmanager
def _waiting(communicator: Communicator) -> Iterator[None]:
    """Inside this trainer waits for the others, which is no time of its own."""
    with communicator.position.waiting(), communicator.page.steps.waits():
        yield


def drain_before(communicator: Communicator) -> None:
    """Before a new process goes on from this trainer's steps: waits until the servers have decided
    them.  A bounded lane waits for each of its steps anyway, and perhaps for the new process.
    """
    for index, lane in enumerate(communicator.plan.lanes):
        if lane.kind.queues and lane.staleness is None:
            with communicator.written.landing(index):
                communicator.lanes[index].drain()


def dense_steps_of(
    communicator: Communicator,
    optimizers: Sequence[Stepper],
    strategy: DistributedStrategy | None,
) -> DenseSteps:
    """What averages the gradients that a plan leaves to the trainers, where the job goes on without
    one that is lost; all have come when it returns.

    Args:
        communicator: of a trainer that has joined.
        optimizers: of the script.
        strategy: says how gradients travel; None: all of one dtype at once.

    Raises:
        PServerError: other trainers have not come.
        ValueError: the trainers do not divide into rows.
    """
    plan, client = communicator.plan, communicator.clients[0]
    log.info("training collectively, beside: %s", ", ".join(plan.averaged))
    values = AveragedValues(plan, optimizers)
    company = Company(
        lambda text, after, ends, averages, overflows: client.gather(
            text, after, communicator.check, ends, averages, overflows
        ),
        lambda: communicator.roll.changes,
        communicator.check,
        lambda: max(0, communicator.position.step - 1),
        partial(_waiting, communicator),
        client.late,
        partial(drain_before, communicator),
    )
    member = Member(communicator.trainer_id, secrets.token_hex(8))
    steps = DenseSteps(
        company,
        partial(MemberGroups, member, communicator.clients, Connection.from_environment()),
        WHOLE if strategy is None else exchange_of(strategy),
        values.give,
        values.take,
    )
    for lane in communicator.lanes:
        lane.meanwhile = steps.attend
    communicator.joint.attend = steps.attend
    return steps
