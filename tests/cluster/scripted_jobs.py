"""Jobs whose trainers are ``scripted_trainer.py``: by hand, or by ``pserver launch``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.scripted_trainer import Plan
from tests.support.processes import Processes, Started

SCRIPT = str(Path(__file__).with_name("scripted_trainer.py"))


class Job:
    """Servers that end with their job, and trainers, each of which a test starts.

    Args:
        timeout: for heartbeats, in seconds.
        flags: of the servers.
        running: servers that there are, with their endpoints, in place of others.

    Attributes:
        trainers: that have been started.
    """

    def __init__(
        self,
        processes: Processes,
        timeout: float,
        *flags: str,
        servers: int = 2,
        trainers: int = 2,
        script: str = SCRIPT,
        running: Sequence[tuple[Started, str]] = (),
    ) -> None:
        self._processes, self._script = processes, script
        self.trainers: list[Started] = []
        started = running or processes.servers(servers, timeout, "--once", *flags)
        self.servers = [server for server, _ in started]
        self.endpoints = [endpoint for _, endpoint in started]
        self._job = {
            "TRAINING_ROLE": "TRAINER",
            "TRAINERS": str(trainers),
            "PSERVER_ENDPOINTS": ",".join(self.endpoints),
            "PSERVER_HEARTBEAT_TIMEOUT": str(timeout),
        }

    def trainer(self, number: int, *words: Plan | str, **role: str) -> Started:
        """Starts one."""
        job = {**self._job, **role, "TRAINER_ID": str(number)}
        told = [each.word if isinstance(each, Plan) else each for each in words]
        self.trainers.append(
            self._processes.python(f"trainer {number}", self._script, *told, **job)
        )
        return self.trainers[-1]

    def statuses(self) -> list[int]:
        """Of the servers, which end."""
        return [server.status() for server in self.servers]


def launched(processes: Processes, plan: Plan, servers: int, *flags: str, **role: str) -> Started:
    """A job that ``pserver launch`` has begun."""
    count = 0
    for number, length in enumerate(plan.files):
        lines = "".join(f"1 {sample}\n" for sample in range(count, count + length))
        (processes.path / f"part-{number}").write_text(lines)
        count += length
    cluster = ("--servers", str(servers)) if servers else ("--nccl2",)
    words = ("-m", "pserver", "launch", *cluster, "--trainers", str(plan.trainers), *flags)
    return processes.python("launch", *words, SCRIPT, plan.word, **role)


def ended(launch: Started) -> str:
    """All that a job has said, which ends well."""
    assert launch.status(patience=200) == 0, f"{launch}"
    return "\n".join(launch.lines)


def servers_of(launch: Started) -> list[psutil.Process]:
    """The servers that run, the oldest first: numbers of processes begin again."""
    family = psutil.Process(launch.pid).children(recursive=True)
    found = (each for each in family if each.name() == "pserver serve" or "serve" in each.cmdline())
    return sorted(found, key=lambda p: (p.create_time(), p.pid))


def said(launch: Started, pattern: str, count: int) -> list[re.Match[str]]:
    """So many lines that hold the pattern; waits for them."""
    found, line = list[re.Match[str]](), 0
    while len(found) < count:
        found.append(launch.said(pattern, line, patience=180.0))
        line = launch.lines.index(found[-1].string, line) + 1
    return found


def trained(text: str, epochs: int) -> list[Counter[int]]:
    """By epoch, the samples of the steps that the trainers say they have taken."""
    steps = [json.loads(each) for each in re.findall(r"trained (\[\d, \[.*\]\])", text)]
    return [
        Counter(sample for number, batch in steps if number == epoch for sample in batch)
        for epoch in range(epochs)
    ]


def records(text: str) -> list[dict[str, Any]]:
    """The values that trainers have found on the servers in the end."""
    return [json.loads(each) for each in re.findall(r"record (\{.*\})$", text, re.MULTILINE)]


def record(trainer: Started) -> dict[str, Any]:
    """The values that a trainer has found on the servers in the end; it ends well."""
    assert trainer.status() == 0, f"{trainer}"
    found: dict[str, Any] = json.loads(trainer.said("^record (.*)")[1])
    return found


def steps(trainer: Started) -> list[tuple[float, int]]:
    """When it has taken which steps."""
    lines = zip(list(trainer.times), list(trainer.lines), strict=False)
    found = [(at, re.match(r"step (\d+)$", line)) for at, line in lines]
    return [(at, int(match[1])) for at, match in found if match]


def said_at(started: Started, pattern: str) -> float:
    """When a process has said something; waits for it."""
    started.said(pattern)
    lines = zip(list(started.times), list(started.lines), strict=False)
    return next(at for at, line in lines if re.search(pattern, line))


def moved(trainer: Started) -> dict[str, list[float]]:
    """Steps in columns, and in rows, at a trainer's end, by trainer: alike on all servers."""
    found = dict[str, list[float]]()
    for part, servers in record(trainer).items():
        if part in ("columns", "rows"):
            assert all(each == servers[0] for each in servers), f"{trainer}"
            assert all(len(each) == 1 for each in servers[0]), f"{trainer}"
            found[part] = [each[0] for each in servers[0]]
    return found
