"""From ``fleet.init`` until it has joined, a trainer announces itself to the servers: its end is
then known to the others although no server has seen it yet.
"""

from __future__ import annotations

import atexit
import secrets
import sys

from pserver.client.announcement import Announcement
from trainer.communicator.session import REASON, spelled, termination
from trainer.environment.environment import Connection, RoleMaker


class Arrival:
    """A trainer on its way into a job.

    Args:
        role: a trainer's, among servers.

    Attributes:
        incarnation: with which it joins.
    """

    def __init__(self, role: RoleMaker) -> None:
        self.incarnation = secrets.token_hex(8)
        self._announcement = Announcement(
            role.server_endpoints,
            role.trainer_id,
            self.incarnation,
            Connection.from_environment().access_to(role.server_endpoints),
        )
        termination.add(self._announcement.failed)
        atexit.register(self._abandoned)

    def check(self) -> None:
        """Raises what ends the wait for a server: it has said that it is shutting down."""
        if self._announcement.failure is not None:
            raise self._announcement.failure

    def joined(self) -> None:
        """It has joined every server, or stays away in good order."""
        termination.remove(self._announcement.failed)
        atexit.unregister(self._abandoned)
        self._announcement.joined()

    def _abandoned(self) -> None:
        """The process ends, and has not joined."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        reason = spelled(error) if error is not None else "its script has ended"
        self._announcement.failed(REASON if termination.came else reason)
