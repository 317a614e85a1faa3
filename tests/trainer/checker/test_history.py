"""Exactly once: 50 stories under random faults, every mode under faults at named points, and
servers that do it wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from pserver.dense import slice_update
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import Unreachable
from pserver.job import installed_program, lane_executor, workers
from pserver.job.lane_executor import LaneExecutor
from pserver.job.locked_table import LockedTable
from pserver.job.membership import Member, Watermark
from pserver.job.sync_round import SyncRound
from pserver.table.gradient import RowGradient
from pserver.testing.rpc_faults import CALL_ACTIONS, CallPoint
from pserver.testing.stream_faults import ACTIONS, Point
from pserver.transport.sequenced import SequencedStream
from pserver.wire_pb2 import Frame, Kind
from tests.support.matrix import crossed
from trainer.checker.__main__ import table
from trainer.checker.scenario import MODES, TRANSPORTS, Scenario, of_seed
from trainer.checker.trial import play

SEEDS = 50


@pytest.mark.slow
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
        "Barrier",
    } <= kinds
    assert all(mode in table(verdicts) for mode in MODES)


@pytest.mark.slow
def test_large_steps_under_random_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws hold too where several threads update the slices, while others send those that are
    updated.
    """
    monkeypatch.setattr(lane_executor, "LARGE_BYTES", 0)
    monkeypatch.setattr(slice_update, "JOINT_BYTES", 1)
    monkeypatch.setattr(workers, "DIVIDED", 1.0)
    monkeypatch.setattr(installed_program, "Workers", lambda threads: workers.Workers(3))
    failed = [
        str(verdict)
        for verdict in map(play, map(of_seed, range(SEEDS, SEEDS + 20)))
        if verdict.failure
    ]
    assert not failed, failed[0]


def story(mode: str, transport: str = "inprocess") -> Scenario:
    """Of 8 steps, at least two messages of each trainer, and no overflow in the second."""
    seeds = (
        Scenario(seed, mode, transport, servers=1, trainers=2, steps=8, rate=0.0)
        for seed in range(100)
    )
    return next(scenario for scenario in seeds if all(step != 2 for _, step in scenario.overflows))


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


@pytest.mark.slow
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


@pytest.mark.slow
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

ROW_MODES = ("sync", "async", "half_async", "staleness", "geo")
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


@pytest.mark.slow
@crossed("faults", what=ROW_POINTS, mode=ROW_MODES, transport=TRANSPORTS)
def test_no_row_is_updated_twice_after(what: str, mode: str, transport: str) -> None:
    """Nor is its update lost, in any mode that tables have, over any transport."""
    verdict = play(story(mode, transport), [ROW_POINTS[what]])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


@pytest.mark.slow
@crossed("faults", what=LOOKUP_POINTS, transport=TRANSPORTS)
def test_rows_are_looked_up_again_after(what: str, transport: str) -> None:
    """A lookup changes nothing, and its answer is whole; in "mixed" that of tables in three
    lanes.
    """
    verdict = play(story("mixed", transport), [LOOKUP_POINTS[what]])

    assert not verdict.failure, verdict
    assert verdict.faults.total() == 1


# ---- control calls ----


@pytest.mark.slow
@crossed("faults", action=[action for action in CALL_ACTIONS if action != "slow"], mode=DIFFERENT)
def test_control_calls_may_get_lost_or_come_twice(action: str, mode: str) -> None:
    """Each trainer joins once, the first one installs once, everybody meets once at a barrier, and
    leaves once.
    """
    points = [
        CallPoint(action, call, occurrence)
        for call in ("Join", "Install", "Barrier", "Leave")
        for occurrence in (1, 2)
    ]
    verdict = play(story(mode), calls=points)

    assert not verdict.failure, verdict
    assert {(action, "call", call) for call in ("Join", "Install", "Barrier", "Leave")} <= set(
        verdict.faults
    )


# ---- servers that do it wrongly ----


class Nth:
    """Calls a method wrongly at its third call in this story, otherwise as it is."""

    def __init__(self, right: Callable[..., Any], wrong: Callable[..., Any], when: int = 3) -> None:
        self.right, self.wrong, self.when, self.calls = right, wrong, when, 0

    def method(self) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return (self.wrong if self.calls == self.when else self.right)(*arguments, **named)

        return call


def torn(update: Callable[..., Any]) -> Callable[..., Any]:
    """An update of the first half of a slice."""

    def half(own: SliceUpdate, gradient: torch.Tensor, *arguments: Any, **named: Any) -> None:
        before = own.value.clone()
        update(own, gradient, *arguments, **named)
        middle = before.numel() // 2
        own.value.view(-1)[middle:] = before.view(-1)[middle:]

    return half


def twice(update: Callable[..., Any]) -> Callable[..., Any]:
    def both(own: SliceUpdate, gradient: torch.Tensor, *arguments: Any, **named: Any) -> None:
        update(own, gradient.clone(), *arguments, **named)
        update(own, gradient, *arguments, **named)

    return both


WRONG: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "drops": lambda update: lambda *arguments, **named: None,
    "doubles": twice,
    "tears": torn,
}


def stories(mode: str) -> list[Scenario]:
    """Those of a mode among the first 50."""
    return [scenario for scenario in map(of_seed, range(SEEDS)) if scenario.mode == mode]


def caught(mode: str) -> bool:
    return any(play(scenario).failure for scenario in stories(mode))


MISTREATED = [
    (wrong, mode)
    for wrong in WRONG
    for mode in ("sync", "async, queue", "half_async", "geo", "diloco")
]
# twice towards one place, the mean of where trainers are, is that place
MISTREATED.remove(("doubles", "diloco"))


