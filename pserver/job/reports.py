"""Heartbeats: what a server keeps of what a trainer says of itself, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable

from pserver import wire_pb2 as wire
from pserver.errors import PServerError
from pserver.job.membership import Membership
from pserver.job.wait_table import Wait
from pserver.limits import Limits
from pserver.tracing.spans import clock_ns

ACTIVITY_LENGTH = 200  # characters of what a trainer says that it does
VALUES = 64  # numbers of a script
LANES = 256


def kept(request: wire.HeartbeatRequest, limits: Limits) -> tuple[str, wire.TrainerReport]:
    """A heartbeat's activity and report, cut to what is kept: the first 64 values by name, each
    name to the bytes that a name may have.
    """
    said = request.report
    report = wire.TrainerReport(
        samples=said.samples,
        values={
            _cut(name, limits.name_bytes): said.values[name]
            for name in sorted(said.values)[:VALUES]
        },
        memory_bytes=said.memory_bytes,
        lanes=said.lanes[:LANES],
        bytes_in=said.bytes_in,
        bytes_out=said.bytes_out,
        reconnects=said.reconnects,
        saves=said.saves,
        since_save_seconds=said.since_save_seconds,
        passes=said.passes,
        batch=said.batch,
        batches=said.batches,
    )
    return request.activity[:ACTIVITY_LENGTH], report


def reply(
    failure: PServerError | None,
    members: Membership,
    position_asked: int = 0,
    waits: Iterable[Wait] = (),
) -> wire.HeartbeatReply:
    """What a trainer is told of the job.

    Args:
        failure: what has ended it.
        members: its trainers.
        position_asked: the number of a question that this trainer is to answer.
        waits: of this trainer, those that have lasted for a while.
    """
    told = wire.HeartbeatReply(
        clock_ns=clock_ns(),
        roll=roll(members),
        position_asked=position_asked,
        waits=wait_statuses(waits, members.waits.now),
    )
    if failure is not None:
        told.failure, told.error = str(failure), type(failure).__name__
    return told


def roll(members: Membership) -> wire.Roll:
    """Which trainers are there.  The caller holds the job's lock."""
    return wire.Roll(
        changes=members.changes,
        absent=members.absent,
        preempted=dict(members.preempted),
        first=members.first,
    )


def wait_statuses(waits: Iterable[Wait], now: float) -> list[wire.WaitStatus]:
    """Waits, as they travel.

    Args:
        now: by the table's clock.
    """
    return [
        wire.WaitStatus(
            trainer_id=wait.trainer,
            kind=wait.kind.value,
            what=wait.what,
            number=wait.number,
            seconds=max(0.0, now - wait.since),
            for_whom=sorted(wait.for_whom),
        )
        for wait in waits
    ]


def _cut(name: str, most: int) -> str:
    return name.encode()[:most].decode(errors="ignore")
