"""One lane of a plan, on a trainer's side: how its steps are sent, and when what comes back changes
the parameters.

::

    sync_sender.py     sync: gradients leave as they come; the script waits for every trainer's step
    async_sender.py    async, half-async: closed steps queue; a thread merges and sends them
    kstep_senders.py   geo, diloco: the script's optimizer steps; every k steps the changes leave

A step goes through three calls of the script's thread: ``send`` (each gradient), ``close`` (the
step is complete), ``finish`` (waits for what the mode waits for, and takes in what has arrived).
Nothing but ``finish``, ``refresh``, ``drain`` and ``leave`` changes parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.replies import Reply
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment
from trainer.communicator.consumed_samples import ConsumedSamples
from trainer.communicator.parameter_slices import ParameterSlices


class LaneSender(Protocol):
    """What the communicator asks of a lane, from the script's thread."""

    # held while a request is under way on the lane's channels that the script does not wait for
    turn: threading.Lock
    consumed: ConsumedSamples  # which its messages say to server 0
    # called every now and then while the script waits in it
    meanwhile: Callable[[], None]

    @property
    def step(self) -> int:
        """Messages sent."""

    def destination(self, name: str, blank: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Where the value of a slice goes; called in the channels' threads."""

    def start(self, channels: list[Channel], step: int) -> None:
        """Takes the channels, by server.

        Args:
            step: the last one that the servers have applied.
        """

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Takes one slice's gradient."""

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """Takes one table's gradient; the caller does not write to its tensors again."""

    def close(self, hparams: Hparams, overflow: bool) -> None:
        """Completes the step."""

    def finish(self) -> Reply:
        """Takes in what has arrived, after waiting for what the lane waits for."""

    def refresh(self) -> None:
        """Takes in what has arrived, if anything: at the entry of a forward."""

    def drain(self) -> None:
        """Waits until everything has been sent and answered, and takes it in."""

    def leave(self) -> None:
        """What :meth:`drain` does, at the end of the job: what stays on the trainer until then
        leaves, too.
        """

    def stop(self) -> None:
        """Tells the lane's threads to end."""

    def rest(self) -> None:
        """Waits until they have ended, a few seconds at most; the connections are closed.

        An interpreter that ends while a thread frees a tensor ends by SIGABRT: see
        [Note: gloo at exit].
        """

    def metrics(self) -> dict[str, float]:
        """Counters, by name."""


class Landings(Protocol):
    """What last landed in a lane's parameters, and what differs from it."""

    slices: ParameterSlices

    @property
    def between_steps(self) -> bool:
        """Whether values land between steps, too."""

    @property
    def keeps_memory(self) -> bool:
        """Whether the lane itself keeps what has landed."""

    @property
    def keeps_copies(self) -> bool:
        """Whether a copy of what has landed is to be kept after every step."""

    def holds(self, variables: Iterable[str]) -> bool:
        """Whether it has what last landed in all of these variables."""

    def copy(self, variables: Iterable[str]) -> None:
        """Notes the variables' present values."""

    def forget(self) -> None:
        """Keeps nothing from now on."""

    def differing(self, variables: Collection[str]) -> dict[str, Assignment]:
        """What of these variables is not as it last landed, by slice.

        While it is called nothing lands on those of them that are held back.
        """


@runtime_checkable
class GradientLane(LaneSender, Protocol):
    """A lane whose servers step.  What the script writes into its parameters is a part of the next
    step: see [Note: what a script writes] in written_values.py.
    """

    landed: Landings

    @property
    def arrived(self) -> bool:
        """Whether ``refresh`` would change parameters."""

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """The step under way assigns this, by slice."""
