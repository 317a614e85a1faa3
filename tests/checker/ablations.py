"""The rules of exactly-once, of fencing, leases, cuts and waits, each with a job without it.

::

    @without(LEASES, "what a lost trainer had leased is dealt out again", 5)
    def lost_samples_stay_away(patch: pytest.MonkeyPatch) -> None:
        ...

An ablation patches what holds the rule, and leaves all else.  Where two parts of the product hold
one rule, it takes both away.  ``tests/histories/test_ablations.py`` looks for a world that shows
the lack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from pserver.client.client import Client
from pserver.client.stream import RetryingStream
from pserver.dense.slices import SliceCopies, SliceStore
from pserver.errors import Refused, TrainerLost
from pserver.job import reload
from pserver.job.job import Job
from pserver.job.program import InstalledProgram
from pserver.job.rings import Rings
from pserver.job.server_cut import ServerCut
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.link import LinkEnd, Messages
from pserver.job_log.own_state import OwnState
from pserver.job_log.records import Lost, Process
from pserver.job_log_pb2 import OwnEntry
from pserver.lane import leases as job_leases
from pserver.lane.independent import IndependentSteps
from pserver.lane.lane import LaneExecutor
from pserver.lane.leases import JobLeases
from pserver.lane.rounds import Clipping
from pserver.lane.step import Step, StepState
from pserver.lane.tables import LockedTable
from pserver.lane.tasks import UpdateTask
from pserver.lane.together import AppliedRounds, JointSteps
from pserver.leases.epoch import EpochLeases, Intervals, Lease
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable
from pserver.membership.decisions import Decisions, LoggedCalls, Quiesce, process_of
from pserver.membership.members import Member, Membership
from pserver.membership.waits import WaitEvent, Waits
from pserver.membership.watermark import Watermark
from pserver.service.tensors import TensorService
from pserver.table.gradient import RowGradient
from pserver.table.snapshots import SlotCut
from pserver.transport.stream import SequencedStream, Stream
from pserver.wire_pb2 import Kind

ONCE, LOG, FENCES, LEASES, CUTS, WAITS = AREAS = range(6)
Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Ablation:
    """A rule, and how a job is made that has it not.

    Attributes:
        area: one of ``AREAS``.
        remove: takes the rule away, while the patch lasts.
        seeds: of worlds that have shown it.
        stands: the job does nothing wrong without it, and does not go on either.
        held_by: why a job of the checker does without it: what else keeps what the rule keeps, or
            why it is not needed there; "": it is.
    """

    area: int
    remove: Callable[[Patch], None]
    seeds: tuple[int, ...]
    stands: bool = False
    held_by: str = ""


ABLATIONS: dict[str, Ablation] = {}  # by rule


def without(
    area: int, rule: str, *seeds: int, stands: bool = False, held_by: str = ""
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enters the decorated function as the ablation of a rule."""

    def enter(remove: Callable[[Patch], None]) -> Callable[[Patch], None]:
        ABLATIONS[rule] = Ablation(area, remove, seeds, stands, held_by)
        return remove

    return enter


# ---- exactly once ----


@without(ONCE, "a step that was applied is only answered", 8, 7)
def forgets(patch: Patch) -> None:
    """A step that comes again counts again."""
    right = LaneExecutor.commit

    def commit(lane: LaneExecutor, member: Member, step: Step) -> Any:
        mark = member.watermark(lane.index)
        if step.number == mark.applied:
            mark.applied, mark.taking = step.number - 1, 0
        return right(lane, member, step)

    patch.setattr(LaneExecutor, "commit", commit)


@without(ONCE, "a step under way is answered when it is applied", 7)
def answered_before_it_is_applied(patch: Patch) -> None:
    """One that comes again is answered at once."""
    right = LaneExecutor.commit

    def commit(lane: LaneExecutor, member: Member, step: Step) -> Any:
        if step.number == member.watermark(lane.index).taking == member.step(lane.index) + 1:
            return UpdateTask()
        return right(lane, member, step)

    patch.setattr(LaneExecutor, "commit", commit)


