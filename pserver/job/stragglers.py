"""Trainers that compute far longer in a step than the others.

[Note: a straggler]  What counts is a trainer's own time: from one step's close to the next one's,
without what its script waited in steps.  So in a sync job, where all steps take equally long, the
one for which the others wait is named, and not those that wait.  The time is the mean over the
steps of the last ``REPORTS`` heartbeats that brought some, so that one long step, as after a
checkpoint, names nobody for long.

No clock: heartbeats say what trainers have measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pserver import wire_pb2 as wire
from pserver.onlookers import onlooker

REPORTS = 8
LEAST_SECONDS = 0.005  # of a step: what takes less is nobody's trouble, and mostly noise


class Member(Protocol):
    """A trainer that takes part."""

    trainer: int
    pace: Pace


@dataclass
class Pace:
    """How long a trainer's own part of a step takes.

    Attributes:
        named: it has been named as a straggler.

    Example:
        >>> pace = Pace()
        >>> for steps, seconds in ((10, 1.0), (20, 3.0)):
        ...     lane = wire.LaneReport(steps=steps, step_seconds=seconds)
        ...     pace.heard(wire.TrainerReport(lanes=[lane]))
        >>> pace.seconds
        0.2
    """

    named: bool = False
    _heard: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REPORTS))

    @onlooker("the watch for stragglers")
    def heard(self, report: wire.TrainerReport) -> None:
        """A heartbeat has come: steps and seconds count of the lane that takes most of the time."""
        lane = max(report.lanes, key=lambda each: each.step_seconds, default=wire.LaneReport())
        if not self._heard or lane.steps > self._heard[-1][0]:
            own = max(0.0, lane.step_seconds - lane.blocked_seconds)
            self._heard.append((lane.steps, own))

    @property
    def seconds(self) -> float:
        """Of a step; 0.0 where it is not known yet."""
        if len(self._heard) < 2:
            return 0.0
        (first, before), (last, after) = self._heard[0], self._heard[-1]
        return max(0.0, after - before) / (last - first)


def ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    """By trainer, its own time over the median of the others'; those of which nothing is known are
    left out, and one alone is.

    Args:
        seconds: of a step, by trainer; 0.0: not known.

    Example:
        >>> ratios({0: 0.1, 1: 0.1, 2: 0.5, 3: 0.0})[2]
        5.0
    """
    known = {trainer: each for trainer, each in seconds.items() if each > 0}
    ordered = sorted(known.values())
    found = {}
    for trainer, own in known.items():
        others = _median_without(ordered, own)
        if others > 0:
            found[trainer] = own / others
    return found


def _median_without(ordered: Sequence[float], own: float) -> float:
    """The median of all but one of them; 0.0 where there are no others."""
    count, place = len(ordered) - 1, bisect_left(ordered, own)
    if not count:
        return 0.0
    middle = ((count - 1) // 2, count // 2)  # among the others
    low, high = (ordered[each + (each >= place)] for each in middle)
    return (low + high) / 2


def stragglers(members: Iterable[Member], factor: float) -> dict[int, float]:
    """Those who compute so many times as long as the others, with how many times.

    Args:
        members: who take part.
        factor: from which ratio on a trainer is named; 0: none is.
    """
    seconds = {member.trainer: member.pace.seconds for member in members}
    return {
        trainer: ratio
        for trainer, ratio in (ratios(seconds) if factor else {}).items()
        if ratio > factor and seconds[trainer] > LEAST_SECONDS
    }


def news(members: Sequence[Member], factor: float) -> Iterator[tuple[int, str]]:
    """Of each straggler that has not been named before: its number, and a sentence."""
    slow = stragglers(members, factor)
    for member in members:
        if member.trainer in slow and not member.pace.named:
            member.pace.named = True
            yield (
                member.trainer,
                f"trainer {member.trainer} is slow: it computes {member.pace.seconds:.3g} s a "
                f"step, {slow[member.trainer]:.1f} times the median of the others",
            )
