"""The spans of a process: how many are kept, and how they travel."""

from __future__ import annotations

import json
import threading

import pytest

from pserver.telemetry import trace as room
from pserver.telemetry.trace import Recording, Span, Spans, parts_of, whole


def test_a_recording_travels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided, joined and read it is the same."""
    monkeypatch.setattr(room, "PART_BYTES", 100)
    facts: dict[str, str | int | float] = {"lane": 1, "variables": "w, b"}
    spans = [Span("push", n / 3, n / 3 + 1, "to server 0, lane 1", facts) for n in range(5)]
    sent = Recording("trainer", 3, spans, 2, -7, 9, "rounds", ["a note"])
    parts = parts_of(sent.to_bytes())

    assert len(parts) > 5 and max(map(len, parts)) == 100
    assert Recording.from_bytes(whole(parts)) == sent


def test_a_recording_that_is_too_long_loses_its_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits its parts, and says how many it lost."""
    monkeypatch.setattr(room, "PART_BYTES", 100)
    spans = [Span("push", float(n), n + 1.0, "script", {"step": n}) for n in range(100)]
    sent = Recording("trainer", 1, list(spans))
    kept = Recording.from_bytes(sent.to_bytes())

    assert len(sent.to_bytes()) <= 100 * room.MOST_PARTS
    assert 20 < len(kept.spans) < 100 and kept.dropped == 100 - len(kept.spans)
    assert kept.spans == spans[: len(kept.spans)]


GOOD = json.loads(Recording("server", 0, [Span("update", 0.0, 1.0, "update_0", {})]).to_bytes())


@pytest.mark.parametrize(
    "told",
    [
        [],
        {**GOOD, "kind": "stranger"},
        {**GOOD, "number": "0"},
        {**GOOD, "notes": [1]},
        {**GOOD, "spans": [["update", "0", 1.0, "t", {}]]},
        {**GOOD, "spans": [["update", 0.0, 1.0, "t"]]},
        {name: value for name, value in GOOD.items() if name != "clock"},
    ],
    ids=str,
)
def test_what_is_no_recording_is_refused(told: object) -> None:
    """Whatever another process sends, trainer 0 writes a file."""
    with pytest.raises(ValueError, match=r"expected|got"):
        Recording.from_bytes(json.dumps(told).encode())
    with pytest.raises(ValueError):
        Recording.from_bytes(b"\xff")


def test_spans_are_bounded_and_named_by_their_threads() -> None:
    """What is beyond the limit is counted; a thread that has a name of its own gives it."""
    spans = Spans(most=3)
    spans.begin()
    spans.add("forward", 1.0, 2.0, model=0)

    def serve() -> None:
        with spans.thread("trainer 1, lane 0"):
            spans.add("receive", 1.0, 2.0)
        spans.add("update", 1.0, 2.0)
        spans.add("update", 2.0, 3.0)

    thread = threading.Thread(target=serve, name="update_0")
    thread.start()
    thread.join()
    kept, dropped = spans.drain()

    assert dropped == 1
    assert [span.track for span in kept] == ["script", "trainer 1, lane 0", "update_0"]
    spans.begin()
    assert spans.drain() == ([], 0)
