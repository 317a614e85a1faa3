"""What ``fleet.init`` opens ``fleet.finish`` closes: a notebook, or a sweep, has one job after the
other in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Processes, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
SCRIPT = str(Path(__file__).parent / "several_jobs.py")
ROOT = str(Path(__file__).parent.parent.parent)
LAUNCH = ("-m", "pserver", "launch", "--trainers", "2")


def opened(process: Started, kinds: tuple[str, ...], trainers: int) -> None:
    """Looks that three jobs of each kind have ended, and the last has left no more than the
    first.
    """
    assert process.status(patience=220.0) == 0, process
    told = [
        json.loads(line.partition("OPEN ")[2]) + [line.partition("OPEN ")[0]]
        for line in process.lines
        if "OPEN " in line
    ]
    found: dict[Any, list[dict[str, int]]] = {}
    for kind, counts, who in told:
        found.setdefault((who, kind), []).append(counts)
    assert len(found) == len(kinds) * trainers, process
    for key, (first, _, last) in found.items():
        assert all(last[each] <= first[each] for each in first), (key, first, last)


@pytest.mark.long  # those with servers stand for it
def test_three_jobs_without_servers_one_after_the_other(processes: Processes) -> None:
    """After those that a script's error, or a refusal, has ended, too."""
    kinds = ("failed", "plain", "refused", "shards")
    process = processes.python("launch", *LAUNCH, "--nccl2", SCRIPT, *kinds, PYTHONPATH=ROOT)
    opened(process, kinds, 2)


@pytest.mark.parametrize(
    "kinds",
    [
        ("failed on servers", "k-step"),
        pytest.param(("sync", "async", "staleness", "mixed"), marks=pytest.mark.long),
    ],
    ids=", ".join,
)
def test_three_jobs_with_servers_one_after_the_other(
    kinds: tuple[str, ...], processes: Processes, servers: Callable[[int], str]
) -> None:
    """On servers that go on, as those of a notebook."""
    variables = {
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": servers(2),
        "TRAINERS": "1",
        "TRAINER_ID": "0",
    }
    process = processes.python("trainer", SCRIPT, *kinds, PYTHONPATH=ROOT, **variables)
    opened(process, kinds, 1)


@pytest.mark.long
def test_three_jobs_of_every_other_kind(processes: Processes) -> None:
    """Local steps, merged gradients, compression, rows, replicas."""
    kinds = ("localsgd", "merge", "dgc", "rows", "replicas", "failed", "plain")
    process = processes.python("launch", *LAUNCH, "--nccl2", SCRIPT, *kinds, PYTHONPATH=ROOT)
    opened(process, kinds, 2)


@pytest.mark.long
def test_three_jobs_of_processes_and_programs_of_ones_own(processes: Processes) -> None:
    """``spawn``, and programs without servers."""
    kinds = ("programs", "spawn")
    process = processes.python("alone", SCRIPT, *kinds, PYTHONPATH=ROOT)
    opened(process, kinds, 1)
