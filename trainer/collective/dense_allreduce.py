"""The dense all-reduce of a job with servers: trainers average some gradients among themselves,
those of dense parameters beside tables on servers.

[Note: one layout]  Every trainer sums the same elements: first one number for each of these
parameters (has it a gradient?) and one for an overflow, then all of them in the plan's order, in
buckets, zeros for those without a gradient.  So trainers whose steps differ cannot mix up their
parts; a parameter that no trainer has a gradient for is skipped, and a step that overflows on one
trainer is skipped by all.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pserver.config import split_endpoint
from pserver.errors import TimedOut
from pserver.polling import poll
from trainer.collective.buckets import MB
from trainer.collective.comm_ring import Ring
from trainer.collective.gradient_sums import as_sent
from trainer.collective.own_address import own_address
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.environment.connection import Connection
from transpiler.plan.comm_rings import row_or_all
from transpiler.plan.plan import Plan
from transpiler.strategy.exchange import Exchange, exchange_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

WHOLE = Exchange(size_mb=math.inf)  # all that is alike at once: nothing hides a part of it
PAUSE_SECONDS = 0.1  # the longest, between two questions for trainer 0's endpoint

log = logging.getLogger(__name__)


class DenseAllreduce:
    """One trainer's part in the means of dense gradients.  Not thread-safe.

    Args:
        clients: the servers; server 0 tells the trainers trainer 0's endpoint.
        rank, size: which trainer this is, and of how many.
        connection: gives the seconds until all must have come.  The heartbeat timeout is the
            servers', and a trainer that the servers have lost is waited for no more.
        exchange: how gradients travel.

    Attributes:
        exchange: how gradients travel.
        groups: of the trainers, for further operations; None where one trains alone.

    Raises:
        PServerError: some have not come.
        ValueError: the trainers do not divide into rows.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        rank: int,
        size: int,
        connection: Connection,
        exchange: Exchange = WHOLE,
    ) -> None:
        self.exchange, self._size = exchange, size
        self.groups: ProcessGroups | None = None
        self._rings: dict[tuple[int, str], Ring] = {}
        if size > 1:
            connection = replace(
                connection, heartbeat_timeout_seconds=clients[0].heartbeat_timeout_seconds
            )
            meanwhile = partial(_check, clients)
            host = own_address(clients[0].endpoint)
            connection.check_collective(host)
            if rank == 0:
                store = connect_store(host, 0, rank, connection)
                clients[0].rendezvous(f"{host}:{store.port}")
            else:
                endpoint = _rendezvous_endpoint(clients[0], connection.start_timeout_seconds)
                at = split_endpoint(endpoint)
                store = connect_store(*at, rank, connection, meanwhile=meanwhile)
            names = [""] * size
            peers = rendezvous(
                store,
                rank,
                names,
                connection,
                metadata={"how gradients travel": repr(exchange)},
                host=host,
                meanwhile=meanwhile,
            )
            self.groups = ProcessGroups(peers, meanwhile)
            self._inner = 0
            if exchange.row is not None:
                hosts = peers.exchange("hosts", platform.node(), range(size))
                self._inner = row_or_all(exchange.row, hosts)

    def average(
        self, parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], overflow: bool
    ) -> tuple[list[Tensor], bool]:
        """The mean over all trainers, in place.

        Args:
            parameters: in the same order everywhere.
            gradients: of those of them that have one; overwritten.

        Returns:
            The parameters that some trainer has a gradient for, each with its mean in ``.grad``;
            whether some step overflowed.

        Raises:
            TrainerLost: another trainer is gone.
        """
        have = torch.tensor(
            [float(parameter in gradients) for parameter in parameters] + [float(overflow)]
        )
        if self.groups is None:
            return [parameter for parameter in parameters if parameter in gradients], overflow
        with torch.no_grad():
            buckets = _buckets(parameters, self.exchange)
            parts = [[self._part(p, gradients.get(p)) for p in own] for own in buckets]
            ((have,), *sums) = self._sums([[have], *parts])
            for own, means in zip(buckets, sums, strict=True):
                for parameter, mean in zip(own, means, strict=True):
                    parameter.grad = self._written(parameter, mean)
        found = [
            parameter
            for parameter, count in zip(parameters, have[:-1].tolist(), strict=True)
            if count
        ]
        for parameter in set(parameters).difference(found):
            parameter.grad = None
        return found, bool(have[-1])

    def total(
        self,
        tensors: Sequence[Tensor],
        what: str = "the dense all-reduce",
        seconds: float = math.inf,
    ) -> list[Tensor]:
        """The sums over all trainers.

        Args:
            tensors: in the same order everywhere, of the same shapes and dtypes; they stay.
            what: the operation, for messages.
            seconds: the longest wait.

        Raises:
            TimedOut: it was longer.
            TrainerLost: another trainer is gone.
        """
        if self.groups is None:
            return list(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
        buckets = [[tensors[index] for index in own] for own in alike.values()]
        sums = self._sums(buckets, what, seconds)
        found = dict[int, Tensor]()
        for own, parts in zip(alike.values(), sums, strict=True):
            found |= dict(zip(own, parts, strict=True))
        return [found[index] for index in range(len(tensors))]

    def _part(self, parameter: Tensor, gradient: Tensor | None) -> Tensor:
        """What this trainer adds for a parameter.

        See [Note: float16 between trainers] for why it may be divided here.
        """
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif self.exchange.dtype:
            gradient.div_(self._size)
        return as_sent(gradient, self.exchange)

    def _written(self, parameter: Tensor, total: Tensor) -> Tensor:
        """The mean, as the parameter's gradient."""
        mean = total if self.exchange.dtype else total.div_(self._size)
        if parameter.grad is None:
            return mean.to(parameter.dtype, copy=True)
        return parameter.grad.copy_(mean)

    def _sums(
        self,
        buckets: Sequence[Sequence[Tensor]],
        what: str = "the dense all-reduce",
        seconds: float = math.inf,
    ) -> list[list[Tensor]]:
        """The sums over all trainers; buckets take the rings in turn."""
        pending = []
        for number, tensors in enumerate(buckets):
            device = tensors[0].device
            ring = self._ring(number % self.exchange.rings, device)
            pending.append(ring.sum(tensors, what, seconds))
            if self.exchange.waits:
                pending[-1].result(0)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        return [
            [each.result(place) for place in range(len(tensors))]
            for each, tensors in zip(pending, buckets, strict=True)
        ]

    def _ring(self, number: int, device: torch.device) -> Ring:
        """All trainers ask in the same order."""
        assert self.groups is not None, "there are other trainers"
        key = (number, device.type)
        if key not in self._rings:
            self._rings[key] = Ring(self.groups, self._inner, number, device)
        return self._rings[key]

    def finish(self) -> None:
        """Says that this trainer takes no further step: one that does ends with an error."""
        if self.groups is not None:
            self.groups.finish()

    def close(self, failure: str = "") -> None:
        """Leaves the others."""
        for ring in self._rings.values():
            ring.close()
        if self.groups is not None:
            self.groups.close(failure)


def dense_allreduce_of(
    plan: Plan,
    clients: Sequence[Client],
    rank: int,
    strategy: DistributedStrategy | None = None,
    needed: bool = False,
) -> DenseAllreduce | None:
    """What averages the gradients that a plan leaves to the trainers; None where there are none.

    Args:
        clients: of trainer ``rank``, which has joined.
        strategy: says how gradients travel; None: all of one dtype at once.
        needed: also where there are none, for other sums over trainers.

    Raises:
        PServerError: other trainers have not come.
        ValueError: trainers are to leave when they are preempted.
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


def _check(clients: Sequence[Client]) -> None:
    """Raises what has ended the job, as the servers say."""
    for client in clients:
        client.check()


def _buckets(parameters: Sequence[Tensor], exchange: Exchange) -> list[list[Tensor]]:
    """Parameters of one dtype and device that travel together, in their order."""
    most = exchange.most or len(parameters)
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kind = (parameter.device, parameter.dtype)
        own = filling.get(kind)
        if own is None or len(own) == most or _bytes(own, parameter) > exchange.size_mb * MB:
            own = filling[kind] = []
            buckets.append(own)
        own.append(parameter)
    return buckets


def _bytes(own: Sequence[Tensor], more: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*own, more))


def _rendezvous_endpoint(client: Client, timeout: float) -> str:
    """Trainer 0's, as soon as it has told the server."""
    text = "waiting for trainer 0 to say where the trainers' rendezvous is"
    for _ in poll(log, lambda: text, timeout, PAUSE_SECONDS):
        if endpoint := client.rendezvous():
            return endpoint
        client.check()
    raise TimedOut(f"trainer 0 has not said within {timeout:g} s where the trainers' rendezvous is")
