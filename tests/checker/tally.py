"""What many trials have shown: one line a trial in a file, and a table of all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.faults import ACTIONS, CALL_ACTIONS

SEVERED = "severed"


@dataclass(frozen=True, slots=True)
class Played:
    """One trial.

    Attributes:
        seed: by which the command plays it again.
        world: which kind of trial it was.
        failure: "" if every law held.
        faults: by what happened to a frame or a call: how often.
        events: by what befell trainers and links: how often.
        features: of tables, rules and data that it had.
    """

    seed: int
    world: str
    mode: str
    transport: str
    failure: str = ""
    faults: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    features: Sequence[str] = ()


def actions(faults: Mapping[tuple[str, str, str], int]) -> dict[str, int]:
    """Counts by what happened, from those by (what, direction, kind): the words of calls, "call
    lost", and of frames, "drop", differ.
    """
    found: Counter[str] = Counter()
    for (action, direction, _), count in faults.items():
        found[f"call {action}" if direction == "call" else action] += count
    return dict(found)


def keep(path: Path, played: Played) -> None:
    """Adds a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(played)) + "\n")


def kept(path: Path) -> list[Played]:
    """All trials of a file, each seed once: as it was played last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({each["seed"]: Played(**each) for each in map(json.loads, lines)}.values())


def markdown(trials: Sequence[Played]) -> str:
    """The page of all of these."""
    failed = [each for each in trials if each.failure]
    faults, events = _sums(each.faults for each in trials), _sums(each.events for each in trials)
    frames, calls = [*ACTIONS, SEVERED], [f"call {action}" for action in CALL_ACTIONS]
    lines = [
        "# make check-history",
        "",
        f"{len(trials)} seeds, {len(failed)} with a violation.",
        "",
        *(f"Seed {each.seed}: {each.failure}" for each in failed),
        *([""] if failed else []),
        *_crossed(trials, "Seeds, by kind of trial and mode", [each.world for each in trials]),
        *_crossed(trials, "Seeds, by transport and mode", [each.transport for each in trials]),
        *_counts("What befell trainers and links", events),
        *_counts("Faults of frames", {name: faults.get(name, 0) for name in frames}),
        *_counts("Faults of control calls", {name: faults.get(name, 0) for name in calls}),
        *_counts("Seeds with", Counter(name for each in trials for name in each.features)),
    ]
    return "\n".join(lines)


def _sums(counted: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counted:
        total.update(each)
    return total


def _crossed(trials: Sequence[Played], title: str, labels: Sequence[str]) -> list[str]:
    modes = sorted({each.mode for each in trials})
    cells = Counter((label, each.mode) for label, each in zip(labels, trials, strict=True))
    return [
        f"## {title}",
        "",
        "| | " + " | ".join(modes) + " |",
        "| --- |" + " --- |" * len(modes),
        *(
            f"| {label} | " + " | ".join(str(cells[label, mode]) for mode in modes) + " |"
            for label in sorted(set(labels))
        ),
        "",
    ]


def _counts(title: str, counts: Mapping[str, int]) -> list[str]:
    return [
        f"## {title}",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {count} |" for name, count in sorted(counts.items())),
        "",
    ]
