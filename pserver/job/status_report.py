"""What ``pserver status`` learns from a server: its trainers, and what it holds."""

from __future__ import annotations

from pserver import wire_pb2 as wire
from pserver.job.installed_program import InstalledProgram
from pserver.job.membership import Membership


def trainer_statuses(members: Membership, now: float) -> list[wire.TrainerStatus]:
    """One status for each trainer that has joined, by number.  The caller holds the job's lock.

    Args:
        now: in seconds of the job's clock.
    """
    return [
        wire.TrainerStatus(
            trainer_id=member.trainer,
            state=member.word,
            step=max((watermark.applied for watermark in member.watermarks.values()), default=0),
            transport=member.transport,
            silence_seconds=now - member.last_heard,
            activity=member.waiting or member.activity,
        )
        for _, member in sorted(members.by_trainer.items())
    ]


def program_status(installed: InstalledProgram) -> wire.StatusReply:
    """The part of a status that is about the installed program.  Tables take their own locks."""
    tables = [
        wire.TableStatus(
            name=name, rows=len(table.rows), bytes_held=table.bytes_held, counters=table.counters()
        )
        for name, table in installed.tables.items()
    ]
    return wire.StatusReply(
        mode=installed.plan.mode,
        slices=len(installed.slices.values),
        bytes_held=installed.slices.bytes_held + sum(table.bytes_held for table in tables),
        version=installed.version,
        tables=tables,
    )