@without(
    ONCE,
    "a step under way is not taken again",
    held_by="seldom seen, as a job that stands still: once in 41 worlds",
)
def taken_again(patch: Patch) -> None:
    """One that comes again is staged again."""
    right = Watermark.begin

    def begin(mark: Watermark, step: int, rows: int) -> bool:
        right(mark, step, rows)
        return False

    patch.setattr(Watermark, "begin", begin)


@without(
    ONCE,
    "a step out of order is refused",
    *(2, 3, 7, 8),
    held_by="a trainer sends one step at a time, and a gap breaks its stream",
)
def any_order(patch: Patch) -> None:
    """A step is taken though the one before it has not come."""
    right = LaneExecutor.commit

    def commit(lane: LaneExecutor, member: Member, step: Step) -> Any:
        mark = member.watermark(lane.index)
        mark.applied = max(mark.applied, step.number - 1)
        return right(lane, member, step)

    patch.setattr(LaneExecutor, "commit", commit)


@without(ONCE, "what is sent again is what was sent", 7)
def computed_again(patch: Patch) -> None:
    """A gradient comes out a bit different."""
    take = RetryingStream._take

    def again(stream: RetryingStream, opened: Stream) -> bool:
        for place, (header, payload) in enumerate(stream._request):
            if header.kind == Kind.GRADIENT and payload:
                other = bytearray(b"".join(payload))
                other[0] ^= 1
                stream._request[place] = header, [other]
        return take(stream, opened)

    patch.setattr(RetryingStream, "_take", again)


@without(ONCE, "a frame that comes twice is dropped", 2)
def repeats_pass(patch: Patch) -> None:
    """It is acted on twice; what is missing is still noticed."""

    def receive(numbered: SequencedStream, land: Any = None) -> Any:
        received = numbered._stream.receive()
        if received is not None:
            numbered.received = max(numbered.received, received[0].sequence - 1)
        return received

    patch.setattr(SequencedStream, "receive", receive)


@without(ONCE, "a missing frame breaks the stream", 2)
def gaps_pass(patch: Patch) -> None:
    """A missing frame goes unnoticed; one that comes twice is still dropped."""

    def receive(numbered: SequencedStream, land: Any = None) -> Any:
        while (received := numbered._stream.receive()) is not None:
            number = received[0].sequence
            if not 0 < number <= numbered.received:
                numbered.received = number or numbered.received
                return received
        return None

    patch.setattr(SequencedStream, "receive", receive)


@without(
    ONCE,
    "an upload counts once",
    held_by="not seen in 17 worlds: a trainer steps seldom while a lost answer is asked for again",
)
def uploads_count_again(patch: Patch) -> None:
    """Values that come again are loaded again, though trainers have stepped since."""
    right = Watermark.upload

    @contextmanager
    def upload(mark: Watermark, condition: Any, check: Any, request: int, last: bool) -> Any:
        mark.uploaded = 0
        with right(mark, condition, check, request, last) as new:
            yield new

    patch.setattr(Watermark, "upload", upload)


@without(ONCE, "a Join that comes again is the same trainer's", 12)
def joins_again(patch: Patch) -> None:
    """It is another process's."""
    right = Job._member_of

    def member_of(job: Job, request: Any) -> Member | None:
        known = job._members.by_trainer.get(request.trainer_id)
        if known is not None and known.incarnation == request.incarnation:
            del job._members.by_trainer[request.trainer_id]
        return right(job, request)

    patch.setattr(Job, "_member_of", member_of)


@without(ONCE, "a call that comes again is the same", 130)
def calls_without_numbers(patch: Patch) -> None:
    """It is a call more."""
    right = LoggedCalls.carry_out

    def carry_out(
        calls: LoggedCalls, member: Member, kind: str, number: int, run: Callable[[int], Any]
    ) -> Any:
        last = calls._calls.get((process_of(member), kind))
        if last is not None and last.done and last.call.number == number:
            return run(last.record)
        return right(calls, member, kind, number, run)

    patch.setattr(LoggedCalls, "carry_out", carry_out)


