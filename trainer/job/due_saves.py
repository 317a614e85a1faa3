"""The places at which a trainer comes to the saves that its job makes by itself: between two of its
steps, and wherever it waits for others, who may wait for it there.

[Note: saves and trainers that come late]  A trainer that joins late takes the job's values, and
none of a checkpoint.  It learns where the others are, and with that after which step they ask next
whether they save; from there on it saves with them.  Where they are in a save just then, and wait
for it, it comes to that save as soon as its script is where theirs is, or as it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pserver.client.replies import PutOff
from trainer.job.save_schedule import SaveSchedule


class DueSaves:
    """One trainer's.  The script's thread calls it.

    Args:
        schedule: when all save.
        taken: gives the steps that this trainer has taken.
        save: saves with the others; is given the name of the save, the same on every trainer.

    Attributes:
        meeting: the save that this trainer is in; "": none.
    """

    def __init__(
        self, schedule: SaveSchedule, taken: Callable[[], int], save: Callable[[str], None]
    ) -> None:
        self._schedule, self._taken, self._save = schedule, taken, save
        self._steps = 0  # at the last place where the trainers could have saved
        self._theirs: Mapping[str, Any] | None = None  # where the others' saves are
        self.meeting = ""

    def begin(self) -> None:
        """The job goes on from here, where nothing is to be saved."""
        self._steps = self._taken()
        self._schedule.begin(self._steps)

    # ---- trainers that join late: see [Note: saves and trainers that come late] ----

    def plain(self) -> dict[str, Any]:
        """The state for another trainer to :meth:`take`, as JSON can hold it."""
        return {"schedule": self._schedule.plain(), "under way": self.meeting}

    def take(self, plain: Mapping[str, Any] | None) -> None:
        """Takes where the others' saves are; None: they could not say."""
        self._theirs = plain

    def arrived(self) -> None:
        """The script is where the others are: from here on it saves with them."""
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
        """Whether steps were taken since this was last asked: gradients may be added up instead."""
        before, self._steps = self._steps, self._taken()
        return before != self._steps

    def between(self, waits: bool = False) -> None:
        """This trainer is between two steps: saves, where it is time.

        Args:
            waits: it takes none until others do, as they have samples that it may get.
        """
        if self._schedule.due(self._taken(), waits):
            self._save_now(self._schedule.name)

    def follow(self) -> None:
        """This trainer waits, in a joint call or for samples, and others may wait for it in a
        save.
        """
        self._join_theirs()
        while not self.meeting and self._schedule.followed(self._taken()):
            self._save_now(self._schedule.name)

    def _save_now(self, name: str) -> None:
        self.meeting = name
        try:
            self._save(name)
        except PutOff:  # on all trainers, and it stays due
            return
        finally:
            self.meeting = ""
        self._schedule.saved()
