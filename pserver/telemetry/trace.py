"""The recordings of all processes as one file, in the format of Chrome's trace viewer, which
Perfetto reads, too.

A process of the job is a process of the file, and a track a thread.  An arrow leads from each push
to what its server receives, and from the server's answer to what the trainer pulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from pserver.tracing.recording import Recording

FIRST_SERVER = 1001  # the pid of server 0; that of trainer 0 is 1
# an arrow's name, the span that it leaves, and the one that it reaches, which is on the other side
ARROWS = (("push", "push", "receive"), ("answer", "answer", "pull"))

Event = dict[str, Any]


def document(
    recordings: Sequence[Recording], missing: Mapping[str, str], facts: Mapping[str, object]
) -> dict[str, Any]:
    """The file's content, as JSON has it.

    Times are microseconds since the first span of all.

    Args:
        recordings: of the processes that told theirs.  What a server did after the last span of a
            trainer is left out.
        missing: the processes that did not, each with the reason.
        facts: what else the file says of itself, by name.
    """
    trainers = [each for each in recordings if each.kind == "trainer"]
    last = max((_at(each, span.ended) for each in trainers for span in each.spans), default=inf)
    kept = [_until(each, last) for each in recordings]
    origin = min((_at(each, span.began) for each in kept for span in each.spans), default=0.0)
    events = [event for each in kept for event in _of_process(each, origin)]
    complete = [event for event in events if event["ph"] == "X"]
    names = [event for event in events if event["ph"] == "M"]
    timed = sorted([*complete, *_arrows(complete)], key=lambda event: (event["ts"], _order(event)))
    return {
        "traceEvents": names + timed,
        "displayTimeUnit": "ms",
        "otherData": {
            **facts,
            "clock_error_bound_us": max((e.bound_ns for e in kept), default=0) / 1e3,
            "processes": {each.name: _about(each) for each in kept},
            "missing": dict(missing),
        },
    }


def _at(recording: Recording, seconds: float) -> float:
    """A moment of a process, by the clock of reference."""
    return seconds - recording.offset_ns / 1e9


def _until(recording: Recording, last: float) -> Recording:
    """A trainer's recording; of a server's what it has begun before this moment."""
    if recording.kind == "trainer":
        return recording
    spans = [span for span in recording.spans if _at(recording, span.began) <= last]
    return replace(recording, spans=spans)


def _about(recording: Recording) -> dict[str, object]:
    return {
        "spans": len(recording.spans),
        "dropped": recording.dropped,
        "clock_offset_us": recording.offset_ns / 1e3,
        "clock_error_bound_us": recording.bound_ns / 1e3,
        "clock": recording.clock,
        **({"notes": recording.notes} if recording.notes else {}),
    }


def pid_of(recording: Recording) -> int:
    """The number of a process in the file; trainers stand above servers."""
    return recording.number + (1 if recording.kind == "trainer" else FIRST_SERVER)


def _of_process(recording: Recording, origin: float) -> list[Event]:
    """The names of a process and of its tracks, and its spans."""
    pid = pid_of(recording)
    spans = recording.spans
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != "script", track))
    tids = {track: tid for tid, track in enumerate(tracks, 1)}
    names = [_name("process_name", pid, 0, recording.name)]
    names += [_name("thread_name", pid, tid, track) for track, tid in tids.items()]
    return names + [
        {
            "name": span.name,
            "cat": recording.kind,
            "ph": "X",
            "ts": _us(_at(recording, span.began) - origin),
            "dur": _us(span.ended - span.began),
            "pid": pid,
            "tid": tids[span.track],
            "args": {recording.kind: recording.number, **span.facts},
        }
        for span in spans
    ]


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return max(round(seconds * 1e6, 3), 0.0)


def _order(event: Event) -> tuple[int, float]:
    """Of events of one moment: the longer span first, and arrows behind spans."""
    return (0, -event["dur"]) if event["ph"] == "X" else (1, 0.0)


def _arrows(complete: Iterable[Event]) -> list[Event]:
    """For each arrow whose two spans are there, where it begins and where it ends."""
    found: dict[tuple[str, tuple[object, ...]], Event] = {}
    for event in complete:
        place = tuple(event["args"].get(name) for name in ("trainer", "server", "lane", "step"))
        if None not in place:
            found.setdefault((event["name"], place), event)
    arrows: list[Event] = []
    for name, leaves, reaches in ARROWS:
        for (span, key), event in found.items():
            other = found.get((reaches, key)) if span == leaves else None
            if other is not None:
                shared = {"name": name, "cat": "arrow", "id": f"{name} {key}"}
                arrows.append(shared | {"ph": "s"} | _place(event))
                arrows.append(shared | {"ph": "f", "bp": "e"} | _place(other))
    return arrows


def _place(event: Event) -> Event:
    return {key: event[key] for key in ("ts", "pid", "tid")}
