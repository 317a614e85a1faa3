"""Servers and trainers that break one promise of the job's log: each shows in some history."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch

from pserver.client.client import Client
from pserver.client.stream import RetryingStream
from pserver.dense.slices import SliceStore
from pserver.errors import Refused
from pserver.job import reload
from pserver.job_log.coordinator import Coordinator
from pserver.lane.lane import StagedSteps
from pserver.lane.leases import JobLeases
from pserver.lane.tables import LockedTable
from pserver.leases.table import EpochRange
from pserver.membership.decisions import Decisions, LoggedCalls, process_of
from pserver.membership.members import Member, Membership
from pserver.table.gradient import RowGradient
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Kind
from tests.checker import world_trial
from tests.checker.world_trial import play_world
from tests.checker.worlds import world_of
from tests.support.tiers import RARE

WITHIN = 500  # seeds
GIVEN_UP_SECONDS = 8.0  # a job that stands still is caught, too


def on_one_server(patch: pytest.MonkeyPatch) -> None:
    """A step is decided when one server has it."""
    patch.setattr(Coordinator, "_everywhere", lambda *arguments: True)


def lease_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """Samples count as consumed when a commit comes, and not when its step is decided."""
    right, decided = JobLeases.check, JobLeases.decided

    def check(
        leases: JobLeases, trainer: int, incarnation: str, ranges: Iterable[EpochRange]
    ) -> None:
        listed = list(ranges)
        try:
            right(leases, trainer, incarnation, listed)
        except Refused:  # it comes again
            return
        decided(leases, trainer, incarnation, listed)

    patch.setattr(JobLeases, "check", check)
    patch.setattr(JobLeases, "decided", lambda *arguments: None)


def calls_without_numbers(patch: pytest.MonkeyPatch) -> None:
    """A call that comes again is a call more."""
    right = LoggedCalls.carry_out

    def carry_out(
        calls: LoggedCalls, member: Member, kind: str, number: int, run: Callable[[int], Any]
    ) -> Any:
        last = calls._calls.get((process_of(member), kind))
        if last is not None and last.done and last.call.number == number:
            return run(last.record)
        return right(calls, member, kind, number, run)

    patch.setattr(LoggedCalls, "carry_out", carry_out)


def saves_as_they_are_asked(patch: pytest.MonkeyPatch) -> None:
    """Every server fixes its own moment of a save."""
    right = LoggedCalls.carry_out

    def carry_out(
        calls: LoggedCalls, member: Member, kind: str, number: int, run: Callable[[int], Any]
    ) -> Any:
        if kind != "save":
            return right(calls, member, kind, number, run)
        decisions = cast(Decisions, calls._ready.__self__)  # type: ignore[attr-defined]
        return run(decisions.last + 1)

    patch.setattr(LoggedCalls, "carry_out", carry_out)


def zombies_accepted(patch: pytest.MonkeyPatch) -> None:
    """What a process sends that was lost counts as before."""
    fence, staged = Membership.fence, Coordinator.staged

    def fences_nobody(members: Membership, *arguments: Any) -> Member | None:
        found = fence(members, *arguments)
        if found is not None:
            found.fenced = ""
        return found

    def takes_all(coordinator: Coordinator, *arguments: Any) -> Any:
        lost, coordinator.lost = coordinator.lost, set()
        try:
            return staged(coordinator, *arguments)
        finally:
            coordinator.lost = lost

    patch.setattr(Membership, "fence", fences_nobody)
    patch.setattr(Coordinator, "staged", takes_all)


def joiners_at_0(patch: pytest.MonkeyPatch) -> None:
    """Another process begins with its first step, however far the others are."""
    patch.setattr(Decisions, "begins_at", lambda own, members: (0,) * len(own._rounds))


def computed_again(patch: pytest.MonkeyPatch) -> None:
    """What is sent again is not what was sent: a gradient comes out a bit different."""
    take = RetryingStream._take

    def again(stream: RetryingStream, opened: Stream) -> bool:
        for place, (header, payload) in enumerate(stream._request):
            if header.kind == Kind.GRADIENT and payload:
                other = bytearray(b"".join(payload))
                other[0] ^= 1
                stream._request[place] = header, [other]
        return take(stream, opened)

    patch.setattr(RetryingStream, "_take", again)


def in_its_own_order(patch: pytest.MonkeyPatch) -> None:
    """A server applies what is decided as its threads come."""

    def any_turn(steps: StagedSteps, staged: Any) -> None:
        steps.wait_until(staged.member, lambda: staged.turn >= 0, staged)

    patch.setattr(StagedSteps, "wait_for_turn", any_turn)


def by_its_own_clock(patch: pytest.MonkeyPatch) -> None:
    """A server reads its clock, and not the record, for how long rows live."""
    right = LockedTable.update

    def update(
        table: LockedTable,
        gradient: RowGradient,
        hparams: Any,
        scale: Any,
        now: float | None = None,
        before: Any = None,
    ) -> None:
        right(table, gradient, hparams, scale, None, before)

    patch.setattr(LockedTable, "update", update)


def numbers_from_1(patch: pytest.MonkeyPatch) -> None:
    """A trainer's call has the number of the one before."""
    right = Client.shrink

    def shrink(client: Client, *arguments: Any) -> dict[str, int]:
        client._shrinks = 0
        return right(client, *arguments)

    patch.setattr(Client, "shrink", shrink)


