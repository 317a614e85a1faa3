"""What a server tells of itself: who takes part, what is held; and what went when its tables
shrank.
"""

from __future__ import annotations

from pserver import wire_pb2 as wire
from pserver.errors import Unprepared
from pserver.job.installed_program import InstalledProgram
from pserver.job.membership import Membership


def trainer_reports(members: Membership, now: float) -> list[wire.TrainerStatus]:
    """A line for each trainer that has come, by number; with the job's lock held."""
    return [
        wire.TrainerStatus(
            trainer_id=member.trainer,
            state=member.state.value,
            step=max((mark.applied for mark in member.marks.values()), default=0),
            transport=member.transport,
            silence_seconds=now - member.heard,
            activity=member.waiting or member.activity,
        )
        for _, member in sorted(members.by_trainer.items())
    ]


def held_report(installed: InstalledProgram) -> wire.StatusReply:
    """The part of a status that is about what is installed."""
    tables = [
        wire.TableStatus(
            name=name, rows=len(held.rows), bytes_held=held.bytes_held, counters=held.counters()
        )
        for name, held in installed.tables.items()
    ]
    return wire.StatusReply(
        mode=installed.plan.mode,
        slices=len(installed.table.values),
        bytes_held=installed.table.bytes_held + sum(table.bytes_held for table in tables),
        version=installed.version,
        tables=tables,
    )


def shrink(installed: InstalledProgram, request: wire.ShrinkRequest) -> wire.ShrinkReply:
    """Days pass for the rows of the tables that are named, or of all.

    Raises:
        Unprepared: there is no such table.
    """
    unknown = set(request.tables) - set(installed.tables)
    if unknown:
        raise Unprepared(
            f"the plan has no table {min(unknown)!r}; it has "
            f"{', '.join(installed.tables) or 'none'}"
        )
    threshold = request.threshold if request.HasField("threshold") else None
    call = (request.session, request.number)
    with installed.gate.closed():
        asked = [(name, installed.tables[name]) for name in request.tables or installed.tables]
        removed = {name: held.shrink(request.days, threshold, call) for name, held in asked}
    return wire.ShrinkReply(removed=removed)
