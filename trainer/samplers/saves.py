"""What follows a job's script, and may write checkpoints by itself."""

from __future__ import annotations

from typing import Protocol

from trainer.communicator.communicator import Communicator
from trainer.samplers.pass_log import Pass, PassLog


class Saves(Protocol):
    """See :class:`trainer.job.automatic_saves.AutomaticSaves`, and
    :class:`trainer.job.followed_passes.FollowedPasses` where nothing is saved.

    Attributes:
        passes: over the data of ``fleet.shard``.
        keeps: whether checkpoints are written.
    """

    passes: PassLog
    keeps: bool

    def connected(self, communicator: Communicator) -> None:
        """There is a connection to the servers, over which nothing has been said yet."""

    def joined(self) -> None:
        """One or more optimizers were distributed, and have joined."""

    def cancel(self) -> None:
        """The script has loaded a checkpoint by itself."""

    def begin(self, loader: str) -> Pass:
        """A pass over a loader begins."""

    def ready(self, begun: Pass) -> None:
        """A pass is about to give its first batch."""

    def finish(self) -> None:
        """The job is about to end."""

    def waits(self) -> None:
        """The script waits for a batch that another trainer may hand back."""

    def between(self, asked: Pass | None) -> None:
        """The script asks for the next batch of a pass; None: of one that has not begun."""
