"""Where a step's time goes: computing, waiting for other trainers, the wire, the update.

[Note: where a step's time goes]  A trainer measures a step from one close to the next, for how long
its script was blocked in it, and for how long each server's answer took.  What was not blocked it
has computed.  A server measures for how long its step lasted from the first trainer's commit, how
late this trainer's commit came after that, and how long the update took.  So of a server's answer::

    others = step - this trainer's lateness - update
    wire   = answer - others - update

The slowest server's parts divide what the script was blocked for.  Where a step's answer comes
while the script computes already, it is blocked for less than the answer takes, and each part
counts for as much less; what it is blocked for beyond the slowest answer is packing and unpacking,
and counts as wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pserver.web.sightings import Change


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of a trainer's step of one lane, on average.

    Attributes:
        compute: the script's own.
        others: waiting for other trainers.
        update: the servers' arithmetic.
        wire: travelling, packing and unpacking.
    """

    compute: float = 0.0
    others: float = 0.0
    update: float = 0.0
    wire: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.others + self.update + self.wire

    def parts(self) -> dict[str, float]:
        """By name."""
        return {
            "compute": self.compute,
            "others": self.others,
            "wire": self.wire,
            "update": self.update,
        }


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The times of one lane.

    Attributes:
        mode: of the lane.
        by_trainer: the steps of each trainer that has taken some.
        lateness: by trainer, seconds of a step for which the first trainer waited for it.
        answers: by endpoint, seconds from a commit to its answer, on average over trainers.
        steps_per_second: of the lane's updates.
        staleness: mean, in steps; None: there are rounds, or nothing was pushed.
        most_stale: steps, since the job's start.
    """

    mode: str
    by_trainer: Mapping[int, Split]
    lateness: Mapping[int, float]
    answers: Mapping[str, float]
    steps_per_second: float
    staleness: float | None
    most_stale: int

    @property
    def mean(self) -> Split:
        """Over trainers."""
        found = list(self.by_trainer.values())
        count = max(1, len(found))
        return Split(
            sum(each.compute for each in found) / count,
            sum(each.others for each in found) / count,
            sum(each.update for each in found) / count,
            sum(each.wire for each in found) / count,
        )


def lane_times(change: Change) -> list[LaneTimes]:
    """The times of every lane, by index."""
    lanes = {endpoint: change.lanes(endpoint) for endpoint in change.seconds}
    count = max((len(found) for found in lanes.values()), default=0)
    return [_times(change, index) for index in range(count)]


def _times(change: Change, index: int) -> LaneTimes:
    splits: dict[int, tuple[float, Split]] = {}  # by trainer: the slowest answer, and its step
    lateness: dict[int, float] = {}
    answers: dict[str, float] = {}
    mode, speed, pushes, stale, most = "", 0.0, 0, 0, 0
    for endpoint, seconds in change.seconds.items():
        found = change.lanes(endpoint)
        if index >= len(found):
            continue
        lane = found[index]
        mode, speed = lane.mode, max(speed, lane.version / seconds)
        pushes, stale = pushes + lane.stale_pushes, stale + lane.stale_steps
        most = max(most, lane.most_stale_steps)
        step = lane.step_seconds / lane.steps if lane.steps else 0.0
        update = lane.update_seconds / lane.updates if lane.updates else 0.0
        waits = []
        for trainer, report in change.reports(endpoint, index).items():
            late = lane.wait_seconds.get(trainer, 0.0) / lane.steps if lane.steps else 0.0
            lateness[trainer] = max(lateness.get(trainer, 0.0), late)
            if not (report.steps and report.waits):
                continue
            answer = report.wait_seconds / report.waits
            waits.append(answer)
            blocked = min(report.blocked_seconds, report.step_seconds) / report.steps
            whole = report.step_seconds / report.steps
            if answer >= splits.get(trainer, (-1.0, Split()))[0]:
                others = max(0.0, step - late - update)
                splits[trainer] = answer, _split(whole, blocked, answer, others, update)
        if waits:
            answers[endpoint] = sum(waits) / len(waits)
    by_trainer = {trainer: split for trainer, (_, split) in sorted(splits.items())}
    mean = stale / pushes if pushes else None
    return LaneTimes(mode, by_trainer, dict(sorted(lateness.items())), answers, speed, mean, most)


def _split(whole: float, blocked: float, answer: float, others: float, update: float) -> Split:
    """Divides a step of ``whole`` seconds."""
    share = min(1.0, blocked / answer) if answer else 0.0
    update = min(update, answer) * share
    others = min(others * share, max(0.0, blocked - update))
    return Split(whole - blocked, others, update, max(0.0, blocked - others - update))
