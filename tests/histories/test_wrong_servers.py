"""Servers that do it wrongly: what they lose, double, tear or forget shows in the histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pserver.dense.update import SliceUpdate, update_all
from pserver.errors import Unreachable
from pserver.lane import values
from pserver.lane.independent import IndependentSteps
from pserver.lane.lane import LaneExecutor
from pserver.lane.rounds import SyncRound
from pserver.lane.step import Hparams, Step
from pserver.lane.tables import LockedTable
from pserver.lane.together import JointSteps
from pserver.membership.members import Member
from pserver.membership.watermark import Watermark
from pserver.table.gradient import RowGradient
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import Frame
from tests.checker.scenario import Scenario, of_seed
from tests.checker.trial import play
from tests.support.stories import ROW_MODES, SEEDS, story
from tests.support.tiers import RARE

# ---- updates of slices ----


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


def in_a_step(wrong: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., None]:
    """An update of the slices of a step that mistreats its first one."""

    def update(
        updates: Mapping[str, SliceUpdate],
        gradients: Mapping[str, torch.Tensor],
        hparams: Hparams,
        **named: Any,
    ) -> None:
        first, *others = gradients
        update_all(updates, {name: gradients[name] for name in others}, hparams, **named)
        own = updates[first]
        wrong(type(own).update)(own, gradients[first], hparams[own.group])

    return update


@pytest.mark.parametrize(("wrong", "mode"), MISTREATED)
def test_a_server_that_mistreats_one_update_is_caught(
    wrong: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice's update, once, among the stories of the mode in the first 50."""
    rounds = mode in ("sync", "diloco")
    owner, method = (SyncRound, "apply") if rounds else (values, "update_all")
    right = getattr(owner, method)
    mutant = (in_a_round if rounds else in_a_step)(WRONG[wrong])

    def fails(scenario: Scenario) -> bool:
        monkeypatch.setattr(owner, method, Nth(right, mutant).method())
        return bool(play(scenario).failure)

    assert any(fails(scenario) for scenario in stories(mode))


# ---- rows of tables ----


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

    def mistreats(held: LockedTable, gradient: RowGradient, *arguments: Any, **named: Any) -> None:
        left[0] -= bool(len(gradient.ids))
        if not left[0] and len(gradient.ids):
            gradient, left[0] = wrong(gradient.clone()), -1
        update(held, gradient, *arguments, **named)

    monkeypatch.setattr(LockedTable, "update", mistreats)

    assert " row" in play(story(mode)).failure and left[0] < 0


@pytest.mark.parametrize("mode", ROW_MODES)
def test_a_server_whose_rows_go_back_is_caught(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that answers with what rows were some lookups before, though at the end every row is
    right.
    """
    lookup, seen = LockedTable.lookup, [0]

    def goes_back(
        held: LockedTable, ids: torch.Tensor, trainer: int, ahead: bool = False
    ) -> torch.Tensor:
        rows = lookup(held, ids, trainer, ahead)
        seen[0] += bool(rows.any())
        return torch.zeros_like(rows) if 8 <= seen[0] <= 12 else rows

    monkeypatch.setattr(LockedTable, "lookup", goes_back)

    asks = replace(story(mode), seed=5)  # in geo mode for every row, once in a window
    assert "reads" in play(asks).failure


# ---- what a server has to remember ----


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that comes again is taken again."""
    commit = LaneExecutor.commit

    def wrong(lane: LaneExecutor, member: Member, step: Step) -> Any:
        mark = member.watermark(lane.index)
        if step.number == mark.applied:
            mark.applied, mark.taking = step.number - 1, 0
        return commit(lane, member, step)

    monkeypatch.setattr(LaneExecutor, "commit", wrong)


def marks_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts as applied when it comes: with the connection that it came over, its update may
    be lost.
    """
    commit = LaneExecutor.commit

    def wrong(lane: LaneExecutor, member: Member, step: Step) -> Any:
        mark = member.watermark(lane.index)
        if mark.stream > 1 and step.number == mark.applied + 1:
            mark.taking = step.number
            mark.apply(1, False)
        return commit(lane, member, step)

    monkeypatch.setattr(LaneExecutor, "commit", wrong)


def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded staleness waits for nobody."""
    monkeypatch.setattr(IndependentSteps, "slowest", lambda steps: 2**63)


def forgets_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step came to is not kept for its second asking."""
    apply = Watermark.apply
    monkeypatch.setattr(
        Watermark,
        "apply",
        lambda mark, committed, overflow, *rest: apply(mark, committed, False, *rest),
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
    applied = JointSteps._applied

    def wrong(steps: JointSteps, current: Any) -> None:
        applied(steps, current)
        steps._state.version += 1

    monkeypatch.setattr(JointSteps, "_applied", wrong)


FORGETFUL = {  # where it shows, and what is forgotten
    forgets: "sync",
    marks_early: "sync",
    answers_at_once: "staleness",
    forgets_overflows: "sync",
    lets_repeats_pass: "mixed",
    counts_versions_twice: "diloco",
}


@pytest.mark.parametrize(
    "mutate",
    [each if each in (forgets, lets_repeats_pass) else RARE(each) for each in FORGETFUL],
    ids=lambda mutate: mutate.__name__,
)
def test_a_server_that_forgets_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exactly-once rests on, taken away, shows among the stories of one mode in the first
    50.
    """
    mutate(monkeypatch)

    assert caught(FORGETFUL[mutate])
