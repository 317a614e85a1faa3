"""The file that Chrome's and Perfetto's viewers read."""

from __future__ import annotations

import json

from pserver.telemetry.trace import Recording, Span, document
from tests.support.traces import check_format

AHEAD = 5_000_000_000  # ns that the server's clock is ahead of the trainer's


def recordings() -> list[Recording]:
    """A step of a trainer, and what its server does of it, by its own clock."""
    facts: dict[str, str | int | float] = {"lane": 0, "step": 7}
    mine, theirs = {**facts, "server": 0}, {**facts, "trainer": 0}
    trainer = [
        Span("step", 10.0, 10.9, "script", {}),
        Span("push", 10.1, 10.2, "to server 0, lane 0", mine),
        Span("wait", 10.2, 10.6, "to server 0, lane 0", mine),
        Span("pull", 10.6, 10.8, "to server 0, lane 0", mine),
    ]
    server = [
        Span("receive", 15.15, 15.25, "trainer 0, lane 0", theirs),
        Span("update", 15.3, 15.5, "update_0", {"lane": 0, "version": 7}),
        Span("answer", 15.5, 15.7, "trainer 0, lane 0", theirs),
        Span("receive", 16.5, 16.6, "trainer 0, lane 0", {**theirs, "step": 8}),
    ]
    return [
        Recording("trainer", 0, trainer, clock="own"),
        Recording("server", 0, server, 4, AHEAD, 250_000, "rounds", ["a note"]),
    ]


def test_all_processes_are_on_one_clock() -> None:
    """The server's moments are moved by its offset; the first span of all is at 0."""
    content = document(recordings(), {}, {"steps": 1})
    spans = {(event["name"], event["pid"]): event for event in check_format(content)}

    assert spans["step", 1]["ts"] == 0 and spans["step", 1]["dur"] == 900_000
    assert spans["receive", 1001]["ts"] == 150_000
    assert spans["update", 1001]["args"] == {"server": 0, "lane": 0, "version": 7}
    assert json.loads(json.dumps(content)) == content


def test_arrows_lead_from_a_push_to_its_server_and_back() -> None:
    """One from push to receive, one from answer to pull."""
    content = document(recordings(), {}, {})
    ends = [event for event in content["traceEvents"] if event["ph"] in "sf"]

    assert [(end["name"], end["ph"], end["pid"], end["ts"]) for end in ends] == [
        ("push", "s", 1, 100_000.0),
        ("push", "f", 1001, 150_000.0),
        ("answer", "s", 1001, 500_000.0),
        ("answer", "f", 1, 600_000.0),
    ]


def test_the_file_says_how_good_it_is() -> None:
    """The bound of the clocks, dropped spans, missing processes; and no span of a server behind the
    last one of the trainers.
    """
    about = document(recordings(), {"trainer 1": "it left no spans"}, {"steps": 1})["otherData"]

    assert about["clock_error_bound_us"] == 250.0 and about["steps"] == 1
    assert about["missing"] == {"trainer 1": "it left no spans"}
    assert about["processes"]["server 0"] == {
        "spans": 3,
        "dropped": 4,
        "clock_offset_us": 5_000_000.0,
        "clock_error_bound_us": 250.0,
        "clock": "rounds",
        "notes": ["a note"],
    }


def test_a_file_without_spans_is_one() -> None:
    """It is written before the trace, so that a path that cannot be written is told at once."""
    assert check_format(document([], {}, {})) == []
