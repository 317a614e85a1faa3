"""The dense all-reduce of a job with servers: trainers average some gradients among themselves,
those of dense parameters beside tables on servers.

[Note: one layout]  Every trainer sums the same elements: all these parameters in the plan's order,
zeros for those without a gradient, and behind them one number for each parameter (has it a
gradient?) and one for an overflow.  So trainers whose steps differ cannot mix up their parts; a
parameter that no trainer has a gradient for is skipped, and a step that overflows on one trainer is
skipped by all.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.config import split_endpoint
from pserver.errors import TimedOut
from pserver.polling import poll
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.role import Connection
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from pserver.client.client import Client  # which brings the transports

PAUSE_SECONDS = 0.1  # the longest, between two questions for trainer 0's endpoint

log = logging.getLogger(__name__)


class DenseAllreduce:
    """One trainer's part in the means of dense gradients.  Not thread-safe.

    Args:
        clients: the servers; server 0 tells the trainers trainer 0's endpoint.
        rank, size: which trainer this is, and of how many.
        connection: gives the seconds until all must have come.  The heartbeat timeout is the
            servers', and a trainer that the servers have lost is waited for no more.

    Raises:
        PServerError: some have not come.
    """

    def __init__(
        self, clients: Sequence[Client], rank: int, size: int, connection: Connection
    ) -> None:
        self._groups: ProcessGroups | None = None
        if size > 1:
            connection = replace(
                connection, heartbeat_timeout_seconds=clients[0].heartbeat_timeout_seconds
            )
            meanwhile = partial(_check, clients)
            host = _own_address(clients[0].endpoint)
            connection.check_collective(host)
            if rank == 0:
                store = connect_store(host, 0, rank, connection)
                clients[0].rendezvous(f"{host}:{store.port}")
            else:
                endpoint = _rendezvous_endpoint(clients[0], connection.start_timeout_seconds)
                at = split_endpoint(endpoint)
                store = connect_store(*at, rank, connection, meanwhile=meanwhile)
            names = [""] * size
            peers = rendezvous(store, rank, names, connection, host=host, meanwhile=meanwhile)
            self._groups = ProcessGroups(peers, meanwhile)

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
        if self._groups is None:
            return [parameter for parameter in parameters if parameter in gradients], overflow
        with torch.no_grad():
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            flats = {key: _flattened(own, gradients) for key, own in alike.items()}
            _sum(self._groups, [have, *flats.values()])
            for own, flat in zip(alike.values(), flats.values(), strict=True):
                means = torch.split(
                    flat.div_(self._groups.size), [parameter.numel() for parameter in own]
                )
                for parameter, mean in zip(own, means, strict=True):
                    parameter.grad = _written(parameter, mean.view_as(parameter))
        found = [
            parameter
            for parameter, count in zip(parameters, have[:-1].tolist(), strict=True)
            if count
        ]
        for parameter in set(parameters).difference(found):
            parameter.grad = None
        return found, bool(have[-1])

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all trainers.

        Args:
            tensors: in the same order everywhere, of the same shapes and dtypes; they stay.

        Raises:
            TrainerLost: another trainer is gone.
        """
        if self._groups is None:
            return list(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
        flats = [torch.cat([tensors[i].reshape(-1) for i in own]) for own in alike.values()]
        _sum(self._groups, flats)
        found = dict[int, Tensor]()
        for own, flat in zip(alike.values(), flats, strict=True):
            parts = torch.split(flat, [tensors[index].numel() for index in own])
            found |= {i: part.view_as(tensors[i]) for i, part in zip(own, parts, strict=True)}
        return [found[index] for index in range(len(tensors))]

    def close(self, failure: str = "") -> None:
        """Leaves the others."""
        if self._groups is not None:
            self._groups.close(failure)


def dense_allreduce_of(plan: Plan, clients: Sequence[Client], rank: int) -> DenseAllreduce | None:
    """What averages the gradients that a plan leaves to the trainers; None where there are none.

    Args:
        clients: of trainer ``rank``, which has joined.

    Raises:
        PServerError: other trainers have not come.
    """
    if not plan.averaged:
        return None
    log.info("training collectively, beside: %s", ", ".join(plan.averaged))
    return DenseAllreduce(clients, rank, plan.trainers, Connection.from_environment())


def _check(clients: Sequence[Client]) -> None:
    """Raises what has ended the job, as the servers say."""
    for client in clients:
        client.check()


def _sum(groups: ProcessGroups, tensors: Sequence[Tensor]) -> None:
    """Sums each tensor over all trainers, in place."""
    options = dist.AllreduceOptions()  # a sum
    what = "the dense all-reduce"
    works = []
    for tensor in tensors:
        group = groups.group("dense", range(groups.size), tensor.device)
        work = groups.begin(partial(group.allreduce, [tensor], options), what)
        works.append((work, tensor.device))
    for work, device in works:
        groups.wait(work, what, device)


def _flattened(parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor]) -> Tensor:
    parts = [
        gradients[p].reshape(-1) if p in gradients else torch.zeros_like(p).reshape(-1)
        for p in parameters
    ]
    return torch.cat(parts)


def _written(parameter: Tensor, mean: Tensor) -> Tensor:
    if parameter.grad is None:
        return mean.clone()
    return parameter.grad.copy_(mean)


def _own_address(endpoint: str) -> str:
    """This host's address on the way to an endpoint."""
    host, port = split_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _rendezvous_endpoint(client: Client, timeout: float) -> str:
    """Trainer 0's, as soon as it has told the server."""
    text = "waiting for trainer 0 to say where the trainers' rendezvous is"
    for _ in poll(log, lambda: text, timeout, PAUSE_SECONDS):
        if endpoint := client.rendezvous():
            return endpoint
        client.check()
    raise TimedOut(f"trainer 0 has not said within {timeout:g} s where the trainers' rendezvous is")
