"""The dense all-reduce of a job with servers that ends if a trainer is lost: all trainers of the
plan average some gradients among themselves, those of dense parameters beside tables on servers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pserver.config import split_endpoint
from pserver.errors import TimedOut
from pserver.polling import poll
from trainer.collective.gradient_means import DENSE, GradientMeans, GroupSums
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, own_address, rendezvous
from trainer.environment.environment import Connection
from transpiler.plan.plan import Plan
from transpiler.strategy.exchange import GradientExchange, exchange_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

RENDEZVOUS = "rendezvous"  # the key of its address at the meeting place
WHOLE = GradientExchange(size_mb=math.inf)  # one bucket for each dtype and device
PAUSE_SECONDS = 0.1  # at most, between two requests for trainer 0's endpoint

log = logging.getLogger(__name__)


class DenseAllreduce:
    """One trainer's part in the means of dense gradients.  Not thread-safe.

    Args:
        clients: of the servers; server 0 passes on trainer 0's endpoint.
        rank, size: this trainer's rank, and the number of trainers.
        connection: gives the seconds within which all must join.  The heartbeat timeout is the
            servers', and a trainer that the servers have lost ends the wait.
        exchange: how gradients travel.

    Attributes:
        exchange: how gradients travel.
        groups: of the trainers, for further operations; None for one trainer.

    Raises:
        PServerError: some trainers have not joined.
        ValueError: the trainers do not divide into rows.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        rank: int,
        size: int,
        connection: Connection,
        exchange: GradientExchange = WHOLE,
    ) -> None:
        self.exchange = exchange
        self.groups = _met(clients, rank, size, connection, exchange) if size > 1 else None
        self._sums = GroupSums(self.groups, exchange)

    def average(
        self,
        parameters: Sequence[Tensor],
        gradients: Mapping[Tensor, Tensor],
        overflow: bool,
        by_servers: bool = False,
    ) -> GradientMeans:
        """The mean over all trainers.

        Args:
            parameters: in the same order everywhere.
            gradients: by parameter, for those that have one.
            by_servers: not used here: the mean always counts as it is.

        Raises:
            TrainerLost: another trainer is lost, or has left.
        """
        return self._sums.average(parameters, gradients, overflow)

    def total(
        self,
        tensors: Sequence[Tensor],
        what: str = DENSE,
        seconds: float = math.inf,
    ) -> list[Tensor]:
        """The sums over all trainers.

        Args:
            tensors: in the same order everywhere, of the same shapes and dtypes; they are not
                changed.
            what: the operation, for messages.
            seconds: the longest wait.

        Raises:
            TimedOut: the wait was longer.
            TrainerLost: another trainer is lost, or has left.
        """
        if self.groups is None:
            return list(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
        buckets = [[tensors[index] for index in own] for own in alike.values()]
        sums = self._sums.sums(buckets, what, seconds)
        found = dict[int, Tensor]()
        for own, parts in zip(alike.values(), sums, strict=True):
            found |= dict(zip(own, parts, strict=True))
        return [found[index] for index in range(len(tensors))]

    def finish(self) -> None:
        """Announces that this trainer takes no further step: a trainer that takes one ends with an
        error.
        """
        if self.groups is not None:
            self.groups.finish()

    def close(self, failure: str = "") -> None:
        """Leaves the other trainers."""
        self._sums.close()
        if self.groups is not None:
            self.groups.close(failure)


def dense_allreduce_of(
    plan: Plan,
    clients: Sequence[Client],
    rank: int,
    strategy: DistributedStrategy | None = None,
    needed: bool = False,
) -> DenseAllreduce | None:
    """The averaging of the gradients that a plan leaves to the trainers; None if there are none.

    Args:
        clients: of trainer ``rank``, which has joined the servers.
        strategy: determines how gradients travel; None: all of one dtype at once.
        needed: whether it is needed in any case, for other sums over trainers.

    Raises:
        PServerError: other trainers have not joined.
        ValueError: a grace period is set, and preempted trainers cannot leave here.
    """
    if not plan.averaged and not needed:
        return None
    if plan.averaged:
        log.info("training collectively, beside: %s", ", ".join(plan.averaged))
    exchange = WHOLE if strategy is None else exchange_of(strategy)
    connection = Connection.from_environment()
    if plan.trainers > 1:
        connection.check_no_grace("where trainers sum among themselves, as none can leave then")
    return DenseAllreduce(clients, rank, plan.trainers, connection, exchange)


def _met(
    clients: Sequence[Client],
    rank: int,
    size: int,
    connection: Connection,
    exchange: GradientExchange,
) -> ProcessGroups:
    """The process groups of all trainers, after their rendezvous."""
    connection = replace(connection, heartbeat_timeout_seconds=clients[0].heartbeat_timeout_seconds)
    meanwhile = partial(_check, clients)
    host = own_address(clients[0].endpoint)
    connection.check_collective(host)
    if rank == 0:
        store = connect_store(host, 0, rank, connection)
        clients[0].meetings.set(RENDEZVOUS, f"{host}:{store.port}")
    else:
        endpoint = _rendezvous_endpoint(clients[0], connection.start_timeout_seconds)
        store = connect_store(*split_endpoint(endpoint), rank, connection, meanwhile=meanwhile)
    peers = rendezvous(
        store,
        rank,
        [""] * size,
        connection,
        metadata={"how gradients travel": repr(exchange)},
        host=host,
        meanwhile=meanwhile,
    )
    return ProcessGroups(peers, meanwhile)


def _check(clients: Sequence[Client]) -> None:
    """Raises the error that ended the job, as the servers report it."""
    for client in clients:
        client.check()


def _rendezvous_endpoint(client: Client, timeout: float) -> str:
    """Trainer 0's endpoint, as soon as the server has it."""
    text = "waiting for trainer 0 to announce the endpoint of the trainers' rendezvous"
    for _ in poll(log, lambda: text, timeout, PAUSE_SECONDS):
        if endpoint := client.meetings.agree(RENDEZVOUS):
            return endpoint
        client.check()
    raise TimedOut(f"trainer 0 has not announced the trainers' rendezvous within {timeout:g} s")
