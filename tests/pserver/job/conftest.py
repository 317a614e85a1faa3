"""A job that serves streams of this process, and the clock that it goes by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pserver.config import ServerConfig
from pserver.job.job import Job
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.transport import inprocess
from tests.support.job_frames import DEADLINE, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(clock: Clock) -> Iterator[tuple[Job, inprocess.InprocessListener]]:
    made: list[Job] = []
    listener = inprocess.listen(lambda stream: handle(stream, made[0], WorkingStreams()))
    made.append(
        Job(ServerConfig(heartbeat_timeout_seconds=DEADLINE), {"inprocess": listener.port}, clock)
    )
    yield made[0], listener
    made[0].lifecycle.drain()
    listener.close(0.0)
