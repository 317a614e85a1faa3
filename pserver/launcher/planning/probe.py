"""A probe: the script, with real servers, for some seconds on this machine.

See [Note: what a probe measures].
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pserver.launcher.cluster import Cluster
from pserver.launcher.job_tokens import JobTokens
from pserver.launcher.planning.figures import JobLoad, Measured
from pserver.launcher.process import Group

ONLY = "PSERVER_PLAN_ONLY"  # read in trainer/environment, as the next three
FILE, SECONDS, END = "PSERVER_PROBE", "PSERVER_PROBE_SECONDS", "PSERVER_PROBE_END"
TOTAL_SECONDS = 30.0  # of a probe, with the start of its processes
WINDOW_SECONDS = 6.0
WRITE_SECONDS = 1.0  # before the end, for the file
MOST_SERVERS = 4  # of a probe
PAUSE_SECONDS = 0.05  # between two looks at processes
READY = re.compile(r"pserver ready at (\S+)")
# what a job would write, or show to others, and a probe does not
WITHOUT = (
    "CHECKPOINT",
    "TENSORBOARD",
    "TRACE",
    "METRICS",
    "PANEL",
    "KEYS",
    "TOKEN_FILE",
    "LOG_JSON",
)


class ProbeFailed(Exception):
    """There are no figures; the message says why."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A script, and the job that it is meant for.

    Attributes:
        script, arguments: of the trainers.
        servers, trainers: of the job.
        threads: of each process.
        transport: "tcp" where the job has a link, otherwise "auto".
        environment: of every process.
        window: seconds of the steps that are measured.
    """

    script: str
    arguments: tuple[str, ...]
    servers: int
    trainers: int
    threads: int
    transport: str
    environment: Mapping[str, str]
    window: float = WINDOW_SECONDS

    def load(self, quiet: bool = False) -> JobLoad | int:
        """Runs the script up to its plan, which it prints; returns the plan's loads, or its exit
        status where it had no plan.

        Args:
            quiet: nothing is printed.
        """
        endpoints = ",".join(f"server-{index}:6174" for index in range(self.servers))
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "load.json")
            done = subprocess.run(
                [sys.executable, self.script, *self.arguments],
                env={**self.environment, **self._role(endpoints), ONLY: "1", FILE: path},
                stdout=subprocess.DEVNULL if quiet else None,
                check=False,
            )
            return JobLoad.read(path) if Path(path).is_file() else done.returncode

    def _role(self, endpoints: str) -> dict[str, str]:
        return {
            "TRAINING_ROLE": "TRAINER",
            "TRAINER_ID": "0",
            "TRAINERS": str(self.trainers),
            "PSERVER_ENDPOINTS": endpoints,
        }

    def measure(self, end: float) -> Measured:
        """Runs the small job.

        Args:
            end: on the monotonic clock; it has ended by then.

        Raises:
            ProbeFailed: a process has failed, or it took too long.
        """
        servers = min(self.servers, MOST_SERVERS)
        places = ("127.0.0.1:0",) * servers
        cluster = Cluster(self.script, self.arguments, places, ("",))
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            tokens = stack.enter_context(JobTokens(cluster, {}))
            run = _Run(stack.enter_context(Group()), folder, end)
            given = {
                name: value
                for name, value in self.environment.items()
                if not name.startswith(tuple(f"PSERVER_{word}" for word in WITHOUT))
            }
            count = str(self.threads)
            given |= {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
            serve = [sys.executable, "-m", "pserver", "serve", "--once", "--endpoint", places[0]]
            serve += ["--transport", self.transport]
            serve += ["--checksum", "on"] if self.transport == "tcp" else []
            for number in range(servers):
                run.start(f"server {number}", serve, given | tokens.for_servers)
            endpoints = run.ready()
            run.start(
                "trainer",
                [sys.executable, self.script, *self.arguments],
                {
                    **given,
                    **tokens.for_trainers,
                    **self._role(",".join(endpoints)),
                    "PSERVER_TRANSPORT": self.transport,
                    FILE: str(folder / "measured.json"),
                    SECONDS: f"{self.window:g}",
                    END: f"{end - WRITE_SECONDS:.1f}",
                },
            )
            return run.measured(folder / "measured.json", self.window)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Processor time until a moment: of each server, and of the whole machine."""

    time: float
    servers: tuple[float, ...]
    machine: float


