"""The position of a job's scripts in a checkpoint: passes, schedulers, random sources, leases.

Every checkpoint that ``fleet`` writes has one, under "place", whoever writes the files: the servers
their parts, or trainer 0.  A script that the job itself brings back (see [Note: a script that is
started again] in script_position.py) takes all of it; one that calls ``fleet.load`` knows its own
place, and takes the count of passes and the leases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.job.random_states import random_states
from trainer.samplers.pass_log import NOTHING, SavedPasses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a job's scripts when it saves.

    Attributes:
        drawn: the number of the job's passes whose order was drawn; of some only the length was
            asked.
        schedulers: the states of schedulers, by optimizer and type, as
            :func:`trainer.job.found_schedulers.scheduler_states` gives them.
        trainers: the result of :func:`own_position`, by trainer.
        leases: the leases of samples, as server 0 keeps them; "" without leases.
        of: the job's number of trainers, including those that were not live; 0: as many as in
            ``trainers``.
    """

    drawn: int = 0
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    trainers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    leases: str = ""
    of: int = 0

    def meta(self) -> dict[str, Any]:
        """The position, as the metadata of a checkpoint has it."""
        place = {
            "drawn": self.drawn,
            "schedulers": dict(self.schedulers),
            "trainers": [[trainer, own] for trainer, own in self.trainers.items()],
            "leases": self.leases,
            "of": self.of,
        }
        return {"passes": self.drawn, "place": place}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Position:
        """The position in a checkpoint's metadata.  Checkpoints of earlier versions, and of other
        commands, have less of it, or nothing.
        """
        place = meta.get("place") or {}
        return cls(
            int(place.get("drawn", meta.get("passes", 0))),
            place.get("schedulers", {}),
            dict(place.get("trainers", ())),
            place.get("leases", ""),
            place.get("of", 0),
        )

    def passes(self, trainer: int, trainers: int) -> SavedPasses:
        """A trainer's passes.  If the number of trainers was another, passes under way begin at the
        joint batch that they had reached, or the one before.
        """
        if not self.trainers:
            return NOTHING
        another = self.trainers[min(self.trainers)]
        found = SavedPasses.of(self.trainers.get(trainer, another)["passes"])
        before = self.of or len(self.trainers)
        if before != trainers:
            for each in found.under_way:
                each.skipped = (each.skipped or 0) * before // trainers
                each.given = each.trained = each.skipped
                log.warning(
                    "%d trainers had saved, and there are %d: the pass under way continues "
                    "after batch %d of this trainer",
                    before,
                    trainers,
                    each.skipped,
                )
        return found

    def random(self, trainer: int) -> dict[str, Any] | None:
        """The states of a trainer's random sources; None: there may be more trainers than
        before.
        """
        found = self.trainers.get(trainer, {}).get("random")
        return None if found is None else dict(found)


def own_position(passes: SavedPasses) -> dict[str, Any]:
    """The position of one trainer: its passes, and the states of its random sources."""
    return {"passes": passes.plain(), "random": random_states()}
