"""Processes of :mod:`tests.support.script_world`: their leases, their steps, their samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

from pserver import wire_pb2 as wire
from pserver.client.client import LeaseCalls
from pserver.leases.epoch import Epoch, Lease
from pserver.leases.table import EpochRange
from pserver.membership.members import Member
from trainer.samplers.leased_part import LeasedPart
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_pass import Pass
from trainer.senders.pipeline import ConsumedSamples


class Asked(Protocol):
    """A world, as its processes ask it."""

    random: Random
    trainers: int
    together: bool

    def asks(self, member: Member, request: wire.LeaseRequest) -> wire.LeaseReply:
        """A process's request reaches the server."""


class Waits(Exception):
    """A trainer has nothing to do before another one's step is decided."""


class Desk(SampleLeases):
    """A process's leases, whose requests go to the server at once; a reply may be lost."""

    def __init__(self, world: Asked, member: Member) -> None:
        control: Any = SimpleNamespace(
            lease=lambda request, meanwhile: world.asks(member, request),
        )
        communicator: Any = SimpleNamespace(
            clients=[
                SimpleNamespace(leases=LeaseCalls(control, lambda ask: ask(""), self._nothing))
            ],
            consumed=ConsumedSamples(),
            plan=SimpleNamespace(lanes=[]),
            check=self._nothing,
            position=SimpleNamespace(waiting=nullcontext),
        )
        stripes = world.trainers if world.together else 0
        super().__init__(communicator, stripes, lambda: None)
        self._world = world

    @staticmethod
    def _nothing() -> None:
        raise Waits

    def _most(self, epoch: Epoch) -> int:
        return 2**32 - 1 if epoch.stripes else self._world.random.randint(1, 9)

    def lease_ahead(self, epoch: Epoch) -> Future[Lease] | None:
        """At once, or not at all."""
        if epoch.stripes or epoch.in_pieces or self._world.random.random() < 0.5:
            return None
        future: Future[Lease] = Future()
        future.set_result(self.lease(epoch))
        return future


Step = tuple[list[EpochRange], list[int]]  # what its commit names, and the samples in it


@dataclass
class Script:
    """A process: a loop over epochs, with a step each so many batches.

    A step goes from ``staged`` (at the trainer) to ``arrived`` (at the server) to the world's
    ``applying`` (its record stands), and is applied.
    """

    number: int
    incarnation: str
    member: Member
    desk: Desk
    epoch: int = 0
    mine: Pass[LeasedPart] | None = None  # the pass under way
    draws: Iterator[Any] | None = None
    items: list[int] = field(default_factory=list)  # given since the last step
    batches: int = 0  # given since the last step
    staged: deque[Step] = field(default_factory=deque)
    arrived: Step | None = None
    waits: bool = False
    done: bool = False


def items_of(item: Any) -> list[int]:
    """The samples of a batch, whatever it is."""
    if isinstance(item, dict):
        return [int(each) for each in item["n"].tolist()]
    return [item] if isinstance(item, int) else list(item)
