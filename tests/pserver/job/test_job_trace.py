"""A server's part in a trace: what it notes, and what it holds for trainer 0."""

from __future__ import annotations

from typing import Any

import pytest

from pserver.errors import Refused
from pserver.job import job_trace
from pserver.job.job_trace import JobTrace
from pserver.telemetry.trace import MOST_PARTS, PART_BYTES, Recording
from pserver.wire_pb2 import TraceAction, TraceReply, TraceRequest


def ask(trace: JobTrace, action: int, caller: int = 0, run: str = "r", **more: Any) -> TraceReply:
    request = TraceRequest(**{"action": action, "number": 1, **more})
    return trace.answer(caller, 2, run, request)


def test_the_first_trainer_begins_and_trainer_0_ends() -> None:
    """A later begin of the same trace forgets nothing, and each part may be read again."""
    trace = JobTrace()
    ask(trace, TraceAction.TRACE_BEGIN, 1)
    trace.spans.add("update", 1.0, 2.0, "update_0")
    ask(trace, TraceAction.TRACE_BEGIN, 0)
    with pytest.raises(Refused, match="trainer 0 ends"):
        ask(trace, TraceAction.TRACE_END, 1)
    first, again = ask(trace, TraceAction.TRACE_END), ask(trace, TraceAction.TRACE_END)

    assert first.part == again.part and first.parts == 1 and not trace.spans.on
    assert Recording.from_bytes(first.part).name == "server 2"
    assert [span.name for span in Recording.from_bytes(first.part).spans] == ["update"]
    with pytest.raises(Refused, match="expected a part below 1"):
        ask(trace, TraceAction.TRACE_END, index=1)


def test_spans_are_there_when_all_parts_are() -> None:
    """In any order, and twice; the clock is told with every answer."""
    trace = JobTrace()
    ask(trace, TraceAction.TRACE_BEGIN, 1)
    for index in (1, 1, 0):
        assert ask(trace, TraceAction.TRACE_READ, trainer=1).parts == 0
        part = b"first" if index == 0 else b"second"
        reply = ask(trace, TraceAction.TRACE_LEAVE, 1, index=index, parts=2, part=part)
        assert reply.clock_ns > 0
    read = [ask(trace, TraceAction.TRACE_READ, trainer=1, index=index) for index in (0, 1)]

    assert [(reply.parts, reply.part) for reply in read] == [(2, b"first"), (2, b"second")]


def test_what_is_too_much_or_of_another_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, in all and for a part; what was left of an earlier trace is gone."""
    trace = JobTrace()
    for bad in (
        {"parts": 0},
        {"parts": MOST_PARTS + 1},
        {"parts": 1, "index": 1},
        {"parts": 1, "part": bytes(PART_BYTES + 1)},
        {"parts": 1, "number": 2},
    ):
        ask(trace, TraceAction.TRACE_BEGIN)
        with pytest.raises(Refused):
            ask(trace, TraceAction.TRACE_LEAVE, 1, **bad)
    monkeypatch.setattr(job_trace, "MOST_LEFT", 10)
    ask(trace, TraceAction.TRACE_LEAVE, 1, parts=2, part=b"123456")
    with pytest.raises(Refused, match="behind 6"):
        ask(trace, TraceAction.TRACE_LEAVE, 1, index=1, parts=2, part=b"123456")
    ask(trace, TraceAction.TRACE_BEGIN, number=2)
    ask(trace, TraceAction.TRACE_LEAVE, 1, number=2, parts=1, part=b"123456")
    assert ask(trace, TraceAction.TRACE_READ, number=1, trainer=1).parts == 0
    assert ask(trace, TraceAction.TRACE_READ, number=2, trainer=1).parts == 1
    with pytest.raises(Refused, match="known action"):
        ask(trace, 99)


def test_another_run_of_the_job_counts_its_traces_anew() -> None:
    """Its first trace begins, although an earlier run had as many."""
    trace = JobTrace()
    ask(trace, TraceAction.TRACE_BEGIN, run="one")
    ask(trace, TraceAction.TRACE_END, run="one")
    ask(trace, TraceAction.TRACE_BEGIN, run="two")

    assert trace.spans.on
    trace.forget()
    assert not trace.spans.on
