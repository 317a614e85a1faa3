"""Exactly once: 50 stories under random faults, and every mode under faults at named points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pserver.client.replies import Reply
from pserver.dense import update
from pserver.job import program
from pserver.lane import tasks
from pserver.service.tables import TableService
from pserver.wire_pb2 import Done, Kind
from tests.checker.scenario import MODES, TRANSPORTS, of_seed
from tests.checker.trial import play
from tests.faults.faults import ACTIONS, CALL_ACTIONS, CallPoint, Point
from tests.support.matrix import crossed
from tests.support.stories import LARGE, ROW_MODES, SEEDS, story
from trainer.senders.look_ahead import LookAhead

WITHIN = 100  # stories


def test_fifty_stories_under_random_faults() -> None:
    """Every law holds, and the stories have had every mode over every transport, and every fault in
    most modes.
    """
    verdicts = [play(of_seed(seed)) for seed in range(SEEDS)]

    failed = [str(verdict) for verdict in verdicts if verdict.failure]
    assert not failed, failed[0]
    assert {(verdict.scenario.mode, verdict.scenario.transport) for verdict in verdicts} == {
        (m, c) for m in MODES for c in TRANSPORTS
    }
    assert {action for verdict in verdicts for action, _, _ in verdict.faults} == {
        *ACTIONS,
        *CALL_ACTIONS,
    }
    kinds = {kind for verdict in verdicts for _, _, kind in verdict.faults}
    assert {
        "LOOKUP",
        "ROWS",
        "GRADIENT",
        "COMMIT",
        "VALUE",
        "DONE",
        "HELLO",
        "Join",
        "Leave",
        "Meet",
    } <= kinds


@pytest.mark.long
def test_large_steps_under_random_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws hold too where several threads update the slices, while others send those that are
    updated.
    """
    monkeypatch.setattr(tasks, "LARGE_BYTES", 0)
    monkeypatch.setattr(update, "JOINT_BYTES", 1)
    monkeypatch.setattr(tasks, "DIVIDED", 1.0)
    monkeypatch.setattr(program, "Workers", lambda threads: tasks.Workers(3))
    failed = [
        str(verdict)
        for verdict in map(play, map(of_seed, range(SEEDS, SEEDS + LARGE)))
        if verdict.failure
    ]
    assert not failed, failed[0]


# ---- faults at named points ----


# Each at the second message of trainer 0, which all modes have.
POINTS = {
    "a lost reply": Point("drop", "in", Kind.DONE, step=2, trainer=0),
    "a reply lost with its connection": Point("reset", "in", Kind.DONE, step=2, trainer=0),
    "a lost commit, retried": Point("drop", "out", Kind.COMMIT, step=2, trainer=0),
    "a commit lost with its connection": Point("reset", "out", Kind.COMMIT, step=2, trainer=0),
    "a gradient lost with its connection": Point("reset", "out", Kind.GRADIENT, step=2, trainer=0),
    "a step that comes late over the old connection": Point(
        "late", "out", Kind.COMMIT, step=2, trainer=0
    ),
    "a reply while the old connection lingers": Point("late", "in", Kind.DONE, step=2, trainer=0),
    "a duplicated commit": Point("duplicate", "out", Kind.COMMIT, step=2, trainer=0),
    "a duplicated gradient": Point("duplicate", "out", Kind.GRADIENT, step=2, trainer=0),
    "a commit before its gradient": Point("reorder", "out", Kind.GRADIENT, step=2, trainer=0),
    "values after their end": Point("reorder", "in", Kind.VALUE, step=2, trainer=0),
    "a delayed step": Point("delay", "out", Kind.COMMIT, step=2, trainer=0),
}


# those two retry as "async" does
DIFFERENT = [mode for mode in MODES if mode not in ("async, queue", "async, receiver")]


@crossed("faults", what=POINTS, mode=DIFFERENT, transport=TRANSPORTS)
def test_no_step_is_applied_twice_after(what: str, mode: str, transport: str) -> None:
    """Nor lost, in any mode, over any transport."""
    verdict = play(story(mode, transport), [POINTS[what]])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


OTHERS = {
    "HELLO": ("sync", Point("drop", "out", Kind.HELLO, trainer=1)),
    "HELLO, with its connection": ("sync", Point("reset", "out", Kind.HELLO, trainer=1)),
    "a value of the upload": ("async", Point("drop", "out", Kind.VALUE)),
    "the end of the upload": ("async", Point("drop", "out", Kind.COMMIT, step=0)),
    "the answer to the upload": ("async", Point("drop", "in", Kind.DONE, step=0)),
    "a request for values": ("async, receiver", Point("drop", "out", Kind.PULL, occurrence=3)),
    "norms": ("sync, clipped", Point("drop", "in", Kind.NORMS, step=2, trainer=0)),
    "norms, with their connection": (
        "sync, clipped",
        Point("reset", "in", Kind.NORMS, step=2, trainer=0),
    ),
    "the coefficient": ("sync, clipped", Point("drop", "out", Kind.SCALE, step=2, trainer=0)),
    "the coefficient, with its connection": (
        "sync, clipped",
        Point("reset", "out", Kind.SCALE, step=2, trainer=0),
    ),
    "the goodbye": ("sync", Point("drop", "out", Kind.BYE, trainer=0)),
}


