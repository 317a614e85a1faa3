"""A server that does not answer any more, and may come back: who has started it starts another
process in its place, which a trainer joins again.

[Note: joining again]  The heartbeat notices both: that the server does not answer, and that it
answers and knows nobody.  Then this trainer joins it once more, with the same incarnation, and
gives it its program where the server asks for it.  What was not answered waits meanwhile in the
channels, which open their streams again, and send it again: the server counts each step once, with
those that were decided before.
"""

from __future__ import annotations

import logging

from pserver.errors import PServerError, TimedOut, Unreachable

log = logging.getLogger(__name__)


class ServerReturn:
    """Whether, and for how long, a trainer awaits one server.  The heartbeat's thread asks.

    Args:
        server: for the log: "server 1 at HOST:PORT".

    Attributes:
        seconds: for how long, beyond the heartbeat timeout; 0: it does not come back.
        count: how often it has.
    """

    def __init__(self, server: str) -> None:
        self._server, self.seconds, self.count = server, 0.0, 0
        self._said = False

    def awaits(self, error: PServerError, silence: float, timeout: float) -> bool:
        """Whether a server is awaited that has not answered a heartbeat; says once that it is.

        Args:
            error: what the heartbeat has ended with.
            silence: seconds since the last answer.
            timeout: the heartbeat timeout.
        """
        silent = isinstance(error, Unreachable | TimedOut)
        if not (self.seconds and silent and silence <= timeout + self.seconds):
            return False
        if not self._said and silence > timeout / 10:
            self._said = True
            log.warning(
                "waits for %s, which does not answer, for up to %g s: %s",
                *(self._server, timeout + self.seconds, error),
            )
        return True

    def joined(self) -> None:
        """It has come back, and this trainer has joined it again."""
        self._said, self.count = False, self.count + 1
        text = "%s has come back: joined it again, and sends again what it has not answered"
        log.warning(text, self._server)
