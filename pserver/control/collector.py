"""Asks every server of a job for its status, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pserver import timeouts
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access, always_open
from pserver.side_business import SideBusiness
from pserver.telemetry.job_view import Sample
from pserver.wire_pb2 import StatusReply, StatusRequest

EACH_SECONDS = 1.0


class Collector:
    """Watches a job: a thread asks each server, and one takes their answers each second, so that a
    server that is gone does not delay the others.  A context manager.

    Args:
        endpoints: of the servers.
        take: called in that thread with all servers' answers at one moment.
        access_of: by endpoint, what is proved to the server.
        seconds: between two questions.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        take: Callable[[Sample], None],
        access_of: Callable[[str], Access] = always_open,
        seconds: float = EACH_SECONDS,
    ) -> None:
        self._access_of, self._take, self._seconds = access_of, take, seconds
        self._lock = threading.Lock()  # guards the two below
        self._heard: dict[str, tuple[float, StatusReply]] = {}
        self._errors: dict[str, str] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(each,), name=f"asks {each}", daemon=True)
            for each in endpoints
        ]
        self._threads.append(threading.Thread(target=self._take_all, name="collector", daemon=True))

    def __enter__(self) -> Collector:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, endpoint: str) -> None:
        """Asks one server until the end."""
        control: ControlClient | None = None
        wait = 0.0
        while not self._closing.wait(wait):
            began = time.monotonic()
            try:
                if control is None:  # a server that was started again may have another secret
                    access = self._access_of(endpoint)
                    control = ControlClient(endpoint, timeouts.WATCH_SECONDS, access=access)
                reply = control.status(StatusRequest())
            except (PServerError, OSError, ValueError) as error:
                with self._lock:
                    self._heard.pop(endpoint, None)
                    self._errors[endpoint] = str(error).removeprefix(f"{endpoint}: ")
                if control is not None:
                    control.close()
                control = None
            else:
                with self._lock:
                    self._heard[endpoint] = time.time(), reply
                    self._errors.pop(endpoint, None)
            wait = max(0.0, self._seconds - (time.monotonic() - began))
        if control is not None:
            control.close()

    def _take_all(self) -> None:
        """Hands the servers' answers on, until the end."""
        taking = SideBusiness("the servers' answers")
        while not self._closing.wait(self._seconds):
            taking.do(self._take_once)

    def _take_once(self) -> None:
        with self._lock:
            heard, errors = dict(self._heard), dict(self._errors)
        replies = {endpoint: reply for endpoint, (_, reply) in heard.items()}
        times = {endpoint: when for endpoint, (when, _) in heard.items()}
        self._take(Sample(time.time(), replies, times, errors))