@without(ONCE, "a trainer numbers its calls", 0)
def numbers_from_1(patch: Patch) -> None:
    """A call has the number of the one before."""
    right = Client.shrink

    def shrink(client: Client, *arguments: Any) -> dict[str, int]:
        client._shrinks = 0
        return right(client, *arguments)

    patch.setattr(Client, "shrink", shrink)


@without(ONCE, "a watermark is of one start of a process", 4, 76)
def watermarks_of_the_number(patch: Patch) -> None:
    """A process has the one of the process before it."""
    right = Membership.add

    def add(members: Membership, member: Member, steps: Any = (), late: bool = False) -> None:
        before = members.by_trainer.get(member.trainer)
        right(members, member, steps, late)
        for lane, mark in {} if before is None else before.watermarks.items():
            member.watermark(lane).applied = max(member.watermark(lane).applied, mark.applied)

    patch.setattr(Membership, "add", add)


@without(ONCE, "a save's watermarks are loaded with it", 2)
def watermarks_forgotten(patch: Patch) -> None:
    """A job that goes on from a save takes its steps again."""
    patch.setattr(Membership, "load_watermarks", lambda *arguments: None)


@without(ONCE, "a save's watermarks count for the process that they were saved for", 1)
def watermarks_for_anybody(patch: Patch) -> None:
    """They count for whoever has its number."""
    right = Membership._restore

    def restore(members: Membership, member: Member) -> None:
        saved = members._loaded.get(str(member.trainer))
        if saved is not None:
            saved["incarnation"] = member.incarnation
        right(members, member)

    patch.setattr(Membership, "_restore", restore)


@without(ONCE, "messages between servers count once", 5)
def messages_count_again(patch: Patch) -> None:
    """A message that a link sends again on another stream is taken again."""

    def receive(own: Messages, first: int, messages: Sequence[bytes]) -> Sequence[bytes]:
        own.heard = max(own.heard, first + len(messages) - 1)
        own._heard_bytes += sum(map(len, messages))
        return messages

    patch.setattr(Messages, "receive", receive)


@without(ONCE, "messages between servers that were not heard are sent again", 2, 1, stands=True)
def unheard_messages_are_lost(patch: Patch) -> None:
    """The messages under way over a broken stream are gone; others get their numbers."""

    def begin_again(own: Messages) -> None:
        own._flying.clear()
        own._flying_bytes = 0

    patch.setattr(Messages, "begin_again", begin_again)


# ---- the job's log ----


@without(LOG, "a step is decided when all servers have it", 1)
def on_one_server(patch: Patch) -> None:
    """It is decided when one has it."""
    patch.setattr(Coordinator, "_everywhere", lambda *arguments: True)


@without(LOG, "servers apply steps in the order of the log", 1, 2)
def in_its_own_order(patch: Patch) -> None:
    """A server applies what is decided as its threads come."""

    def any_turn(steps: IndependentSteps, member: Member, step: Step) -> None:
        def check() -> None:
            if step.state is StepState.DROPPED:
                raise TrainerLost(member.fenced)
            steps._job.check_running()

        assert step.event is not None
        steps._job.waits.wait(step.event, lambda: step.turn >= 0, check=check)

    def decide(steps: IndependentSteps, *record: Any) -> Any:
        waiting = list(steps._staged.values())
        found = right(steps, *record)
        for step in waiting:
            assert step.event is not None
            step.event.notify()
        return found

    def begin(steps: IndependentSteps) -> None:
        steps._begun += 1

    right = IndependentSteps.decide
    patch.setattr(IndependentSteps, "_wait_for_turn", any_turn)
    patch.setattr(IndependentSteps, "decide", decide)
    patch.setattr(IndependentSteps, "_begin", begin)


