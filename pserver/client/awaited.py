"""What a trainer waits for in one request."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from pserver.client.replies import Reply
from pserver.errors import PServerError


@dataclass(frozen=True, slots=True)
class Awaited:
    """What is waited for in one request.

    Attributes:
        reply: the server's, or the failure that came instead.
        norms: this server's part of the squared norms, where norms clip on servers.
        sent: the request's COMMIT has left; or the request has failed.
    """

    reply: Future[Reply] = field(default_factory=Future)
    norms: Future[Mapping[str, float]] = field(default_factory=Future)
    sent: Future[None] = field(default_factory=Future)

    def fail(self, error: PServerError) -> None:
        """What has not come fails."""
        for future in (self.reply, self.norms):
            if not future.done():
                future.set_exception(error)
        if not self.sent.done():
            self.sent.set_result(None)
