"""What follows a script that writes no checkpoints by itself, so that a trainer that joins late
finds where it is.
"""

from __future__ import annotations

from trainer.communicator.communicator import Communicator
from trainer.job.job import Job
from trainer.job.script_position import ScriptPosition
from trainer.samplers.pass_log import Pass


class FollowedPasses:
    """See :class:`trainer.samplers.saves.Saves`: here nothing is saved.

    Args:
        job: of several trainers among servers.

    Attributes:
        passes: over the data of ``fleet.shard``.
    """

    keeps = False

    def __init__(self, job: Job) -> None:
        self._script = ScriptPosition(job)
        self.passes = self._script.passes

    def connected(self, communicator: Communicator) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.connected(communicator)

    def joined(self) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.joined()

    def cancel(self) -> None:
        """A trainer that joins late goes where the others are, whatever it has loaded."""

    def begin(self, loader: str) -> Pass:
        """See :class:`trainer.samplers.saves.Saves`."""
        return self._script.begin(loader)

    def ready(self, begun: Pass) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.ready(begun)

    def waits(self) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.waits()

    def between(self, asked: Pass | None) -> None:
        """The script asks for a batch."""
        self._script.between()

    def finish(self) -> None:
        """Nothing is being saved."""
