"""The passes of a job without automatic checkpoints, followed so that a trainer that joins late
finds the script's position.
"""

from __future__ import annotations

from trainer.communicator.communicator import Communicator
from trainer.job.job import Job
from trainer.job.script_position import ScriptPosition
from trainer.samplers.pass_log import LoggedPass, SavedPasses


class FollowedPasses:
    """See :class:`trainer.samplers.saves.Saves`: here nothing is saved.

    Args:
        job: a job of several trainers with servers.

    Attributes:
        passes: the passes over the data of ``fleet.shard``.
    """

    keeps = False
    resumed = False

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
        """Does nothing: a trainer that joins late goes to the others' position, whatever it has
        loaded.
        """

    def saved(self) -> SavedPasses:
        """See :class:`trainer.samplers.saves.Saves`."""
        return self._script.saved()

    def begin(self, loader: str) -> LoggedPass:
        """See :class:`trainer.samplers.saves.Saves`."""
        return self._script.begin(loader)

    def ready(self, begun: LoggedPass) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.ready(begun)

    def waits(self) -> None:
        """See :class:`trainer.samplers.saves.Saves`."""
        self._script.waits()

    def between(self, asked: LoggedPass | None) -> None:
        """Called when the script asks for a batch."""
        self._script.between()

    def finish(self) -> None:
        """Does nothing: nothing is being saved."""