class _Run:
    """The processes of a probe, and their processor time as it grows.

    Args:
        group: that ends with this process.
        folder: for their output.
        end: on the monotonic clock.
    """

    def __init__(self, group: Group, folder: Path, end: float) -> None:
        self._group, self._folder, self._end = group, folder, end
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._samples: list[_Sample] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a process; what it says goes to a file."""
        with (self._folder / name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=self._group.id,
            )

    def ready(self) -> list[str]:
        """Waits for the servers; returns their endpoints."""
        while True:
            found = [READY.search(self._said(name)) for name in self._processes]
            if all(found):
                return [match[1] for match in found if match]
            self._wait("expected the servers to get ready")

    def measured(self, path: Path, window: float) -> Measured:
        """Waits for the trainer's file.

        Args:
            window: for how many seconds steps are measured.
        """
        trainer = self._processes["trainer"]
        while trainer.poll() is None:
            servers = [each for name, each in self._processes.items() if name != "trainer"]
            used = tuple(processor_seconds(each.pid) for each in servers)
            self._samples.append(_Sample(time.monotonic(), used, busy_seconds()))
            if path.is_file():  # the rest of its script does not matter
                break
            self._wait("expected some steps")
        if not path.is_file() and trainer.poll() == 0:
            raise ProbeFailed(
                "the script is too short: it came to its end before the probe had seen enough "
                f"steps, some for warming up and then {window:g} s of them (--window); let it "
                "train for longer, as with more epochs: the probe ends it when it has seen enough"
            )
        if not path.is_file():
            raise ProbeFailed(
                f"its trainer ended with status {trainer.poll()} before enough steps: "
                f"{self._last('trainer')}"
            )
        return self._completed(_read(path, self._end))

    def _completed(self, found: Measured) -> Measured:
        """With the servers' processor time of a step of the window, and the others'."""
        first = min(self._samples, key=lambda sample: abs(sample.time - found.begun))
        last = min(self._samples, key=lambda sample: abs(sample.time - found.ended))
        passed = last.time - first.time
        if not passed:
            return found
        pairs = zip(first.servers, last.servers, strict=True)
        used = [(after - before) / passed for before, after in pairs]
        own = sum(used) + found.cpu_seconds / found.seconds
        return replace(
            found,
            server_cpu_seconds=tuple(each * found.seconds for each in used),
            others=max(0.0, (last.machine - first.machine) / passed - own),
        )

    def _wait(self, what: str) -> None:
        """A pause; raises where a server has ended, or the time is over."""
        for name, process in self._processes.items():
            if name != "trainer" and process.poll() is not None:
                raise ProbeFailed(f"{name} ended with status {process.poll()}: {self._last(name)}")
        if time.monotonic() >= self._end:
            last = next(reversed(self._processes))
            raise ProbeFailed(f"{what} within {TOTAL_SECONDS:.0f} s; {last}: {self._last(last)}")
        time.sleep(PAUSE_SECONDS)

    def _said(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="utf-8", errors="replace")

    def _last(self, name: str) -> str:
        lines = self._said(name).split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _read(path: Path, end: float) -> Measured:
    """The trainer's file, which may be in the writing."""
    while True:
        try:
            return Measured.read(str(path))
        except ValueError:
            if time.monotonic() >= end:
                raise ProbeFailed("the trainer did not write its figures") from None
            time.sleep(PAUSE_SECONDS)


def processor_seconds(pid: int) -> float:
    """Processor time of a process until now; 0 where the system does not say."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Processor time of all processes until now; 0 where the system does not say."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, words[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
