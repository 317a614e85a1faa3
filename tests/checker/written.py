"""What server 0 has written ahead: a process that takes its place knows what it knew."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from pserver.job.coordination import Coordination, StatePart
from pserver.job.meetings import Meetings
from pserver.job.program import InstalledProgram
from pserver.job_log.coordinator import Coordinator
from pserver.job_log_pb2 import OwnEntry
from pserver.lane.leases import JobLeases
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from tests.checker.worlds import World


def written_differences(world: World, path: str, held: InstalledProgram) -> Iterator[str]:
    """Where they differ; nothing: nowhere.

    Args:
        path: of the write-ahead log.
        held: what server 0 has; its job is over.
    """
    members, job = Membership(world.trainers, 0.0), Lifecycle()
    rounds = [lane.kind.waits_for_all for lane in world.plan.lanes]
    another = SimpleNamespace(
        plan=world.plan,
        decisions=SimpleNamespace(
            coordinator=Coordinator(world.servers, rounds, members.awaited_together)
        ),
        leases=JobLeases(members, job),
        meetings=Meetings(members, job),
    )
    Coordination(path, cast(InstalledProgram, another), job.condition).restore()
    for name, known, read in (
        ("the log", held.decisions.coordinator, another.decisions.coordinator),
        ("the leases", held.leases, another.leases),
        ("the meetings", held.meetings, another.meetings),
    ):
        own, theirs = _plain(known), _plain(read)
        if own != theirs:
            yield f"server 0 has written of {name} {theirs}, and knows {own}"


def _plain(part: StatePart) -> list[OwnEntry]:
    return [OwnEntry.FromString(each.SerializeToString()) for each in part.entries()]