@without(LOG, "a step's time is its record's", 0)
def by_its_own_clock(patch: Patch) -> None:
    """A server reads its clock, and not the record, for how long rows live."""
    right = LockedTable.update

    def update(
        table: LockedTable,
        gradient: RowGradient,
        hparams: Any,
        scale: Any,
        now: float | None = None,
        *others: Any,
    ) -> None:
        right(table, gradient, hparams, scale, None, *others)

    patch.setattr(LockedTable, "update", update)


@without(LOG, "a round has the steps of all that are awaited", 0)
def rounds_of_some(patch: Patch) -> None:
    """A step that needs all trainers is decided with those that have come."""
    right = Coordinator.complete

    def complete(coordinator: Coordinator, lane: int, now: float) -> Any:
        awaited, coordinator._awaited = coordinator._awaited, lambda lane: []
        try:
            return right(coordinator, lane, now)
        finally:
            coordinator._awaited = awaited

    patch.setattr(Coordinator, "complete", complete)


@without(LOG, "a late process begins where the others are", 4)
def joiners_at_0(patch: Patch) -> None:
    """It begins with its first step, however far the others are."""
    patch.setattr(Decisions, "begins_at", lambda own, members: (0,) * len(own._rounds))


@without(
    LOG,
    "a late process gets the values of the step at which it begins",
    held_by="not seen in 19 worlds: joining may take longer than the round that is under way",
)
def values_between_rounds(patch: Patch) -> None:
    """It gets them while a round is under way."""
    patch.setattr(InstalledProgram, "between_rounds", True)


@without(LOG, "a place is kept for a process that is to come", 0, 88, 196)
def no_place_is_kept(patch: Patch) -> None:
    """Rounds go on without a process that was let in and has not arrived."""
    patch.setattr(Membership, "awaited_together", lambda members, lane: members.awaited(lane))


@without(LOG, "a server that follows again is told what it has missed", 26)
def nothing_missed(patch: Patch) -> None:
    """It is not told."""
    patch.setattr(Coordinator, "since", lambda coordinator, last: [])


@without(LOG, "a server that follows again tells what it has staged", 33, stands=True)
def staged_is_not_told_again(patch: Patch) -> None:
    """A coordinator that comes back does not hear of it."""
    right = Decisions._follows_again

    def follows_again(decisions: Decisions, error: Any) -> bool:
        lanes, decisions.lanes = decisions.lanes, ()
        try:
            return right(decisions, error)
        finally:
            decisions.lanes = lanes

    patch.setattr(Decisions, "_follows_again", follows_again)


@without(
    LOG,
    "what a lost server had staged does not count",
    held_by="not seen in 18 worlds: the loss may be noticed only when the server is back",
)
def lost_server_has_staged(patch: Patch) -> None:
    """A step is decided though the server that comes back has it not."""
    patch.setattr(Coordinator, "server_lost", lambda *arguments: None)


@without(LOG, "a coordinator that comes back knows the last record", 10)
def lost_steps_once_more(patch: Patch) -> None:
    """A step is decided once more, or another one has its number."""
    right, held = Coordinator.apply, weakref.WeakKeyDictionary[Coordinator, Any]()

    def apply(coordinator: Coordinator, entry: OwnEntry) -> None:
        found: OwnEntry | None = entry
        if entry.HasField("record"):
            found, held[coordinator] = held.get(coordinator), entry
        if found is not None:
            right(coordinator, found)

    patch.setattr(Coordinator, "apply", apply)


@without(LOG, "a server that has come back counts what it has lost", 1)
def nothing_is_lost(patch: Patch) -> None:
    """It counts nothing."""
    patch.setattr(reload, "losses", lambda standing, saved: {})


