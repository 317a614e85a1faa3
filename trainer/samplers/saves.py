"""The interface by which a job follows its script, and writes automatic checkpoints."""

from __future__ import annotations

from typing import Protocol

from trainer.communicator.communicator import Communicator
from trainer.samplers.pass_log import LoggedPass, PassLog, SavedPasses


class Saves(Protocol):
    """The automatic saves of a job: :class:`trainer.job.automatic_saves.AutomaticSaves`, or
    :class:`trainer.job.followed_passes.FollowedPasses` where nothing is saved.

    Attributes:
        passes: over the data of ``fleet.shard``.
        keeps: whether checkpoints are written.
        resumed: whether this trainer has loaded a checkpoint of them.
    """

    passes: PassLog
    keeps: bool
    resumed: bool

    def connected(self, communicator: Communicator) -> None:
        """Called with a new connection to the servers, before its first message."""

    def joined(self) -> None:
        """Called after one or more optimizers have joined."""

    def cancel(self) -> None:
        """Called after the script has loaded a checkpoint by itself."""

    def saved(self) -> SavedPasses:
        """The passes for a checkpoint."""

    def begin(self, loader: str) -> LoggedPass:
        """Begins a pass over a loader."""

    def ready(self, begun: LoggedPass) -> None:
        """Called before a pass gives its first batch."""

    def finish(self) -> None:
        """Called before the job ends."""

    def waits(self) -> None:
        """Called while the script waits for a batch that another trainer may hand back."""

    def between(self, asked: LoggedPass | None) -> None:
        """Called when the script asks for the next batch of a pass; None: of one that has not
        begun.
        """
