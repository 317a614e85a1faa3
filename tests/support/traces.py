"""What a trace's file must be, and its spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def check_format(content: dict[str, Any]) -> list[Event]:
    """Holds a file against Chrome's format; gives its spans."""
    events = content["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert event["ph"] in "MXsf" and event["ts"] >= 0 and event.get("dur", 0) >= 0
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    complete = [event for event in timed if event["ph"] == "X"]
    assert {(each["pid"], each["tid"]) for each in complete} == named
    arrows: dict[str, list[Event]] = {}
    for event in timed:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
            assert any(_within(event, span) for span in complete), event
    for ends in arrows.values():
        assert sorted(end["ph"] for end in ends) == ["f", "s"]
        assert ends[0]["pid"] != ends[1]["pid"]
    return complete


def _within(event: Event, span: Event) -> bool:
    """Whether a moment is in a span of the same track."""
    same = (event["pid"], event["tid"]) == (span["pid"], span["tid"])
    return same and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]


class Traced:
    """The spans of a file, by process.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.spans, self.about = check_format(content), content["otherData"]
        events = content["traceEvents"]
        self._names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}

    @property
    def bound(self) -> float:
        """In microseconds, of two processes against each other."""
        return 2 * float(self.about["clock_error_bound_us"])

    def of(self, process: str, name: str, **facts: object) -> list[Event]:
        """The spans of a process of that name, in order."""
        return [
            span
            for span in self.spans
            if (self._names[span["pid"]], span["name"]) == (process, name)
            and facts.items() <= span["args"].items()
        ]

    def names(self, process: str) -> set[str]:
        """The names of a process's spans."""
        return {span["name"] for span in self.spans if self._names[span["pid"]] == process}


def end(span: Event) -> float:
    """Of a span, in microseconds."""
    return float(span["ts"] + span["dur"])
