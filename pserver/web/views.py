"""The five questions of an operator, each answered in one sentence from what servers say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pserver.web.curves import Point
from pserver.web.job_view import Seen
from pserver.web.sightings import Sighting
from pserver.web.step_split import LaneTimes

SILENT_SECONDS = 5.0  # of a trainer that should beat each second
LATE_SHARE = 0.1  # of a step: from here on a trainer holds up the others
SLOWER = 1.25  # times the fastest
STILL_SECONDS = 5.0  # without a step
FRESH_SECONDS = 120.0  # of a checkpoint
TREND_POINTS = 60
NAMES = {
    "compute": "the trainers' own computing",
    "others": "waiting for other trainers",
    "wire": "the wire, packing and unpacking",
    "update": "the servers' updates",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        question: as the page asks it.
        verdict: "good", "warn", "bad", or "unknown".
        text: one sentence.
    """

    question: str
    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What the answers are made from.

    Attributes:
        endpoints: of all servers that should be there.
        sighting: the last one.
        trainers: as all servers see them.
        lanes: by index.
        still: seconds since the servers' versions last moved; None: they never have.
        values: the last points of each value that scripts report, by name, then by trainer.
        saved: seconds since the last checkpoint, where it is known that there was one.
        unsaved: steps since then, or since the job's start.
    """

    endpoints: Sequence[str]
    sighting: Sighting
    trainers: Sequence[Seen] = ()
    lanes: Sequence[LaneTimes] = ()
    still: float | None = None
    values: Mapping[str, Mapping[int, Sequence[Point]]] | None = None
    saved: float | None = None
    unsaved: int | None = None

    @property
    def states(self) -> set[str]:
        """Of the servers that have answered."""
        return {reply.state for reply in self.sighting.replies.values()}

    @property
    def failure(self) -> str:
        """What has ended the job, if something did."""
        replies = self.sighting.replies.values()
        return next((reply.failure for reply in replies if reply.failure), "")

    @property
    def runs(self) -> bool:
        """Whether a job runs."""
        return "serving" in self.states and not self.failure


def answers(facts: Facts) -> list[Answer]:
    """The five answers, in the order of the questions."""
    return [
        Answer("Is it healthy?", *_healthy(facts)),
        Answer("What limits it?", *_limit(facts)),
        Answer("Who is slow?", *_slow(facts)),
        Answer("Is the model fine?", *_model(facts)),
        Answer("Can I stop it now?", *_stop(facts)),
    ]


def _healthy(facts: Facts) -> tuple[str, str]:
    gone = [each for each in facts.endpoints if each not in facts.sighting.replies]
    if facts.failure:
        return "bad", f"No: the job has failed: {facts.failure}"
    if gone:
        few = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if gone[3:] else "")
        verb = "does" if len(gone) == 1 else "do"
        return (
            "bad",
            f"No: {len(gone)} of {_count(len(facts.endpoints), 'server')} {verb} not answer: {few}",
        )
    lost = [each.number for each in facts.trainers if each.state == "lost"]
    if lost:
        return "bad", f"No: {_trainers(lost)} lost"
    if "draining" in facts.states:
        return "warn", "It ends: a server is shutting down"
    if facts.states == {"empty"}:
        return "unknown", "No job runs: the servers are up and empty"
    expected = max(reply.trainers_expected for reply in facts.sighting.replies.values())
    if "installing" in facts.states or len(facts.trainers) < expected:
        return "warn", f"It begins: {len(facts.trainers)} of {_count(expected, 'trainer')} joined"
    silent = [
        t.number for t in facts.trainers if t.state == "joined" and t.silence > SILENT_SECONDS
    ]
    if silent:
        return "warn", f"Perhaps not: nothing is heard of {_trainers(silent, verb=False)}"
    if slow := [t.number for t in facts.trainers if t.behind]:
        return "warn", f"Yes, but {_trainers(slow)} slower than the others"
    if refused := sum(r.steps_refused_nonfinite for r in facts.sighting.replies.values()):
        return "warn", f"Yes, but {_count(refused, 'step')} refused because of a NaN or an infinity"
    working = _count(sum(each.state == "joined" for each in facts.trainers), "trainer")
    return "good", f"Yes: {_count(len(facts.endpoints), 'server')} and {working} are at work"


def _limit(facts: Facts) -> tuple[str, str]:
    if not facts.runs:
        return "unknown", "Nothing runs"
    if facts.still is None or facts.still > STILL_SECONDS:
        since = "yet" if facts.still is None else f"for {_seconds(facts.still)}"
        doing = {each.activity for each in facts.trainers if each.state == "joined"} - {""}
        said = f"; trainers say: {', '.join(sorted(doing)[:3])}" if doing else ""
        return "warn", f"Nothing moves: no step was applied {since}{said}"
    lane = max(facts.lanes, key=lambda each: each.mean.total, default=None)
    if lane is None or not lane.mean.total:
        return "unknown", "Steps are applied; how long they take is not measured yet"
    name, seconds = max(lane.mean.parts().items(), key=lambda part: part[1])
    share = seconds / lane.mean.total
    text = f"{NAMES[name]}: {share:.0%} of a step of {_seconds(lane.mean.total)}"
    return ("good" if name == "compute" else "warn"), text[0].upper() + text[1:]


def _slow(facts: Facts) -> tuple[str, str]:
    if not facts.runs:
        return "unknown", "Nothing runs"
    for lane in facts.lanes:
        if lane.lateness and lane.mean.total:
            number, late = max(lane.lateness.items(), key=lambda item: item[1])
            if len(lane.lateness) > 1 and late >= LATE_SHARE * lane.mean.total:
                return "warn", (
                    f"Trainer {number}: the first one waits {_seconds(late)} of each step of "
                    f"{_seconds(lane.mean.total)} for it"
                )
        if not lane.lateness and len(lane.by_trainer) > 1:
            number, split = max(lane.by_trainer.items(), key=lambda item: item[1].total)
            fastest = min(each.total for each in lane.by_trainer.values())
            if fastest and split.total > SLOWER * fastest:
                return "warn", (
                    f"Trainer {number}: a step takes it {_seconds(split.total)}, the fastest "
                    f"{_seconds(fastest)}"
                )
        if len(lane.answers) > 1:
            endpoint, slowest = max(lane.answers.items(), key=lambda item: item[1])
            other = min(lane.answers.values())
            if slowest > SLOWER * other and slowest - other >= LATE_SHARE * lane.mean.total:
                return "warn", (
                    f"Server {endpoint}: it answers after {_seconds(slowest)}, the fastest after "
                    f"{_seconds(other)}"
                )
    if not any(lane.by_trainer for lane in facts.lanes):
        return "unknown", "No steps have been measured in the last seconds"
    return "good", "Nobody: no trainer and no server holds up the others"


def _model(facts: Facts) -> tuple[str, str]:
    values = facts.values or {}
    for name, by_trainer in sorted(values.items()):
        for number, points in sorted(by_trainer.items()):
            if points and not math.isfinite(points[-1].value):
                return "bad", f"No: {name} of trainer {number} is {points[-1].value}"
    if refused := sum(r.steps_refused_nonfinite for r in facts.sighting.replies.values()):
        return "warn", f"Doubtful: {_count(refused, 'step')} had a NaN or an infinity"
    name = next((each for each in sorted(values) if "loss" in each.lower()), "")
    if not name:
        return "unknown", "Its loss is not known: the script says it by fleet.report(loss=...)"
    number, points = max(values[name].items(), key=lambda item: len(item[1]))
    finite = [point.value for point in points if math.isfinite(point.value)]
    third = len(finite) // 3
    if third < 2:
        return "good", f"So far: {name} is {finite[-1]:.4g}"
    first, last = median(finite[:third]), median(finite[-third:])
    span = _seconds(points[-1].time - points[0].time)
    if last > first + 0.05 * abs(first):
        return "warn", f"Doubtful: {name} rises, from {first:.4g} to {last:.4g} in {span}"
    word = "falls" if last < first - 0.01 * abs(first) else "stays"
    return "good", f"Yes: {name} {word}, from {first:.4g} to {last:.4g} in {span}"


def _stop(facts: Facts) -> tuple[str, str]:
    if not facts.sighting.replies:
        return "unknown", "No server answers"
    if facts.failure:
        kept = max(reply.kept_seconds for reply in facts.sighting.replies.values())
        what = f"its values are kept for another {_seconds(kept)}" if kept else "nothing is kept"
        return "warn" if kept else "unknown", f"It has stopped: {what}"
    if not facts.runs:
        return "good", "Yes: no job runs"
    steps = "" if facts.unsaved is None else f" and {_count(facts.unsaved, 'step')} ago"
    if facts.saved is None:
        lost = "all steps" if facts.unsaved is None else f"all {_count(facts.unsaved, 'step')}"
        return "warn", f"Not without loss: no checkpoint is known, {lost} would be gone; save first"
    if facts.saved <= FRESH_SECONDS:
        return "good", f"Yes: a checkpoint was written {_seconds(facts.saved)}{steps or ' ago'}"
    return "warn", f"Save first: the last checkpoint was {_seconds(facts.saved)}{steps or ' ago'}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _trainers(numbers: Sequence[int], verb: bool = True) -> str:
    names = ", ".join(map(str, numbers[:8])) + (" ..." if numbers[8:] else "")
    one = len(numbers) == 1
    return f"trainer{'' if one else 's'} {names}" + (f" {'is' if one else 'are'}" if verb else "")


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
