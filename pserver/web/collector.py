"""Asks every server each second, and tells pages what is new."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access, always_open
from pserver.side_business import SideBusiness
from pserver.web.sightings import Sighting
from pserver.web.watched import Watched
from pserver.wire_pb2 import StatusReply, StatusRequest

log = logging.getLogger(__name__)

EACH_SECONDS = 1.0
ASK_SECONDS = 2.0  # after which a server counts as gone


class Collector:
    """Watches a job: a thread asks each server, and one takes what they have said each second, so
    that a server that is gone makes no other one wait.  Any thread may call it.

    Args:
        endpoints: of the servers.
        access_of: by endpoint, what is proved to the server.
        seconds: between two questions.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        access_of: Callable[[str], Access] = always_open,
        seconds: float = EACH_SECONDS,
    ) -> None:
        self.endpoints = list(endpoints)
        self._access_of, self._seconds = access_of, seconds
        self._watched = Watched(endpoints)
        self._condition = threading.Condition()  # guards all above and below
        self._heard: dict[str, tuple[float, StatusReply]] = {}
        self._errors: dict[str, str] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(each,), name=f"asks {each}", daemon=True)
            for each in self.endpoints
        ]
        self._threads.append(threading.Thread(target=self._take, name="collector", daemon=True))

    def __enter__(self) -> Collector:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def page(self, since: int) -> dict[str, Any]:
        """What a page that knows all until a tick has not seen: see :meth:`Watched.page`."""
        with self._condition:
            return self._watched.page(since)

    def add(self, kind: str, text: str) -> None:
        """Something has happened here: it stands on the time axis with the rest."""
        with self._condition:
            tick = self._watched.curves.tick + 1  # pages know the present one already
            self._watched.happenings.add(tick, time.time(), kind, text)

    def _ask(self, endpoint: str) -> None:
        """Asks one server until the end."""
        control: ControlClient | None = None
        wait = 0.0
        while not self._closing.wait(wait):
            began = time.monotonic()
            try:
                if control is None:  # a server that was started again may have another secret
                    access = self._access_of(endpoint)
                    control = ControlClient(endpoint, ASK_SECONDS, access=access)
                reply = control.status(StatusRequest())
            except (PServerError, OSError, ValueError) as error:
                with self._condition:
                    self._heard.pop(endpoint, None)
                    self._errors[endpoint] = str(error).removeprefix(f"{endpoint}: ")
                if control is not None:
                    control.close()
                control = None
            else:
                with self._condition:
                    self._heard[endpoint] = time.time(), reply
                    self._errors.pop(endpoint, None)
            wait = max(0.0, self._seconds - (time.monotonic() - began))
        if control is not None:
            control.close()

    def _take(self) -> None:
        """Takes what servers have said, until the end."""
        taking = SideBusiness("what servers have said")
        while not self._closing.wait(self._seconds):
            taking.do(self._take_once)

    def _take_once(self) -> None:
        with self._condition:
            heard = dict(self._heard)
            self._watched.take(
                Sighting(
                    time.time(),
                    {endpoint: reply for endpoint, (_, reply) in heard.items()},
                    {endpoint: when for endpoint, (when, _) in heard.items()},
                    dict(self._errors),
                )
            )
