"""What launch makes of the ends of its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver.launcher.cluster import Cluster
from pserver.launcher.restart_policy import RestartPolicy
from pserver.launcher.started_processes import StartedProcesses
from pserver.launcher.supervisor import Failed, Supervisor


def supervisor(trainers: list[Any], servers: list[Any]) -> Supervisor:
    """Of processes that have been started."""
    cluster = Cluster(__file__, (), ("127.0.0.1:0",), ("127.0.0.1:1",))
    parts = cast(Any, SimpleNamespace())
    started = StartedProcesses(cluster, parts, parts, parts, parts, (), 0, servers)
    started.trainers = dict(enumerate(trainers))
    return Supervisor(started, RestartPolicy(0, True), {}, parts, print)


class Ended:
    """A process that has ended, by itself."""

    def __init__(self, status: int) -> None:
        self.status, self.failed = status, status != 0


@pytest.mark.parametrize("kind", ["trainer", "server"])
def test_an_end_counts_when_it_has_been_looked_at(kind: str) -> None:
    """A process that has failed ends the job badly although all have ended before launch looks."""
    well, badly = Ended(0), Ended(1)
    watched = supervisor([well, badly], []) if kind == "trainer" else supervisor([], [well, badly])
    for each in (well, badly):
        watched.started.events.put(cast(Any, each))

    with pytest.raises(Failed):
        watched._wait_for_trainers() if kind == "trainer" else watched._wait_for_servers()
