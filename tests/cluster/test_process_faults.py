"""What everybody learns when a process of a job dies or stops, in every phase of a job and in every
mode: ``make check-faults`` runs them all and writes docs/checks/process_faults.md.

Two trainers and one server, or two where a server is the victim, are real processes.  ``pserver
launch`` starts them, or else they are started by hand, with ``pserver serve --once``: by turns, so
that every fault, every mode and every phase has both.  The victim sends the signal to itself, at a
named place.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pserver.launcher.cluster import free_port
from tests.support.load import Deadline, scaled
from tests.support.matrix import crossed
from tests.support.processes import Processes

HEARTBEAT_TIMEOUT, START_TIMEOUT = 3.0, 20.0
MARGIN = 6.0  # on a machine that others use too
BEGINNING = 16.0  # for processes to import torch, and to compile kernels, on such a machine
TOLD = HEARTBEAT_TIMEOUT  # who is told knows before the heartbeat timeout could tell
PATIENCE = 60.0
# what a process says when it knows
NEWS = re.compile(r"Traceback|the job failed|Lost|JobFailed|Draining|SIGTERM|expected a readiness")
WAITING = "waiting for the server"
HERE = Path(__file__).parent
TRAINER, SERVER, LAUNCH = (
    str(HERE / f"faulty_{name}.py") for name in ("trainer", "server", "launch")
)
# what happens: the signal, to whom, and for how long a stop lasts
FAULTS = {
    f"{what} of a {victim}": (number, victim, seconds)
    for victim in ("trainer", "server")
    for what, number, seconds in (
        ("kill -9", "SIGKILL", None),
        ("SIGTERM", "SIGTERM", None),
        ("a short stop", "SIGSTOP", HEARTBEAT_TIMEOUT / 3),
        ("a long stop", "SIGSTOP", None),
    )
}
MODES = ["sync", "async", "half_async", "staleness", "geo", "diloco", "tables", "mixed"]
PHASES = ["starting", "joining", "stepping", "saving", "finishing"]
SAME_VALUES = ["sync", "diloco", "tables"]  # as those of a job to which nothing happened

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class End:
    """How a process ended: its status (negative for a signal), and when."""

    status: int
    at: float

    @classmethod
    def of(cls, status: int, at: float) -> End:
        """The status 128 + n stands for signal n, as a shell says it."""
        return cls(128 - status if status > 128 else status, at)


class Cluster:
    """Servers and two trainers, with a planned fault.

    Args:
        fault: "SIGNAL VICTIM PHASE".

    Attributes:
        ends: by process ("trainer 1"), once it has ended.
        idle: servers that never have a job, because another does not come: they wait on.
    """

    def __init__(self, processes: Processes, fault: str, mode: str) -> None:
        self.processes, self.fault, self.mode = processes, fault, mode
        self.ends: dict[str, End] = {}
        self.servers = 2 if " server " in fault else 1
        self.idle: list[str] = []
        self._marks = processes.path / "marks"
        self._marks.mkdir()
        self.environment = {
            "FAULT": fault,
            "FAULT_DIR": str(self._marks),
            "PYTHONPATH": os.pathsep.join(str(path) for path in (HERE.parents[1], HERE)),
            "PSERVER_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT),
            "PSERVER_START_TIMEOUT": str(START_TIMEOUT),
        }

    def start(self) -> None:
        """Starts every process."""
        raise NotImplementedError

    def look(self) -> None:
        """Takes down who has ended."""
        raise NotImplementedError

    def said(self, name: str) -> str:
        """What a process has said."""
        raise NotImplementedError

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the job, by name."""
        raise NotImplementedError

    def lines(self, name: str) -> list[tuple[float, str]]:
        """What a process has said, each line with the time at which it came."""
        raise NotImplementedError

    def knew(self, name: str, since: float) -> float:
        """When a process knew of the fault: it says so, or it ends."""
        news = [at for at, line in self.lines(name) if at >= since and NEWS.search(line)]
        return min([*news, self.ends[name].at])

    def asked(self, name: str) -> float:
        """When a process began to wait for servers, which takes it long where much else runs; 0.0
        for one that never did.
        """
        return min((at for at, line in self.lines(name) if WAITING in line), default=0.0)

    def struck(self) -> tuple[float, int, str]:
        """When the fault happened, the victim's pid and its name; waits for it."""
        self.wait(lambda: (self._marks / "struck").exists())
        at, pid = (self._marks / "struck").read_text().split()
        self.wait(lambda: int(pid) in self.pids.values())
        return float(at), int(pid), {each: name for name, each in self.pids.items()}[int(pid)]

    def wait_for_all(self, *but: str) -> None:
        """Waits until every process has ended, but these."""
        self.wait(lambda: set(self.pids) <= {*self.ends, *but})

    def wait(self, holds: Callable[[], bool]) -> None:
        """Waits until it holds."""
        deadline = Deadline(PATIENCE)
        while not holds():
            late = deadline.over or set(self.pids) <= set(self.ends)
            assert not late, f"it has not come to that; ended: {self.ends}\n{self}"
            time.sleep(0.02)
            self.look()

    def values(self) -> list[str]:
        """What the trainers had at the end, as digests."""
        said = [self.said(f"trainer {number}") for number in range(2)]
        return re.findall(r"values (\w+)", "\n".join(said))

    def __repr__(self) -> str:
        return "\n".join(f"---- {name}\n{self.said(name)}" for name in self.pids)