@without(LOG, "a server that comes back has the optimizers' states", 1)
def begins_anew(patch: Patch) -> None:
    """It has none, though its values are right."""
    right = SliceStore.load

    def load(slices: SliceStore, tensors: dict[str, torch.Tensor]) -> None:
        right(slices, {name: each for name, each in tensors.items() if name in slices.values})

    patch.setattr(SliceStore, "load", load)


# ---- fences ----


@without(FENCES, "what a lost process sends does not count", 2, 6)
def zombies_accepted(patch: Patch) -> None:
    """It counts as before."""
    fence, staged = Membership.fence, Coordinator.staged

    def fences_nobody(members: Membership, *arguments: Any) -> Member | None:
        found = fence(members, *arguments)
        if found is not None:
            found.fenced = ""
        return found

    def takes_all(coordinator: Coordinator, *arguments: Any) -> Any:
        lost, coordinator.lost = coordinator.lost, {}
        try:
            return staged(coordinator, *arguments)
        finally:
            coordinator.lost = lost

    patch.setattr(Membership, "fence", fences_nobody)
    patch.setattr(Coordinator, "staged", takes_all)


@without(FENCES, "what a lost process had staged is dropped from the log", 136, stands=True)
def staged_by_the_lost_is_decided(patch: Patch) -> None:
    """The coordinator keeps it, and decides it when the last server has it."""

    def lose(coordinator: Coordinator, process: Process, text: str, now: float) -> Any:
        return (
            [] if process in coordinator.lost else [coordinator._append(Lost(process, text), now)]
        )

    patch.setattr(Coordinator, "lose", lose)


@without(FENCES, "what a lost process had staged is dropped on servers", 10, 9, stands=True)
def staged_by_the_lost_stays(patch: Patch) -> None:
    """A server keeps it."""
    patch.setattr(LaneExecutor, "drop", lambda *arguments: None)


@without(FENCES, "a lost process does not join again", 2)
def the_lost_join_again(patch: Patch) -> None:
    """It joins as one that is new."""
    right = Job._member_of

    def member_of(job: Job, request: Any) -> Member | None:
        fenced, job._members.fenced = job._members.fenced, set()
        decisions = None if job.program is None else job.program.decisions
        coordinator = None if decisions is None else decisions.coordinator
        lost: dict[Process, str] = {}
        if coordinator is not None:
            lost, coordinator.lost = coordinator.lost, {}
        if decisions is not None:
            own = Process(request.trainer_id, request.incarnation)
            if own in fenced and coordinator is not None:
                decisions.joined.pop(own, None)
        try:
            return right(job, request)
        finally:
            job._members.fenced = fenced
            if coordinator is not None:
                coordinator.lost = lost

    patch.setattr(Job, "_member_of", member_of)


@without(
    FENCES,
    "the later stream counts",
    *(2, 3, 7, 8),
    held_by="the watermark knows what the earlier one brings, and each has buffers of its own",
)
def earlier_streams_count(patch: Patch) -> None:
    """The earlier one goes on beside it."""

    def begin(service: TensorService) -> None:
        with service._job.condition:
            service._watermark.stream = max(service._watermark.stream, service._number)
            service._working.works(service._stream)

    patch.setattr(TensorService, "_begin", begin)
    patch.setattr(TensorService, "_check_place", lambda service: None)


@without(
    FENCES,
    "the later stream between servers counts",
    *(2, 3, 7, 8),
    held_by="messages are numbered over all streams, and handed out by one thread at a time",
)
def earlier_links_count(patch: Patch) -> None:
    """Messages of an earlier one are taken, too."""
    right = LinkEnd._take

    def take(end: LinkEnd, stream: Any, header: Any) -> Any:
        with end._changed:
            present, end._stream = end._stream, stream
            try:
                return right(end, stream, header)
            finally:
                end._stream = present

    patch.setattr(LinkEnd, "_take", take)


# ---- leases ----


