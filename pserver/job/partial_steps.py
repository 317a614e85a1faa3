"""Steps of a lost trainer of which some lanes have their part, and others don't.

In a job of several lanes each lane's step is a record of its own, as lanes never hold up one
another.  The samples count with the step of the first lane.  What a trainer's death leaves
undecided of the others' is counted here, and said.
What trainers average among themselves is no lane: averaged_steps.py counts what is only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pserver.job.membership import Membership
from pserver.job.sync_round import Contribution
from pserver.job.watermark import Watermark
from transpiler.plan.plan import Lane


def count_decided(members: Membership, lane: int, decided: Mapping[int, Contribution]) -> None:
    """The record of these steps of a lane stands.

    Args:
        decided: by trainer.
    """
    for trainer, step in decided.items():
        watermark = members.by_trainer[trainer].watermark(lane)
        watermark.script_steps += 0 if step.overflow else step.steps


def partial_steps(watermarks: Mapping[int, Watermark], lanes: Sequence[Lane]) -> int:
    """How many steps of a trainer's script are decided in a lane, and not in another one of the
    same optimizer.

    Args:
        watermarks: of the trainer, by lane, when its staged steps were dropped.
        lanes: of the plan.
    """
    decided: dict[int, list[int]] = {}  # by optimizer: in each of its lanes
    for index, lane in enumerate(lanes):
        watermark = watermarks.get(index, Watermark())
        decided.setdefault(lane.optimizer, []).append(watermark.script_steps)
    return sum(max(each) - min(each) for each in decided.values())
