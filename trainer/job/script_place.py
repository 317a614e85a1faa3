"""Where a script is when its job saves, as a checkpoint has it."""

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
    """Where a script is when its job saves.

    Attributes:
        drawn: passes of the job whose order was drawn; of some nobody has asked for more than their
            length.
        schedulers: their states, by optimizer and type.
        trainers: by trainer, what :func:`own_place` says of it.
        leases: who trains on which samples, as server 0 keeps it; "": nobody asked.
        of: how many trainers the job had, those included that were not there; 0: as many as have
            said where they are.
    """

    drawn: int
    schedulers: Mapping[str, Any]
    trainers: Mapping[int, Mapping[str, Any]]
    leases: str = ""
    of: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it.

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
        """What :meth:`plain` gave."""
        return cls(
            plain["drawn"],
            {name: resume.unpacked(state) for name, state in plain["schedulers"].items()},
            dict(plain["trainers"]),
            plain.get("leases", ""),
            plain.get("of", 0),
        )

    def passes(self, trainer: int, trainers: int) -> SavedPasses:
        """A trainer's passes.  Where there were more trainers, or fewer, those that were under way
        begin at the joint batch where they were, or the one before.
        """
        another = self.trainers[min(self.trainers)]
        found = SavedPasses.of(self.trainers.get(trainer, another)["passes"])
        before = self.of or len(self.trainers)
        if before != trainers:
            for each in found.under_way:
                each.skipped = (each.skipped or 0) * before // trainers
                each.given = each.trained = each.skipped
                log.warning(
                    "%d trainers had saved, and there are %d: the pass that was under way goes on "
                    "behind batch %d of this trainer",
                    before,
                    trainers,
                    each.skipped,
                )
        return found


def own_place(passes: SavedPasses) -> dict[str, Any]:
    """Where one trainer is: its passes, and the states of its random sources."""
    return {"passes": passes.plain(), "random": random_states()}
