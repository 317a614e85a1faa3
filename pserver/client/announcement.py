"""A trainer announces itself to the servers, from its start until it has joined them: so the others
learn of its end although no server has seen it yet.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from pserver import timeouts
from pserver.control.control_client import ControlClient
from pserver.errors import Draining, PServerError
from pserver.running_clock import RUNNING
from pserver.security.access import OPEN, Access
from pserver.timeouts import Timeouts
from pserver.wire_pb2 import AnnounceRequest


class Announcement:
    """Announces trainer N to every server, as often as a heartbeat, in one thread for each server.

    A server that is not up yet is asked again.  A second end has no effect.  Making one waits until
    each server has been asked once, for two seconds at most: from then on every server that was up
    knows.

    Args:
        endpoints: HOST:PORT of each server.
        trainer_id: this trainer's number.
        incarnation: with which it will join.
        access: what is proved to the servers, and asked of them.

    Attributes:
        failure: set where a server has answered that it is shutting down.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        trainer_id: int,
        incarnation: str,
        access: Access = OPEN,
    ) -> None:
        self.incarnation = incarnation
        self._access = access
        self._trainer_id = trainer_id
        self._ended = threading.Event()
        self._said: list[AnnounceRequest] = []  # the last word
        asked = [threading.Event() for _ in endpoints]
        self._threads = [
            threading.Thread(
                target=self._announce_ticking,
                args=(index, endpoint, once),
                name=f"announcement {endpoint}",
            )
            for index, (endpoint, once) in enumerate(zip(endpoints, asked, strict=True))
        ]
        self.failure: PServerError | None = None
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        end = RUNNING() + timeouts.WATCH_SECONDS
        for once in asked:
            once.wait(max(0.0, end - RUNNING()))

    def joined(self) -> None:
        """Stops: this trainer has joined, or has ended in good order."""
        self._end(AnnounceRequest(joined=True))

    def failed(self, failure: str) -> None:
        """Reports that this trainer will never join; returns when every reachable server knows."""
        self._end(AnnounceRequest(failure=failure))

    def _end(self, word: AnnounceRequest) -> None:
        if self._ended.is_set():
            return
        self._said.append(word)
        self._ended.set()
        for thread in self._threads:
            thread.join(3 * timeouts.WATCH_SECONDS)

    def _announce_ticking(self, index: int, endpoint: str, asked: threading.Event) -> None:
        with RUNNING.ticking():  # what a trainer waits for before it has joined
            self._announce(index, endpoint, asked)

    def _announce(self, index: int, endpoint: str, asked: threading.Event) -> None:
        name = f"server {index} at {endpoint}"
        control = ControlClient(endpoint, timeouts.WATCH_SECONDS, name, self._access)
        request = AnnounceRequest(trainer_id=self._trainer_id, incarnation=self.incarnation)
        interval, reached = Timeouts().beat, False
        try:
            while not self._ended.is_set():
                try:
                    reply = control.announce(request)
                    interval, reached = Timeouts(reply.heartbeat_timeout_seconds).beat, True
                except Draining as error:
                    self.failure = self.failure or error
                    return
                except (PServerError, OSError):
                    pass  # it is not up yet, or this system lacks something
                asked.set()
                self._ended.wait(interval if reached else interval / 5)
            word = self._said[-1]
            with suppress(PServerError, OSError):
                if word.failure and not reached:  # it ended sooner than it was heard
                    control.announce(request)
                    reached = True
                if reached:
                    request.MergeFrom(word)
                    control.announce(request)
        finally:
            asked.set()
            control.close()