def nothing_missed(patch: pytest.MonkeyPatch) -> None:
    """A server that follows again is not told of the records that it has missed."""
    patch.setattr(Coordinator, "since", lambda coordinator, last: [])


def leases_are_not_written(patch: pytest.MonkeyPatch) -> None:
    """Who takes server 0's place does not know who has which samples."""
    patch.setattr(JobLeases, "_wrote", lambda *arguments: None)


def nothing_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A server that has come back counts nothing as lost."""
    patch.setattr(reload, "losses", lambda standing, saved: {})


def lost_steps_once_more(patch: pytest.MonkeyPatch) -> None:
    """Server 0 that comes back does not know the last record that it has written: a step is decided
    once more, or another one has its number.
    """
    right, held = Coordinator.restore_entry, weakref.WeakKeyDictionary[Coordinator, Any]()

    def take(coordinator: Coordinator, kind: str, *what: Any) -> None:
        if kind == "record":
            what, held[coordinator] = held.get(coordinator, ()), what
        if what:
            right(coordinator, kind, *what)

    patch.setattr(Coordinator, "restore_entry", take)


def begins_anew(patch: pytest.MonkeyPatch) -> None:
    """A server that comes back has the states of no optimizer, though its values are right."""
    right = SliceStore.load

    def load(slices: SliceStore, tensors: dict[str, torch.Tensor]) -> None:
        right(slices, {name: each for name, each in tensors.items() if name in slices.values})

    patch.setattr(SliceStore, "load", load)


def shows(seed: int) -> bool:
    """Whether a world breaks a law; a trial that does not end may be one of a busy machine."""
    failure = play_world(world_of(seed)).failure
    return bool(failure) and "did not end" not in failure


# each with a seed of a world that shows it
WRONG: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    on_one_server: 0,
    lease_before_the_step: 1,
    calls_without_numbers: 130,
    saves_as_they_are_asked: 186,
    zombies_accepted: 6,
    joiners_at_0: 4,
    computed_again: 7,
    in_its_own_order: 1,
    by_its_own_clock: 0,
    numbers_from_1: 0,
    nothing_missed: 15,
    leases_are_not_written: 1,
    nothing_is_lost: 1,
    lost_steps_once_more: 10,
    begins_anew: 1,
}


LATE = (in_its_own_order, nothing_missed)  # seconds until they show


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "wrong",
    [RARE(each) if each in LATE else each for each in WRONG],
    ids=lambda wrong: wrong.__name__,
)
def test_a_broken_promise_shows(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the world that has shown it before, or in another one of the first 500."""
    torch.manual_seed(0)
    wrong(monkeypatch)
    monkeypatch.setattr(world_trial, "TIMEOUT_SECONDS", GIVEN_UP_SECONDS)

    assert any(shows(seed) for seed in (WRONG[wrong], *range(WITHIN)))
