"""Random faults of jobs that save as they go and may restart: a seed draws the victim, the
signal, the phase and some milliseconds.  ``make check-faults`` plays them all and writes
docs/checks/random_faults.md.

``pserver launch`` starts two servers and two trainers, which the test signals from outside.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.counting_trainer import EPOCHS, MODES
from tests.support.matrix import crossed
from tests.support.processes import Processes, Started

HEARTBEAT_TIMEOUT = 4.0
PATIENCE = 100.0
SEEDS = 5  # for each mode
SCRIPT = str(Path(__file__).with_name("counting_trainer.py"))
PHASES = ["join", "step", "epoch end", "save", "finish"]
# the signal, and after how many seconds a stopped process goes on
FAULTS: dict[str, tuple[signal.Signals, float]] = {
    "kill": (signal.SIGKILL, 0.0),
    "SIGTERM": (signal.SIGTERM, 0.0),
    "a short stop": (signal.SIGSTOP, HEARTBEAT_TIMEOUT / 2),
    "a long stop": (signal.SIGSTOP, HEARTBEAT_TIMEOUT * 2.5),
}
WEIGHTS = [4, 2, 1, 2]  # how often each is drawn
LATEST = 0.06  # seconds after the phase has come
# as those of a job to which nothing happens: each sample once, each step the same
SAME = ("sync", "tables", "mixed", "collective")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Fault:
    """One fault of one job.

    Attributes:
        victim: "trainer 1", "server 0".
        late: seconds between the phase, as a trainer says it, and the signal.
    """

    mode: str
    victim: str
    what: str
    phase: str
    late: float

    @classmethod
    def drawn(cls, mode: str, seed: int) -> Fault:
        """That of a seed."""
        draws = random.Random(f"{mode} {seed}")
        kinds = ["trainer"] if mode == "collective" else ["trainer", "trainer", "server"]
        victim = f"{draws.choice(kinds)} {draws.randrange(2)}"
        (what,) = draws.choices([*FAULTS], WEIGHTS)
        phase = draws.choice(PHASES)
        return cls(mode, victim, what, phase, draws.uniform(0, LATEST))

    def __str__(self) -> str:
        return f"{self.what} of {self.victim}, {self.phase}"


def launched(processes: Processes, mode: str) -> Started:
    """A job that saves five times a second, and may restart three times."""
    servers = ("--nccl2",) if mode == "collective" else ("--servers", "2")
    flags = (*servers, "--trainers", "2", "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT))
    saves = ("--checkpoint", "saved", "--every", "0.2", "--max-restarts", "3")
    command = ("-m", "pserver", "launch", *flags, *saves, SCRIPT, mode)
    # -u: none is forked, as its children are found by their command lines
    return processes.python("launch", "-u", *command)


def children(pid: int) -> Iterator[tuple[int, str]]:
    """The processes that a process has started, with their command lines."""
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if path.name.isdigit() and int((path / "stat").read_text().split()[3]) == pid:
                yield int(path.name), (path / "cmdline").read_text().replace("\0", " ")


def pid_of(fault: Fault, launch: Started, said: re.Match[str]) -> int:
    """The victim's."""
    kind, number = fault.victim.split()
    if kind == "trainer":
        return int(said[1])
    servers = sorted(pid for pid, command in children(launch.pid) if " serve " in command)
    return servers[int(number)]


def strike(fault: Fault, launch: Started) -> list[int]:
    """Waits for the phase, and sends the signal.

    Returns:
        The processes of the job, at that time.
    """
    kind, number = fault.victim.split()
    speaker = number if kind == "trainer" else "0"
    said = launch.said(rf"trainer {speaker} \| phase {fault.phase} of (\d+)", patience=PATIENCE)
    victim = pid_of(fault, launch, said)
    job = [pid for pid, _ in children(launch.pid)]
    sent, stopped = FAULTS[fault.what]
    time.sleep(fault.late)  # where in the phase is what the seed draws
    with suppress(ProcessLookupError):  # it was at its end
        os.kill(victim, sent)
        if stopped:
            time.sleep(stopped)  # the stop itself is what is tested
            os.kill(victim, signal.SIGCONT)
    return job


def ends(launch: Started) -> list[tuple[float, float, str]]:
    """Of each trainer that said it: how often samples counted at least and at most, the digest."""
    found = [re.search(r"counted (\S+) to (\S+) values (\w+)", line) for line in launch.lines]
    return [(float(each[1]), float(each[2]), each[3]) for each in found if each]


_undisturbed: dict[str, list[tuple[float, float, str]]] = {}


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], set[object]]:
    """The ends of a job in a mode to which nothing happens."""

    def found(mode: str) -> set[object]:
        if mode not in _undisturbed:
            processes = Processes(tmp_path_factory.mktemp("undisturbed"))
            try:
                launch = launched(processes, mode)
                assert launch.status(PATIENCE) == 0, f"{launch}"
                _undisturbed[mode] = ends(launch)
            finally:
                processes.end()
        return set(_undisturbed[mode])

    return found


@crossed("random_faults", diagonal=False, mode=MODES, seed=range(SEEDS))
def test_a_job_that_saves_survives(
    processes: Processes,
    undisturbed: Callable[[str], set[object]],
    record_property: Callable[[str, object], None],
    mode: str,
    seed: int,
) -> None:
    """The job ends in time with 0, and leaves no process; where trainers step together its values
    and counts are those of an undisturbed one, to the bit.
    """
    fault = Fault.drawn(mode, seed)
    launch = launched(processes, fault.mode)
    job = strike(fault, launch)
    began = time.monotonic()
    status = launch.status(PATIENCE)
    took = time.monotonic() - began
    record_property("result", f"{fault}: {status} after {took:.0f} s")

    assert status == 0, f"{fault}\n{launch}"
    assert not [pid for pid in job if Path(f"/proc/{pid}").exists()], f"{fault}\n{launch}"
    found = ends(launch)
    assert found, f"{fault}\n{launch}"
    if fault.mode in SAME:
        assert set(found) == undisturbed(fault.mode), f"{fault}\n{launch}"
    elif "async" in fault.mode and "server" not in fault.victim and "half" not in fault.mode:
        assert {each[:2] for each in found} == {(EPOCHS, EPOCHS)}, f"{fault}\n{launch}"
