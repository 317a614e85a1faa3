"""The schedule of automatic saves: all trainers save after the same number of steps.

[Note: the same step everywhere]  A joint save is a meeting.  In sync mode a trainer that joined it
one step before the others would wait for ever, as they wait for its step.  So no trainer decides by
its own clock.  All trainers ask after the same step whether to save there, the first one that asks
answers for all by its clock, and its answer also names the step after which they ask again.  It
predicts that step from the steps per second so far; so a job asks about as often as it saves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from transpiler.files import bounded_json

EARLY = 0.9  # of the interval: then a save is due, rather than another question soon
GROWTH = 4  # the next question is at most so many times as many steps away as the last one was


class SaveSchedule:
    """One trainer's view of the schedule.

    Args:
        every_seconds: between two saves; if a step takes longer, every step is followed by a save.
        agree: takes a topic and a text, and returns the text of the first trainer that gave one for
            that topic.
        clock: in seconds.
    """

    def __init__(
        self,
        every_seconds: float,
        agree: Callable[[str, str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._agree, self._clock = every_seconds, agree, clock
        self._ask_at = self._asked_at = self._now_at = 0  # steps
        self._begun = 0  # how often the job has begun, or continued from a checkpoint
        self._asked = self._saved = clock()

    def begin(self, steps: int) -> None:
        """Begins at this step, at which nothing is to be saved."""
        self._begun += 1
        self._asked_at, self._ask_at = steps, steps + 1
        self._asked = self._saved = self._clock()

    def due(self, steps: int, waits: bool = False) -> bool:
        """Whether the trainers save now, after so many steps.

        Args:
            waits: whether this trainer takes no step until others do, and these may wait for it to
                save: it asks now, whatever its number of steps.
        """
        if steps < self._ask_at and not waits:
            return False
        return self._take(steps, self._agree(self._topic, self._answer(steps)))

    def followed(self, steps: int) -> bool:
        """Whether another trainer has decided that all save now; then this one saves, too, whatever
        its number of steps.
        """
        said = self._agree(self._topic, "")
        return bool(said) and self._take(steps, said)

    @property
    def _topic(self) -> str:
        return f"save at step {self._ask_at}"

    def _take(self, steps: int, said: str) -> bool:
        answer, self._now_at = bounded_json.loads(said), self._ask_at
        self._asked, self._asked_at, self._ask_at = self._clock(), steps, answer["next"]
        return bool(answer["save"])

    @property
    def name(self) -> str:
        """The name of the save that is due, the same on every trainer."""
        return f"{self._begun}.{self._now_at}"

    def plain(self) -> dict[str, Any]:
        """The state that another trainer needs to ask after the same steps."""
        return {
            "ask at": self._ask_at,
            "asked at": self._asked_at,
            "begun": self._begun,
            "since asked": self._clock() - self._asked,
            "since saved": self._clock() - self._saved,
        }

    def join(self, plain: Mapping[str, Any]) -> None:
        """Takes the state that another trainer gave by :meth:`plain` a moment ago."""
        now = self._clock()
        self._ask_at, self._asked_at = plain["ask at"], plain["asked at"]
        self._begun = plain["begun"]
        self._asked, self._saved = now - plain["since asked"], now - plain["since saved"]

    def saved(self) -> None:
        """Notes that a save has ended; the time to the next one begins."""
        self._asked = self._saved = self._clock()

    def _answer(self, steps: int) -> str:
        now = self._clock()
        save = now - self._saved >= EARLY * self._every
        left = self._every if save else self._every - (now - self._saved)
        taken, seconds = steps - self._asked_at, max(now - self._asked, 1e-9)
        ahead = min(int(taken / seconds * left), GROWTH * taken)
        return json.dumps({"save": save, "next": self._ask_at + max(1, ahead)})