def in_a_round(wrong: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., None]:
    """A round that mistreats its first slice."""
    right = SyncRound.apply

    def apply(
        current: SyncRound,
        names: Iterable[str],
        entries: Mapping[str, SliceUpdate],
        scale: Mapping[str, float],
    ) -> None:
        first = next(iter(current.merged), None)
        gradient = None if first is None else current.merged.pop(first)
        right(current, names, entries, scale)
        if first is not None:
            own = entries[first]
            wrong(type(own).update)(own, gradient, current.hparams[own.group], scale)

    return apply


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "mode"), MISTREATED)
def test_a_server_that_mistreats_one_update_is_caught(
    wrong: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice's update, once, among the stories of the mode in the first 50."""
    rounds = mode in ("sync", "diloco")
    owner, method = (SyncRound, "apply") if rounds else (SliceUpdate, "update")
    right = getattr(owner, method)
    mutant = in_a_round(WRONG[wrong]) if rounds else WRONG[wrong](right)

    def fails(scenario: Scenario) -> bool:
        monkeypatch.setattr(owner, method, Nth(right, mutant).method())
        return bool(play(scenario).failure)

    assert any(fails(scenario) for scenario in stories(mode))


def drops_a_row(gradient: RowGradient) -> RowGradient:
    return RowGradient(gradient.ids[1:], gradient.rows[1:].contiguous())


def doubles_a_row(gradient: RowGradient) -> RowGradient:
    gradient.rows[0] *= 2.0
    return gradient


def tears_a_row(gradient: RowGradient) -> RowGradient:
    gradient.rows[0, gradient.rows.shape[1] // 2 :] = 0.0
    return gradient


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize(
    "wrong", [drops_a_row, doubles_a_row, tears_a_row], ids=lambda wrong: wrong.__name__
)
def test_a_server_that_mistreats_one_row_is_caught(
    wrong: Callable[[RowGradient], RowGradient], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row in one update of a table, without any fault of the network."""
    update, left = LockedTable.update, [2]

    def mistreats(held: LockedTable, gradient: RowGradient, *arguments: Any) -> None:
        left[0] -= bool(len(gradient.ids))
        if not left[0] and len(gradient.ids):
            gradient, left[0] = wrong(gradient.clone()), -1
        update(held, gradient, *arguments)

    monkeypatch.setattr(LockedTable, "update", mistreats)

    assert " row" in play(story(mode)).failure and left[0] < 0


@pytest.mark.parametrize("mode", ROW_MODES)
def test_a_server_whose_rows_go_back_is_caught(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that answers with what rows were some lookups before, though at the end every row is
    right.
    """
    lookup, seen = LockedTable.lookup, [0]

    def goes_back(held: LockedTable, ids: torch.Tensor) -> torch.Tensor:
        rows = lookup(held, ids)
        seen[0] += bool(rows.any())
        return torch.zeros_like(rows) if seen[0] == 6 else rows

    monkeypatch.setattr(LockedTable, "lookup", goes_back)

    assert "reads" in play(story(mode)).failure


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that comes again is taken again."""
    commit = LaneExecutor.commit

    def wrong(steps: LaneExecutor, member: Member, step: int, contribution: Any) -> Any:
        mark = member.watermark(steps.index)
        if step == mark.applied:
            mark.applied, mark.taking = step - 1, 0
        return commit(steps, member, step, contribution)

    monkeypatch.setattr(LaneExecutor, "commit", wrong)


def marks_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts as applied when it comes: with the connection that it came over, its update may
    be lost.
    """
    commit = LaneExecutor.commit

    def wrong(steps: LaneExecutor, member: Member, step: int, contribution: Any) -> Any:
        mark = member.watermark(steps.index)
        if mark.stream > 1 and step == mark.applied + 1:
            mark.taking = step
            mark.apply(1, False)
        return commit(steps, member, step, contribution)

    monkeypatch.setattr(LaneExecutor, "commit", wrong)


def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded staleness waits for nobody."""
    monkeypatch.setattr(LaneExecutor, "_slowest", lambda steps: 2**63)


def forgets_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step came to is not kept for its second asking."""
    apply = Watermark.apply
    monkeypatch.setattr(
        Watermark, "apply", lambda mark, committed, overflow: apply(mark, committed, False)
    )


def lets_repeats_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that come twice are acted on twice; what is missing is still noticed."""

    def wrong(numbered: SequencedStream) -> tuple[Frame, memoryview] | None:
        received = numbered._stream.receive()
        if received is not None:
            if received[0].sequence > numbered.received + 1:
                raise Unreachable("a gap")
            numbered.received = max(numbered.received, received[0].sequence)
        return received

    monkeypatch.setattr(SequencedStream, "receive", wrong)


def counts_versions_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round counts as two updates."""
    applied = LaneExecutor._applied

    def wrong(steps: LaneExecutor, current: Any) -> None:
        applied(steps, current)
        steps.version += 1

    monkeypatch.setattr(LaneExecutor, "_applied", wrong)


FORGETFUL = {  # where it shows, and what is forgotten
    forgets: "async",
    marks_early: "sync",
    answers_at_once: "staleness",
    forgets_overflows: "sync",
    lets_repeats_pass: "mixed",
    counts_versions_twice: "diloco",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutate", FORGETFUL, ids=lambda mutate: mutate.__name__)
def test_a_server_that_forgets_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exactly-once rests on, taken away, shows among the stories of one mode in the first
    50.
    """
    mutate(monkeypatch)

    assert caught(FORGETFUL[mutate])
