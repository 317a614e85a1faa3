"""What server 0 has written ahead: a process that takes its place knows what it knew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pserver.job.program import InstalledProgram
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.files import read
from pserver.job_log.own_state import OwnState, RememberedLeases, RememberedMeetings, fold
from pserver.job_log_pb2 import OwnEntry
from tests.checker.worlds import World


def written_differences(world: World, path: str, held: InstalledProgram) -> Iterator[str]:
    """Where they differ; nothing: nowhere.

    Args:
        path: of the write-ahead log.
        held: what server 0 has; its job is over.
    """
    rounds = [lane.kind.waits_for_all for lane in world.plan.lanes]
    another = OwnState(
        Coordinator(world.servers, rounds, lambda lane: ()),
        RememberedLeases(world.trainers),
        RememberedMeetings(),
    )
    first, *entries = read(path)
    assert first.plan == world.plan.fingerprint(), "it is of this job"
    fold(another, entries)
    another.settle()
    assert held.decisions.coordinator is not None, "it is server 0"
    for name, known, theirs in (
        ("the log", held.decisions.coordinator.entries(), another.log.entries()),
        ("the leases", held.leases.state.entries(), another.leases.entries()),
        ("the meetings", held.meetings.state.entries(), another.meetings.entries()),
    ):
        if _plain(known) != _plain(theirs):
            yield f"server 0 has written of {name} {_plain(theirs)}, and knows {_plain(known)}"


def _plain(entries: Iterable[OwnEntry]) -> list[OwnEntry]:
    return [OwnEntry.FromString(each.SerializeToString()) for each in entries]
