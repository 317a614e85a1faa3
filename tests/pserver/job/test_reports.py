"""What a server keeps of what trainers say of themselves, and of what happens."""

from __future__ import annotations

import logging
import math

import pytest

from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.job import Job
from pserver.limits import Limits
from pserver.membership.lifecycle import KEPT, EventLog, Events
from pserver.membership.members import VALUES, bounded_report
from pserver.transport import inprocess
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of

Served = tuple[Job, inprocess.InprocessListener]


def said(**more: object) -> wire.HeartbeatRequest:
    """A heartbeat with a report."""
    return wire.HeartbeatRequest(activity="step 2", report=wire.TrainerReport(**more))  # type: ignore[arg-type]


def test_a_report_is_kept_within_limits() -> None:
    """The first 64 values by name, with names of as many bytes as a name may have; and the first
    16 settings, of 1,000 characters.
    """
    values = {f"{number:03}{chr(228) * 9}": float(number) for number in range(100)}
    activity, report = bounded_report(
        said(samples=7, values=values, bytes_in=3), Limits(name_bytes=6)
    )

    assert (activity, report.samples, report.bytes_in) == ("step 2", 7, 3)
    # the byte behind the first letter is half of the next one
    assert dict(report.values) == {f"{number:03}{chr(228)}": number for number in range(VALUES)}

    settings = {f"{number:02}": "x" * 2000 for number in range(20)}
    _, report = bounded_report(said(settings=settings), Limits())
    assert dict(report.settings) == {f"{number:02}": "x" * 1000 for number in range(16)}


def test_a_status_hands_reports_on(served: Served) -> None:
    """As the trainer has said it last, a value that is not finite too; a stranger's is refused."""
    job, listener = served
    trainer = Trainer(job, listener, plan_of(), 0)
    lanes = [wire.LaneReport(steps=2, step_seconds=0.5, blocked_seconds=0.25)]
    request = said(samples=64, values={"loss": math.nan}, memory_bytes=5, lanes=lanes)
    request.session = trainer.session
    job.heartbeat(request)
    (found,) = job.status(wire.StatusRequest()).trainers

    assert (found.report.samples, found.report.memory_bytes) == (64, 5)
    assert math.isnan(found.report.values["loss"]) and list(found.report.lanes) == lanes
    with pytest.raises(Refused, match="not known here"):
        job.heartbeat(said(samples=1))
    assert job.status(wire.StatusRequest()).trainers[0].report.samples == 64


def test_wrong_lines_that_trainers_tell_are_added_up(served: Served) -> None:
    """A repeated report counts once."""
    job, listener = served
    trainer = Trainer(job, listener, plan_of(), 0)
    for told in (3, 3, 5, 5):
        request = said(wrong_lines=told)
        request.session = trainer.session
        job.heartbeat(request)
    (found,) = job.status(wire.StatusRequest()).trainers
    assert dict(found.counts) == {"wrong_lines": 5}


def test_a_status_tells_what_has_happened(served: Served, clock: Clock) -> None:
    """Who has joined, and who was lost; after the end, too."""
    job, listener = served
    Trainer(job, listener, plan_of(), 0)
    reply = job.status(wire.StatusRequest())
    assert reply.trainers_expected >= 1 and reply.memory_bytes > 2**20 and reply.time > 1e9
    assert reply.lanes[0].mode == "sync"

    clock.time += 2 * DEADLINE
    job.tick()
    kinds = [event.kind for event in job.status(wire.StatusRequest()).events]
    assert kinds[0] == "joined" and kinds[-2:] == ["lost", "failed"]


def test_many_events_of_one_kind_leave_the_others() -> None:
    """The last ones of each kind are kept, in order, and the log has its lines as before."""
    now = [10.0]
    events = Events(lambda: now[0])
    log = EventLog(logging.getLogger("test"), events)
    log.log("joined 3", "trainer 3 joined", logging.INFO)
    now[0] = 20.0
    for number in range(2 * KEPT):
        log.log("refused", f"refused: {number}", logging.INFO)
    found = events.all()

    assert [(event.number, event.time, event.kind) for event in found[:2]] == [
        (1, 10.0, "joined"),
        (2 + KEPT, 20.0, "refused"),
    ]
    assert [event.text for event in found[1:]] == [
        f"refused: {number}" for number in range(KEPT, 2 * KEPT)
    ]
