"""One lane of a plan, from a trainer's side: how its steps are sent, and how what comes back is
taken in.

::

    sync_sender.py   sync: the step leaves, everybody waits, new parameters land in place
    async_sender.py     async, half-async: steps queue, a thread merges and sends them, parameters land in a stage
    kstep_senders.py      geo, diloco: the script's own optimizer steps; every k steps what it changed leaves

A step goes through three calls of the script's thread: ``send`` (each gradient), ``close`` (the
step is complete), ``finish`` (what may be waited for, and what has arrived is taken in).  Nothing
but ``finish``, ``refresh`` and ``drain`` changes parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pserver.client.channel import Channel
from pserver.table.gradient import RowGradient
from pserver.transport.array_assembler import row_parts
from pserver.wire_pb2 import Commit, Done, GroupHparams, Kind, Part
from transpiler.formats.plan_message import hparams_to_proto
from transpiler.ir.rules import Hparam

Hparams = Mapping[int, Mapping[str, Hparam]]


class LaneSender(Protocol):
    """What the communicator asks of a lane, from the script's thread."""

    # held by whoever has a request under way on the lane's channels without the script waiting for
    # it
    turn: threading.Lock

    @property
    def step(self) -> int:
        """Messages sent."""

    def landing(self, part: Part) -> torch.Tensor:
        """Where a part of a value goes; called in the channels' threads."""

    def start(self, channels: list[Channel], step: int) -> None:
        """The channels, by server; ``step`` is the last one that the servers have applied."""

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """One slice's gradient."""

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """One table's gradient; what it holds is not written to any more."""

    def close(self, rows: Hparams, overflow: bool) -> None:
        """The step is complete."""

    def finish(self) -> Done:
        """Takes in what has arrived, after waiting for what the lane waits for."""

    def refresh(self) -> None:
        """Takes in what has arrived, if anything: at the entry of a forward."""

    def drain(self) -> None:
        """Waits until everything has been sent and answered, and takes it in."""

    def stop(self) -> None:
        """Ends the lane's threads."""

    def metrics(self) -> dict[str, float]:
        """Counters, by name."""


@dataclass(slots=True)
class Request:
    """Commits of one message at several servers, and their answers."""

    step: int
    answers: list[Future[Done]] = field(default_factory=list)

    def wait(self) -> Done:
        """The first server's answer, when all have come; or the first failure.

        The heartbeats see to it that this ends.
        """
        done, _ = wait(self.answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        return self.answers[0].result()


def post_rows(channels: Sequence[Channel], step: int, table: str, gradient: RowGradient) -> None:
    """Queues a table's gradient at every server.

    A server counts the steps of a table, so it hears of those that touch none of its rows, too.
    """
    for channel, part in zip(channels, gradient.divide(len(channels)), strict=True):
        channel.post(Kind.ROWS, step, row_parts(table, part))


def commit_of(
    hparams: Hparams, absent: set[str], overflow: bool = False, omit_values: bool = False
) -> Commit:
    """The end of a step, as a message."""
    messages = [
        GroupHparams(group=group, values=hparams_to_proto(values))
        for group, values in sorted(hparams.items())
    ]
    return Commit(
        hparams=messages, absent=sorted(absent), overflow=overflow, omit_values=omit_values
    )