@crossed("faults", what=OTHERS, transport=TRANSPORTS)
def test_nothing_is_lost_with(what: str, transport: str) -> None:
    """Everything else that a stream carries is asked again too."""
    mode, point = OTHERS[what]
    verdict = play(story(mode, transport), [point])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


def test_a_probe_that_is_lost_is_followed_by_another() -> None:
    """A lost commit, and the first probe behind it too."""
    verdict = play(
        story("sync"),
        [POINTS["a lost commit, retried"], Point("drop", "out", Kind.PROBE, trainer=0)],
    )

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 2


# ---- what tables add ----


ROW_POINTS = {
    "rows lost with their connection": Point("reset", "out", Kind.ROWS, trainer=0),
    "rows that are lost": Point("drop", "out", Kind.ROWS, trainer=0),
    "rows that come twice": Point("duplicate", "out", Kind.ROWS, trainer=0),
    "rows after their commit": Point("reorder", "out", Kind.ROWS, trainer=0),
    "rows that come late over the old connection": Point("late", "out", Kind.ROWS, trainer=0),
}


LOOKUP_POINTS = {
    "ids that are lost": Point("drop", "out", Kind.LOOKUP, trainer=0, occurrence=2),
    "ids after the end of the request": Point(
        "reorder", "out", Kind.LOOKUP, trainer=0, occurrence=2
    ),
    "ids that come late over the old connection": Point(
        "late", "out", Kind.LOOKUP, trainer=0, occurrence=2
    ),
    "a request for rows that is lost": Point(
        "drop", "out", Kind.PULL, trainer=0, tables=True, occurrence=2
    ),
    "rows that are not received": Point(
        "drop", "in", Kind.VALUE, trainer=0, tables=True, occurrence=2
    ),
    "rows received after their end": Point(
        "reorder", "in", Kind.VALUE, trainer=0, tables=True, occurrence=2
    ),
    "the end of the rows": Point("reset", "in", Kind.DONE, trainer=0, tables=True, occurrence=2),
    "the stream of the tables": Point("reset", "out", Kind.HELLO, trainer=1, tables=True),
}


@crossed("faults", what=ROW_POINTS, mode=ROW_MODES, transport=TRANSPORTS)
def test_no_row_is_updated_twice_after(what: str, mode: str, transport: str) -> None:
    """Nor is its update lost, in any mode that tables have, over any transport."""
    verdict = play(story(mode, transport), [ROW_POINTS[what]])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


@crossed("faults", what=LOOKUP_POINTS, transport=TRANSPORTS)
def test_rows_are_looked_up_again_after(what: str, transport: str) -> None:
    """A lookup changes nothing, and its answer is whole; in "mixed" that of tables in three
    lanes.
    """
    verdict = play(story("mixed", transport), [LOOKUP_POINTS[what]])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


# ---- control calls ----


@crossed("faults", action=[action for action in CALL_ACTIONS if action != "slow"], mode=DIFFERENT)
def test_control_calls_may_get_lost_or_come_twice(action: str, mode: str) -> None:
    """Each trainer joins once, the first one installs once, everybody meets once at a barrier, and
    leaves once.
    """
    points = [
        CallPoint(action, call, occurrence)
        for call in ("Join", "Install", "Meet", "Leave")
        for occurrence in (1, 2)
    ]
    verdict = play(story(mode), calls=points)

    assert not verdict.failure, verdict
    assert {(action, "call", call) for call in ("Join", "Install", "Meet", "Leave")} <= set(
        verdict.faults
    )


# ---- rows that are looked up ahead ----


def stale(patch: pytest.MonkeyPatch) -> None:
    """Rows are read as they were looked up."""
    patch.setattr(LookAhead, "_bring_up", lambda *_: None)
    patch.setattr(LookAhead, "closed", lambda *_: None)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """A refresh that comes before its step is answered at once."""
    patch.setattr(TableService, "_are_applied", lambda *_: True)


def taken_for_known(patch: pytest.MonkeyPatch) -> None:
    """A lookup that the server does not know counts as one of which nothing has changed."""
    right = Reply.from_message.__func__  # type: ignore[attr-defined]

    def known(cls: type[Reply], done: Done) -> Reply:
        return replace(right(cls, done), unknown_lookup=False)

    patch.setattr(Reply, "from_message", classmethod(known))


@pytest.mark.parametrize("remove", [stale, too_early, taken_for_known])
def test_rows_ahead_without_a_rule_show(
    remove: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer reads rows without the step before, in one of a few stories."""
    for seed in range(WITHIN):
        with monkeypatch.context() as patch:
            remove(patch)
            verdict = play(of_seed(seed, "sync, look-ahead"))
        if verdict.failure:
            assert "reads" in str(verdict)
            return
    pytest.fail(f"every law held in {WITHIN} stories")