@without(
    LEASES,
    "a step's samples are leased to its trainer",
    *(1, 4, 6),
    held_by="a right trainer names no others, and a lost one is fenced",
)
def any_samples(patch: Patch) -> None:
    """They are any."""
    patch.setattr(JobLeases, "check", lambda *arguments: None)


@without(LEASES, "samples count when their step is decided", 1)
def lease_before_the_step(patch: Patch) -> None:
    """They count when its commit comes."""
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


@without(LEASES, "a request that comes again gets the same samples", 8, stands=True)
def another_request(patch: Patch) -> None:
    """It is another request."""
    right = LeaseTable.lease

    def lease(table: LeaseTable, trainer: int, incarnation: str, asked: LeaseAsked) -> Lease:
        number, _ = table._answered.get(trainer, (0, Lease()))
        if number and asked.number == number:
            table._answered[trainer] = number - 1, Lease()
        return right(table, trainer, incarnation, asked)

    patch.setattr(LeaseTable, "lease", lease)


@without(LEASES, "what a lost trainer had leased is dealt out again", 1)
def lost_samples_stay_away(patch: Patch) -> None:
    """They go to no trainer."""

    def take_back(epoch: EpochLeases, trainer: int) -> None:
        epoch._idle.pop(trainer, None)
        epoch.quit.discard(trainer)
        epoch._leased.pop(trainer, None)

    patch.setattr(EpochLeases, "take_back", take_back)


@without(
    LEASES,
    "what is decided is not dealt out again",
    held_by="not seen in 15 worlds: the step may be applied before the loss is known",
)
def decided_samples_come_back(patch: Patch) -> None:
    """A lost trainer's leases go back while its last step is being applied."""
    patch.setattr(job_leases, "_is_applied", lambda member: False)


@without(LEASES, "an epoch is over when nobody holds any of it", 25)
def ends_while_some_are_held(patch: Patch) -> None:
    """It is over when nothing is left to deal."""
    patch.setattr(EpochLeases, "waits_for", lambda *arguments: set())


@without(LEASES, "a late process gives up what the others have taken without it", 46, stands=True)
def nothing_is_given_up(patch: Patch) -> None:
    """It has all of its stripe."""
    patch.setattr(EpochLeases, "rejoin", lambda *arguments: None)


@without(LEASES, "a process is let in when the others do not divide its samples", 374, stands=True)
def let_in_at_once(patch: Patch) -> None:
    """It is let in at any time."""
    patch.setattr(LeaseTable, "admits", lambda *arguments: True)


@without(LEASES, "what is left of a stripe is divided among the others", 12)
def stripes_are_not_divided(patch: Patch) -> None:
    """It goes to no trainer."""

    def divide(epoch: EpochLeases, trainers: list[int]) -> None:
        for trainer in [each for each in epoch._own if each not in trainers]:
            epoch._own[trainer] = Intervals()

    patch.setattr(EpochLeases, "_divide", divide)


@without(LEASES, "leases are written before a trainer has them", 1)
def leases_are_not_written(patch: Patch) -> None:
    """A process in server 0's place does not know who has which samples."""
    nothing = property(lambda leases: None, lambda leases, write: None)
    patch.setattr(JobLeases, "write", nothing, raising=False)


@without(LEASES, "a coordinator that comes back counts the samples of its records", 12, stands=True)
def records_without_samples(patch: Patch) -> None:
    """Those of a record whose step it had not applied are dealt out again."""
    right = OwnState.follow

    def follow(state: OwnState, entry: OwnEntry) -> None:
        if entry.WhichOneof("what") != "record" and state._unheard:
            right(state, entry)

    patch.setattr(OwnState, "follow", follow)


# ---- cuts ----


@without(CUTS, "a save is of one record on every server", 186)
def saves_as_they_are_asked(patch: Patch) -> None:
    """Every server fixes its own moment."""
    right = LoggedCalls.carry_out

    def carry_out(
        calls: LoggedCalls, member: Member, kind: str, number: int, run: Callable[[int], Any]
    ) -> Any:
        if kind != "save":
            return right(calls, member, kind, number, run)
        decisions = cast(Decisions, calls._ready.__self__)  # type: ignore[attr-defined]
        return run(decisions.last + 1)

    patch.setattr(LoggedCalls, "carry_out", carry_out)