class ByHand(Cluster):
    """``pserver serve --once`` for each server, and the script twice."""

    def start(self) -> None:
        """See :class:`Cluster`."""
        self.idle = ["server 0", "server 1"] if self.fault.endswith(" server starting") else []
        ports = [free_port() for _ in range(self.servers)]
        for number, port in enumerate(ports):
            words = (SERVER, "--once", "--endpoint", f"127.0.0.1:{port}")
            self.processes.python(f"server {number}", *words, **self.environment)
        job = {
            "TRAINING_ROLE": "TRAINER",
            "TRAINERS": "2",
            "PSERVER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
        }
        for number in range(2):
            role = {**self.environment, **job, "TRAINER_ID": str(number)}
            self.processes.python(f"trainer {number}", TRAINER, self.mode, **role)

    def look(self) -> None:
        """See :class:`Cluster`."""
        for started in self.processes.all:
            if started.ended_at and started.name not in self.ends:
                self.ends[started.name] = End.of(started.status(), started.ended_at)

    def said(self, name: str) -> str:
        """See :class:`Cluster`."""
        return "\n".join(
            "\n".join(started.lines) for started in self.processes.all if started.name == name
        )

    def lines(self, name: str) -> list[tuple[float, str]]:
        """See :class:`Cluster`."""
        (own,) = [started for started in self.processes.all if started.name == name]
        return list(zip(own.times, own.lines, strict=True))

    @property
    def pids(self) -> dict[str, int]:
        """See :class:`Cluster`."""
        return {started.name: started.pid for started in self.processes.all}


class ByLaunch(Cluster):
    """``pserver launch``; it is a process of the job too."""

    def start(self) -> None:
        """See :class:`Cluster`."""
        timeout = self.processes.scaled(HEARTBEAT_TIMEOUT)
        words = (LAUNCH, str(self.servers), "2", str(timeout), TRAINER, self.mode)
        self.launch = self.processes.python(
            "launch", *words, FAULT_LAUNCHED="1", **self.environment
        )

    def wait_for_all(self, *but: str) -> None:
        """See :class:`Cluster`.  It ends them all."""
        self.wait(lambda: "launch" in self.ends)

    def look(self) -> None:
        """See :class:`Cluster`."""
        ended = self.launch.ended_at
        for line in list(self.launch.lines):
            if match := re.match(r"ended (\w+ \d) (\d+) (\S+)$", line):
                self.ends[match[1]] = End.of(int(match[2]), float(match[3]))
        if ended:
            self.ends["launch"] = End.of(self.launch.status(), ended)

    def said(self, name: str) -> str:
        """See :class:`Cluster`."""
        if name == "launch":
            return "\n".join(self.launch.lines)
        return (self.processes.path / "logs" / f"{name.replace(' ', '-')}.log").read_text()

    def lines(self, name: str) -> list[tuple[float, str]]:
        """See :class:`Cluster`."""
        said = zip(self.launch.times, self.launch.lines, strict=True)
        return [(at, line) for at, line in said if re.match(rf"{name} +\| ", line)]

    @property
    def pids(self) -> dict[str, int]:
        """See :class:`Cluster`.  Where a server does not get ready no trainer is started."""
        found = re.findall(r"^started (\w+ \d) (\d+)$", self.said("launch"), re.MULTILINE)
        return {**{name: int(pid) for name, pid in found}, "launch": self.launch.pid}


def by_turns(what: str, mode: str, phase: str) -> type[Cluster]:
    """Who starts the processes."""
    turn = [*FAULTS].index(what) + MODES.index(mode) + PHASES.index(phase)
    return (ByLaunch, ByHand)[turn % 2]


