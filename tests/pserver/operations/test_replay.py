"""Promises of ``pserver replay``: a recorded log, applied to a checkpoint or to what the job began
with, gives what the servers held, to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from pserver.operations.replay import replay
from tests.support.recorded_jobs import MODES, RecordedJob, held_by, program_of, same


def console() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_gives_what_the_server_held_to_the_bit(tmp_path: Path, mode: str) -> None:
    """From the beginning and from a checkpoint in the middle, in every mode: Adam, buffers, what
    scripts write, skipped steps, tables whose rows wait, fade, expire and are evicted.
    """
    job = RecordedJob(tmp_path / "log", program_of(mode), data_dir=str(tmp_path / "data"))
    job.train(4)
    job.save("middle")
    job.shrink()
    job.train(5)
    held = held_by(job.installed)
    job.end()

    (server,) = replay(tmp_path / "log", console())
    assert same(held, held_by(server.installed)) == []
    assert server.steps == {0: 9 * len(job.installed.lanes), 1: 9 * len(job.installed.lanes)}
    (server,) = replay(tmp_path / "log", console(), str(tmp_path / "data" / "middle"))
    assert same(held, held_by(server.installed)) == []
    assert server.steps == {0: 5 * len(job.installed.lanes), 1: 5 * len(job.installed.lanes)}
