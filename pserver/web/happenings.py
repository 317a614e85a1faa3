"""What has happened to a job: what servers tell, and what their watcher sees of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from pserver.web.sightings import START_SECONDS, Sighting, started

MOST = 500
SAME_SECONDS = 5.0  # two servers tell the same thing within so long
SAVED = "saved"


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that has happened.

    Attributes:
        tick: when the watcher has learned of it, as curves count.
        time: in seconds since 1970, by the watcher's clock.
        kind: a word: "joined", "lost", "saved", ...
        text: a sentence.
    """

    tick: int
    time: float
    kind: str
    text: str


class Happenings:
    """The last of them, in the order in which the watcher has learned of them.

    Attributes:
        saved_at: when the last checkpoint was written; None: none is known.
    """

    def __init__(self) -> None:
        self.saved_at: float | None = None
        self._all: deque[Happening] = deque(maxlen=MOST)
        self._heard: dict[str, int] = {}  # by endpoint: the number of the last event
        self._down: set[str] = set()
        self._started: dict[str, float] = {}

    def add(self, tick: int, time: float, kind: str, text: str) -> None:
        """Something has happened."""
        self._all.append(Happening(tick, time, kind, text))
        if kind == SAVED:
            self.saved_at = max(time, self.saved_at or 0.0)

    def take(self, tick: int, before: Sighting, after: Sighting) -> None:
        """What is new between two moments."""
        for endpoint, reply in after.replies.items():
            known = self._started.setdefault(endpoint, started(reply))
            if abs(started(reply) - known) >= START_SECONDS:
                self._heard.pop(endpoint, None)
                self.add(tick, after.time, "restarted", f"{endpoint} was started again")
            elif endpoint in self._down:
                self.add(tick, after.time, "back", f"{endpoint} answers again")
            self._down.discard(endpoint)
            self._started[endpoint] = started(reply)
            late = after.heard[endpoint] - reply.time  # this clock, less the server's
            for event in reply.events:
                if event.number > self._heard.get(endpoint, 0):
                    self._heard[endpoint] = event.number
                    self._told(tick, event.time + late, event.kind, event.text)
        for endpoint, error in after.errors.items():
            if endpoint not in self._down and endpoint not in after.replies:
                self._down.add(endpoint)
                self.add(tick, after.time, "unreachable", f"{endpoint} does not answer: {error}")
        for endpoint in set(before.replies) & set(after.replies):
            earlier = {each.trainer_id: each.report for each in before.replies[endpoint].trainers}
            for trainer in after.replies[endpoint].trainers:
                said = earlier.get(trainer.trainer_id)
                if said is not None and trainer.report.saves > said.saves:
                    when = after.time - trainer.report.since_save_seconds
                    self._told(tick, when, SAVED, "fleet.save has written the whole job")

    def _told(self, tick: int, time: float, kind: str, text: str) -> None:
        """What a server tells counts once where several do."""
        for each in reversed(self._all):
            if each.kind == kind and each.text == text and abs(each.time - time) < SAME_SECONDS:
                return
        self.add(tick, time, kind, text)

    def since(self, tick: int) -> list[dict[str, Any]]:
        """What the watcher has learned after a tick, JSON-able."""
        return [
            {"time": each.time, "kind": each.kind, "text": each.text}
            for each in self._all
            if each.tick > tick
        ]