_undisturbed: dict[str, list[str]] = {}  # by mode, the values


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What trainers have at the end of a job in a mode to which nothing happens."""

    def values(mode: str) -> list[str]:
        if mode not in _undisturbed:
            cluster = ByHand(Processes(tmp_path_factory.mktemp(mode)), "SIGCONT nobody never", mode)
            try:
                cluster.start()
                cluster.wait_for_all()
                _undisturbed[mode] = cluster.values()
            finally:
                cluster.processes.end()
        return _undisturbed[mode]

    return values


def limit(what: str, phase: str, by_launch: bool) -> float:
    """Within how many seconds after a fault the others know."""
    number, victim, _ = FAULTS[what]
    if phase == "starting":
        # nobody knows of a server yet, but launch, which sees that it dies, and not that it stops;
        # and the others may not have started either
        unknown = victim == "server" or (by_launch and number == "SIGSTOP")
        return BEGINNING + MARGIN + (START_TIMEOUT if unknown else HEARTBEAT_TIMEOUT)
    return TOLD if number == "SIGTERM" else HEARTBEAT_TIMEOUT + MARGIN


@crossed(
    "process_faults",
    rows=[
        ("kill -9 of a trainer", "async", "starting"),
        ("a short stop of a trainer", "staleness", "finishing"),
        ("kill -9 of a server", "tables", "stepping"),
        ("a long stop of a server", "mixed", "joining"),
    ],
    what=FAULTS,
    mode=MODES,
    phase=PHASES,
)
def test_everybody_learns_of(
    processes: Processes,
    undisturbed: Callable[[str], list[str]],
    record_property: Callable[[str, object], None],
    what: str,
    mode: str,
    phase: str,
) -> None:
    """A stop that is shorter than the heartbeat timeout disturbs nobody.  After every other fault
    everybody else ends in time and says who was lost: with 0 where the mode goes on without a lost
    trainer that had joined, and otherwise not.
    """
    number, kind, seconds = FAULTS[what]
    goes_on = kind == "trainer" and number != "SIGTERM" and phase != "starting"
    cluster = by_turns(what, mode, phase)(processes, f"{number} {kind} {phase}", mode)
    cluster.start()
    at, pid, victim = cluster.struck()
    if seconds is not None:
        time.sleep(seconds)  # the stop itself is what is tested
        os.kill(pid, signal.SIGCONT)
    else:
        if goes_on:  # launch waits for a trainer that stands still
            cluster.wait(lambda: {*cluster.pids} <= {*cluster.ends, victim, "launch"})
        else:
            cluster.wait_for_all(victim, *cluster.idle)
        with suppress(ProcessLookupError):  # it has died, or launch was faster
            os.kill(pid, signal.SIGCONT)
        for name in cluster.idle:
            with suppress(ProcessLookupError):
                os.kill(cluster.pids[name], signal.SIGTERM)
    cluster.wait_for_all()
    others = [name for name in cluster.ends if name not in (victim, "launch", *cluster.idle)]
    waited = [cluster.knew(name, at) - max(at, cluster.asked(name)) for name in others]
    knew = max(waited, default=0.0)
    record_property("result", shown(cluster, victim, None if seconds is not None else knew))

    if seconds is not None:
        assert {end.status for end in cluster.ends.values()} == {0}, f"{cluster.ends}\n{cluster}"
        assert mode not in SAME_VALUES or cluster.values() == undisturbed(mode)
        return
    # launch, which asks servers whether the job goes on, may find that it is over; and so may a
    # server that stood still and reads only then that its trainers had finished
    judged = set(cluster.ends) - {"launch"}
    if (number, kind, phase) == ("SIGSTOP", "server", "finishing"):
        judged -= {victim}
    ended_well = {name for name in judged if cluster.ends[name].status == 0}
    assert ended_well == (set(others) if goes_on else set()), f"{cluster.ends}\n{cluster}"
    assert goes_on or cluster.ends.get("launch", End(1, at)).status != 0, f"{cluster}"
    assert -signal.SIGKILL not in [cluster.ends[name].status for name in others], f"{cluster}"
    assert cluster.ends[victim].status == -signal.SIGKILL or number != "SIGKILL"
    assert cluster.ends[victim].status == -signal.SIGTERM or number != "SIGTERM", f"{cluster}"
    assert_named(cluster, victim, ["server 0"] if goes_on else others)
    assert knew < scaled(limit(what, phase, "launch" in cluster.ends)), (
        f"{knew:.1f} s: {cluster.ends}\n{cluster}"
    )


def assert_named(cluster: Cluster, victim: str, others: list[str]) -> None:
    """Everybody else says who was lost; under launch, launch does, which may end them first."""
    speakers = ["launch"] if "launch" in cluster.ends else others
    for name in speakers:
        said = re.sub(rf"(?m)^(started|ended|{victim} +\|) .*$", "", cluster.said(name))
        assert re.search(rf"\b{victim}\b", said), f"{name}\n{cluster}"


def shown(cluster: Cluster, victim: str, knew: float | None) -> str:
    """A cell of the table: after how many seconds the last of the others knew, and every exit
    code: trainers, servers, launch; the victim's in bold.
    """
    order = ["trainer 0", "trainer 1", "server 0", "server 1", "launch"]
    statuses = []
    for name in order:
        if name in cluster.ends:
            status = cluster.ends[name].status
            code = str(128 - status if status < 0 else status)  # as a shell says it
            statuses.append(f"**{code}**" if name == victim else code)
    codes = " ".join(statuses)
    return codes if knew is None else f"{knew:.1f} s: {codes}"
