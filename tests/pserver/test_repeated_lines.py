"""Lines of the log that strangers can bring about."""

from __future__ import annotations

import logging

import pytest

from pserver.telemetry.logs import LINES, MOST_SAID, SECONDS, WIDTH, LimitedLog, RecentLines


def test_a_few_lines_a_minute_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    """The first of the next minute says how many were not logged."""
    now = [0.0]
    log = LimitedLog(logging.getLogger("test"), lambda: now[0])
    for number in range(1000):
        log.log("one", f"one {number}")
        log.log("other", "other")
    now[0] = SECONDS + 1
    log.log("one", "one again")

    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if text == "other"] == ["other"] * LINES
    assert [text for text in said if text != "other"] == [
        *(f"one {number}" for number in range(LINES)),
        f"one again ({1000 - LINES} more like this one before)",
    ]


def test_a_line_is_one_line_and_not_long(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a peer has sent."""
    LimitedLog(logging.getLogger("test")).log("kind", "a\nERROR forged\r" + "x" * 10_000)

    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("a ERROR forged xxx") and "\n" not in text
    assert len(text) < WIDTH + 10


def test_what_was_said_just_now_is_said_again_a_minute_later() -> None:
    """And at once where too much else was said meanwhile: no more is kept than that."""
    now = [0.0]
    said = RecentLines(lambda: now[0])

    assert [said.is_new("one") for _ in range(3)] == [True, False, False]
    now[0] = SECONDS
    assert said.is_new("other") and not said.is_new("one")
    now[0] = SECONDS + 1
    assert said.is_new("one") and not said.is_new("other")
    for number in range(MOST_SAID):
        assert said.is_new(number)
    assert said.is_new("one")