@without(
    CUTS,
    "steps wait while a cut is made",
    *(1, 2, 10),
    held_by="a save is a call of the log: the steps before it are applied, those behind it wait",
)
def no_pause_at_a_cut(patch: Patch) -> None:
    """They go on."""
    patch.setattr(Quiesce, "paused", lambda quiesce: nullcontext())


@without(CUTS, "steps behind a call wait for it", 10, 1)
def steps_pass_a_call(patch: Patch) -> None:
    """They do not."""
    right = Quiesce._is_held

    def is_held(quiesce: Quiesce, record: int) -> bool:
        return right(quiesce, 0)

    patch.setattr(Quiesce, "_is_held", is_held)


@without(CUTS, "a call waits for the steps before it", 1, 135)
def calls_pass_steps(patch: Patch) -> None:
    """It does not."""
    patch.setattr(LaneExecutor, "has_applied", lambda *arguments: True)


@without(CUTS, "rows that change are copied for a cut first", 17)
def rows_of_a_cut_change(patch: Patch) -> None:
    """A cut reads what they have become."""
    patch.setattr(SlotCut, "changing", lambda *arguments: None)


@without(
    CUTS,
    "rows that come are none of a cut",
    *(17, 41),
    held_by="slots that are free are noted when a cut begins, unless there are very many",
)
def rows_come_into_a_cut(patch: Patch) -> None:
    """A cut reads them, too."""
    patch.setattr(SlotCut, "coming", lambda *arguments: None)


@without(CUTS, "slices are copied for a cut", 1)
def slices_of_a_cut_change(patch: Patch) -> None:
    """They are written as they are later."""

    def copy(own: SliceCopies) -> None:
        own.copies = dict(own._store.tensors())

    patch.setattr(SliceCopies, "copy", copy)


@without(CUTS, "watermarks are of the moment of the cut", 1)
def watermarks_of_later(patch: Patch) -> None:
    """They are those of when the save is written."""
    right = ServerCut.write

    def write(cut: ServerCut, writer: Any) -> None:
        right(cut, writer)
        cut.meta["watermarks"] = cut._members.watermarks()

    patch.setattr(ServerCut, "write", write)


@without(CUTS, "leases are of the moment of the cut", 1)
def leases_of_later(patch: Patch) -> None:
    """They are those of when the save is written."""
    right = ServerCut.write

    def write(cut: ServerCut, writer: Any) -> None:
        right(cut, writer)
        cut.meta["leases"] = cut._installed.leases.plain()

    patch.setattr(ServerCut, "write", write)


# ---- waits ----


class MutedEvent(WaitEvent):
    """An event that notifies nobody; what wakes all wakes those that stand here, too."""

    def notify(self, most: int = 0) -> None:
        """Does nothing."""


def _wakes_all(waits: Waits) -> None:
    for event in list(waits._stood_at):
        WaitEvent.notify(event)


def muted(patch: Patch, owner: Any, name: str) -> None:
    """An event notifies none of its waiters."""
    right = owner.__init__

    def made(own: Any, *arguments: Any, **named: Any) -> None:
        right(own, *arguments, **named)
        setattr(own, name, MutedEvent(getattr(own, name)._lock))

    patch.setattr(owner, "__init__", made)
    patch.setattr(Waits, "wake_all", _wakes_all)


@without(WAITS, "a step is told that its turn has come", 1)
def turns_are_not_told(patch: Patch) -> None:
    """A thread that waits for its turn stands for ever."""
    patch.setattr(IndependentSteps, "_tell_next", lambda steps: None)


@without(WAITS, "a round is told that it has its record, and that it is applied", 0)
def rounds_are_not_told(patch: Patch) -> None:
    """Threads that wait in a round stand for ever."""
    muted(patch, JointSteps, "moved")


