"""Injects faults of the network into control calls: Join, Leave, Barrier and the others.

Only tests and the history checker use it, together with :mod:`pserver.testing.stream_faults`, which
injects faults into streams.

===========  ====================================================
action       what happens to a call
===========  ====================================================
lost         the request does not arrive
unanswered   the server acts on it, and its reply is lost
twice        it arrives twice; the caller gets the first reply
slow         it arrives later
===========  ====================================================
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf.message import Message

from pserver.client import client
from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.security.access import OPEN, Access

CALL_ACTIONS = ("lost", "unanswered", "twice", "slow")
SLOW_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class CallPoint:
    """One fault at a named point.

    Attributes:
        action: what happens.
        call: to which call: "Join", ...
        occurrence: to which of them: counts such calls from 1, of all trainers.
    """

    action: str
    call: str
    occurrence: int = 1


class CallInjector:
    """Decides what happens to each control call.  Any thread may ask.

    Args:
        points: faults at named points.
        seed: of the random faults: the same seed decides the same for the n-th call of a kind to a
            server.
        rate: the part of the calls that get a random fault.
        names: port -> the server's name.

    Attributes:
        done: how often each fault happened, by (action, "call", name of the call).
    """

    def __init__(
        self,
        points: Sequence[CallPoint] = (),
        seed: object = 0,
        rate: float = 0.0,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.names = dict(names or {})
        self.done: Counter[tuple[str, str, str]] = Counter()
        self._points = list(points)
        self._calls: Counter[str] = Counter()
        self._draws: dict[tuple[str, str], random.Random] = {}
        self._seed, self._rate = seed, rate
        self._lock = threading.Lock()  # guards all of the above

    def decide(self, call: str, server: str) -> str:
        """What happens to a call: an action, or "" for nothing."""
        with self._lock:
            self._calls[call] += 1
            named = (
                point.action
                for point in self._points
                if (point.call, point.occurrence) == (call, self._calls[call])
            )
            action = next(named, "") or self._random(call, server)
            if action:
                self.done[action, "call", call] += 1
            return action

    def _random(self, call: str, server: str) -> str:
        draw = self._draws.setdefault(
            (call, server), random.Random(f"{self._seed} {call} {server}")
        )
        return draw.choice(CALL_ACTIONS) if draw.random() < self._rate else ""


class Lost(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The error of a call that did not arrive, or whose reply did not."""

    def code(self) -> grpc.StatusCode:
        """The status of a call whose connection breaks."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """The text of the status."""
        return "the connection broke"

    def trailing_metadata(self) -> tuple[()]:
        """Nothing: the server has not answered."""
        return ()


class FaultyControl(ControlClient):
    """A control client whose calls may get lost.

    Args:
        injector: decides what happens to each call.
        endpoint, timeout_seconds, name, access: as ControlClient has them.
    """

    def __init__(
        self,
        injector: CallInjector,
        endpoint: str,
        timeout_seconds: float,
        name: str = "",
        access: Access = OPEN,
    ) -> None:
        super().__init__(endpoint, timeout_seconds, name, access)
        self._injector = injector
        self._server = injector.names.get(split_endpoint(endpoint)[1], endpoint)

    def _ask(self, channel: grpc.Channel, name: str, request: Message, timeout: float) -> Message:
        action = self._injector.decide(name, self._server)
        if action == "lost":
            raise Lost
        if action == "slow":
            time.sleep(SLOW_SECONDS)
        reply = super()._ask(channel, name, request, timeout)
        if action == "unanswered":
            raise Lost
        if action == "twice":
            with suppress(grpc.RpcError):
                super()._ask(channel, name, request, timeout)
        return reply


@contextmanager
def faulty_calls(injector: CallInjector) -> Iterator[CallInjector]:
    """While it lasts, the control calls of trainers that this process starts are faulty."""
    before = vars(client)["ControlClient"]
    vars(client)["ControlClient"] = partial(FaultyControl, injector)
    try:
        yield injector
    finally:
        vars(client)["ControlClient"] = before
