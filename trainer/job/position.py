"""The place of a script in a checkpoint: its passes, schedulers and random sources."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint import resume
from trainer.job.random_states import random_states
from trainer.job.script_position import packed
from trainer.samplers.pass_log import SavedPasses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """The place of a script when its job saves.

    Attributes:
        drawn: the number of the job's passes whose order was drawn; of some only the length was
            asked.
        schedulers: the states of schedulers, by optimizer and type.
        trainers: the result of :func:`own_place`, by trainer.
        leases: the leases of samples, as server 0 keeps them; "" if they were not read.
        of: the job's number of trainers, including those that were not live; 0: as many as in
            ``trainers``.
    """

    drawn: int
    schedulers: Mapping[str, Any]
    trainers: Mapping[int, Mapping[str, Any]]
    leases: str = ""
    of: int = 0

    def plain(self) -> dict[str, Any]:
        """The place, as JSON can hold it.

        Raises:
            ValueError: a scheduler's state cannot be held.
        """
        return {
            "drawn": self.drawn,
            "schedulers": {name: packed(name, state) for name, state in self.schedulers.items()},
            "trainers": [[trainer, place] for trainer, place in self.trainers.items()],
            "leases": self.leases,
            "of": self.of,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ScriptPlace:
        """The place from the form that :meth:`plain` gave."""
        return cls(
            plain["drawn"],
            {name: resume.unpacked(state) for name, state in plain["schedulers"].items()},
            dict(plain["trainers"]),
            plain.get("leases", ""),
            plain.get("of", 0),
        )

    def passes(self, trainer: int, trainers: int) -> SavedPasses:
        """A trainer's passes.  If the number of trainers was another, passes under way begin at the
        joint batch that they had reached, or the one before.
        """
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


def own_place(passes: SavedPasses) -> dict[str, Any]:
    """The place of one trainer: its passes, and the states of its random sources."""
    return {"passes": passes.plain(), "random": random_states()}
