"""What launch makes of the ends of its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver.launcher.cluster import Cluster
from pserver.launcher.launch import _Failed, _Supervisor


def supervisor(trainers: list[Any], servers: list[Any]) -> _Supervisor:
    """Of processes that have been started."""
    cluster = Cluster(__file__, (), ("127.0.0.1:0",), ("127.0.0.1:1",))
    parts = cast(Any, SimpleNamespace())
    return _Supervisor(
        cluster, {}, parts, parts, parts, parts, (), parts, 0, servers=servers, trainers=trainers
    )


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
        watched.events.put(cast(Any, each))

    with pytest.raises(_Failed):
        watched._wait_for_trainers() if kind == "trainer" else watched._wait_for_servers()
