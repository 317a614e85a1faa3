"""Requests of every control call, and a service that answers them all."""

from __future__ import annotations

from google.protobuf.message import Message

from pserver import wire_pb2 as wire
from pserver.control.calls import CALLS

# requests that say more than an empty one, where that needs another key
MORE = {
    "Save": wire.SaveRequest(path="elsewhere"),
    "Load": wire.LoadRequest(path="elsewhere"),
    "Announce": wire.AnnounceRequest(trainer_id=1, failure="it has ended"),
}
REQUESTS: list[tuple[str, Message]] = [
    *((name, CALLS[name][1]()) for name in CALLS),
    *MORE.items(),
]


class AnyJob:
    """Answers every call."""

    def __getattr__(self, name: str) -> object:
        reply = {method: kind for method, _, kind in CALLS.values()}[name]
        return lambda request: reply()
