"""The places at which a trainer joins the automatic saves of its job: between two of its steps, and
wherever it waits for others, which may wait for it in a save.

[Note: saves and trainers that come late]  A trainer that joins late takes the job's values, not
those of a checkpoint.  It learns the others' position, and with it the step after which they next
ask whether to save; from there on it saves with them.  If they are in a save just then, and wait
for it, it joins that save as soon as its script is where theirs is, or when it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pserver.client.replies import PutOff
from trainer.job.save_schedule import SaveSchedule


class DueSaves:
    """One trainer's places for saves.  The script's thread calls it.

    Args:
        schedule: of the saves of all trainers.
        taken: gives the number of steps that this trainer has taken.
        save: saves with the others; takes the name of the save, the same on every trainer.

    Attributes:
        meeting: the save that this trainer is in, or "".
    """

    def __init__(
        self, schedule: SaveSchedule, taken: Callable[[], int], save: Callable[[str], None]
    ) -> None:
        self._schedule, self._taken, self._save = schedule, taken, save
        self._steps = 0  # at the last place where the trainers could have saved
        self._theirs: Mapping[str, Any] | None = None  # the state of the others' saves
        self.meeting = ""

    def begin(self) -> None:
        """Begins at the present step, at which nothing is to be saved."""
        self._steps = self._taken()
        self._schedule.begin(self._steps)

    # ---- trainers that join late: see [Note: saves and trainers that come late] ----

    def plain(self) -> dict[str, Any]:
        """The state for another trainer to :meth:`load`, as JSON can hold it."""
        return {"schedule": self._schedule.plain(), "under way": self.meeting}

    def load(self, plain: Mapping[str, Any] | None) -> None:
        """Takes the state of the others' saves; None if it is unknown."""
        self._theirs = plain

    def arrived(self) -> None:
        """Called when the script is where the others are: from here on it saves with them."""
        self._steps = self._taken()
        self._join_theirs()

    def _join_theirs(self) -> None:
        theirs, self._theirs = self._theirs, None
        if theirs is not None:
            self._schedule.join(theirs["schedule"])
            if theirs["under way"]:
                self._save_now(theirs["under way"])

    # ---- saving ----

    def trained(self) -> bool:
        """Whether steps were taken since the last call; gradients may be accumulated instead."""
        before, self._steps = self._steps, self._taken()
        return before != self._steps

    def between(self, waits: bool = False) -> None:
        """Saves, if it is time; called between two steps.

        Args:
            waits: whether this trainer takes no step until others do, as they have samples that it
                may get.
        """
        if self._schedule.due(self._taken(), waits):
            self._save_now(self._schedule.name)

    def follow(self) -> None:
        """Joins saves of the others; called while this trainer waits, in a joint call or for
        samples, as others may wait for it in a save.
        """
        self._join_theirs()
        while not self.meeting and self._schedule.followed(self._taken()):
            self._save_now(self._schedule.name)

    def _save_now(self, name: str) -> None:
        self.meeting = name
        try:
            self._save(name)
        except PutOff:  # on all trainers; the save stays due
            return
        finally:
            self.meeting = ""
        self._schedule.saved()