@without(WAITS, "a step is told that the slowest trainer has come nearer", 4)
def the_slowest_is_not_told(patch: Patch) -> None:
    """A thread that waits for the slowest trainer stands for ever."""
    muted(patch, IndependentSteps, "_nearer")


@without(WAITS, "a call is told that the steps before it are applied", 0)
def calls_are_not_told(patch: Patch) -> None:
    """A thread that waits for its call's turn stands for ever."""
    muted(patch, Quiesce, "rested")


@without(
    WAITS,
    "steps are told that a pause or a call is over",
    held_by="not seen in 18 worlds: few steps come during a call, and any later join wakes them",
)
def steps_are_not_let_go(patch: Patch) -> None:
    """A step that was held stands for ever."""
    muted(patch, Quiesce, "_goes_on")


@without(WAITS, "an update tells its threads that it is done", 0)
def updates_are_not_told(patch: Patch) -> None:
    """A thread that waits for another one's update stands for ever."""
    patch.setattr(UpdateTask, "_tell", lambda *arguments: None)
    patch.setattr(UpdateTask, "_tell_all", lambda *arguments: None)
    patch.setattr(UpdateTask, "_tell_one", lambda *arguments: None)


@without(WAITS, "a loss, a join and an end wake every wait", 140)
def nobody_is_woken(patch: Patch) -> None:
    """A wait that a loss concerns goes on."""
    patch.setattr(Waits, "wake_all", lambda waits: None)


@without(WAITS, "nobody waits for a lost trainer", 12, stands=True)
def the_lost_are_awaited(patch: Patch) -> None:
    """Steps of all wait for it, too."""
    right = Membership.awaited

    def awaited(members: Membership, lane: int | None = None) -> list[int]:
        lost = {t for t, m in members.by_trainer.items() if m.fenced and not m.finished}
        return sorted({*right(members, lane), *lost})

    patch.setattr(Membership, "awaited", awaited)


@without(WAITS, "a trainer waits for the slowest one", 4)
def staleness_has_no_bound(patch: Patch) -> None:
    """It waits for nobody."""
    patch.setattr(IndependentSteps, "slowest", lambda steps: 2**63)


@without(
    WAITS,
    "a save that trainers wait for in a ring is put off",
    held_by="not seen in 16 worlds: no save of 160 worlds was put off",
)
def rings_stand(patch: Patch) -> None:
    """Rings of waits go unnoticed."""
    patch.setattr(Rings, "tick", lambda *arguments: None)


@without(WAITS, "a trainer that waits for an answer probes", 3, stands=True)
def nobody_probes(patch: Patch) -> None:
    """A lost last frame goes unnoticed."""

    def next_frame(stream: RetryingStream) -> Any:
        return stream._outgoing.get()

    patch.setattr(RetryingStream, "_next", next_frame)


@without(WAITS, "a request is sent again on another stream", 2, stands=True)
def nothing_is_sent_again(patch: Patch) -> None:
    """Another stream begins with nothing."""
    right = RetryingStream._take

    def take(stream: RetryingStream, opened: Stream) -> bool:
        request, stream._request = stream._request, []
        try:
            return right(stream, opened)
        finally:
            stream._request = request

    patch.setattr(RetryingStream, "_take", take)


@without(
    WAITS,
    "norms are sent again with the step that they clip",
    held_by="not seen in 14 worlds, all of the 500 that clip by norms and lose frames",
)
def norms_are_not_sent_again(patch: Patch) -> None:
    """A trainer that has lost its answer gets no norms."""
    right = AppliedRounds.again

    def again(rounds: AppliedRounds, member: Member, number: int) -> UpdateTask | Clipping:
        found = right(rounds, member, number)
        return UpdateTask() if isinstance(found, Clipping) else found

    patch.setattr(AppliedRounds, "again", again)
