"""Gradients that trainers of a job with servers average among themselves: those of dense
parameters, beside tables on servers.

[Note: one layout]  Every trainer sums the same elements, whatever it has a gradient for: all these
parameters in the plan's order, absent ones as zeros, and behind them one number for each parameter
(has it a gradient?) and one for an overflow.  So trainers whose steps differ cannot mix up their
parts; a parameter that nobody has a gradient for is skipped, and a step that overflows somewhere is
skipped by all.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.client.client import Client
from pserver.config import HEARTBEAT_TIMEOUT_SECONDS, split_endpoint
from pserver.errors import TimedOut
from trainer.collective.process_groups import World, bring_up, open_store

POLL_SECONDS = 0.02


class DenseAllreduce:
    """See the module's docstring.

    Args:
        clients: the servers; server 0 says where trainers meet.
        rank, size: which trainer this is, and of how many.
        patience: seconds until all must have come.

    Raises:
        PServerError: some have not come.
    """

    def __init__(self, clients: Sequence[Client], rank: int, size: int, patience: float) -> None:
        self._size = size
        self._world: World | None = None
        if size > 1:
            host = _own_address(clients[0].endpoint)
            place = _free_endpoint(host) if rank == 0 else ""
            store = open_store(place, 0, patience) if rank == 0 else None
            place = _meeting(clients[0], place, patience)
            store = store or open_store(place, rank, patience)
            names = ["" for _ in range(size)]
            self._world = bring_up(
                store, rank, names, patience=patience, deadline=HEARTBEAT_TIMEOUT_SECONDS, host=host
            )

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
        if self._world is None:
            return [parameter for parameter in parameters if parameter in gradients], overflow
        with torch.no_grad():
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            flats = {key: _flattened(own, gradients) for key, own in alike.items()}
            self._sum([have, *flats.values()])
            for own, flat in zip(alike.values(), flats.values(), strict=True):
                means = torch.split(flat.div_(self._size), [parameter.numel() for parameter in own])
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

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        world = self._world
        assert world is not None
        options = dist.AllreduceOptions()  # a sum
        what = "averaging of gradients"
        works = []
        for tensor in tensors:
            group = world.group("average", range(self._size), tensor.device)
            work = world.begin(partial(group.allreduce, [tensor], options), what)
            works.append((work, tensor.device))
        for work, device in works:
            world.wait(work, what, device)

    def close(self, failure: str = "") -> None:
        """Leaves the others."""
        if self._world is not None:
            self._world.close(failure)


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


def _free_endpoint(host: str) -> str:
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def _meeting(client: Client, place: str, patience: float) -> str:
    end = time.monotonic() + patience
    while not (found := client.rendezvous(place)):
        if time.monotonic() > end:
            raise TimedOut(f"trainer 0 has not said within {patience:g} s where trainers meet")
        client.check()
        time.sleep(POLL_SECONDS)
    return found
