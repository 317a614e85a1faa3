"""``pserver plan``: the split of a job before it is started, and its predicted step.

The script runs up to its plan, which it prints instead of joining servers.  Then a probe runs some
of its steps for real, and the cost model converts them to the job in question.

[Note: other modes from a sync probe]  The compute part is the same in every mode.  An async step
waits for the message before it: the longer of compute and exchange counts.  In geo mode a trainer
runs the optimizer itself, which takes about the part of the servers' work that a sync step has
once, and exchanges every k steps.  Between two probed numbers of servers the figures are
interpolated; beyond the larger one they are those of the larger one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pserver.launcher.cluster import Cluster, JobTokens
from pserver.launcher.planning.cost import (
    SHARED,
    JobLoad,
    LaneLoad,
    Measured,
    Prediction,
    Where,
    predict,
)
from pserver.launcher.processes import Group
from pserver.launcher.script import check_script
from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

# ---- candidates ----
#
# What ``--search`` compares: update modes and numbers of servers, predicted from probes of the
# script in sync mode.


K_STEPS = (10, 100)  # of the geo modes that are compared


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode and a number of servers.

    Attributes:
        mode: its name.
        k_steps: of geo mode; otherwise 0.
        memory: bytes of the fullest server.
        prediction: of its step.
    """

    mode: str
    k_steps: int
    servers: int
    memory: int
    prediction: Prediction

    @property
    def setting(self) -> str:
        """The strategy setting for it, as a script has it."""
        if self.mode == "sync":
            return "a_sync = False"
        if self.mode == "async":
            return "a_sync = True"
        return f"a_sync = True, a_sync_configs = {{'k_steps': {self.k_steps}}}"


def candidates(
    load: JobLoad, probes: Mapping[int, Measured], servers: int, where: Where, memory: int | None
) -> list[Candidate]:
    """The candidates that fit, the fastest first; of equally fast ones those with fewer servers
    first, and those in a mode that waits more.

    Args:
        load: of the script's plan, on any number of servers.
        probes: by number of servers.
        servers: the most.
        memory: bytes that each server has; None: any.

    Raises:
        ValueError: the script is in another mode than sync; or nothing fits.
    """
    check_modes(load)
    found = []
    for count in range(1, servers + 1):
        spread = on_servers(load, count)
        if memory is not None and max(spread.memory) > memory:
            continue
        measured = between(probes, count)
        for mode, k_steps in (("sync", 0), ("async", 0), *(("geo", k) for k in K_STEPS)):
            prediction = predict(*_in_mode(mode, k_steps, spread, measured), where)
            found.append(Candidate(mode, k_steps, count, max(spread.memory), prediction))
    if not found:
        needed = max(on_servers(load, servers).memory)
        raise ValueError(
            f"--memory: nothing fits: {servers} servers need {needed} bytes each, got {memory}"
        )
    return sorted(found, key=lambda each: each.prediction.seconds)


def check_modes(load: JobLoad) -> None:
    """Returns if other modes can be predicted from this one.

    Raises:
        ValueError: the script is in another mode than sync.
    """
    modes = sorted({lane.mode for lane in load.lanes})
    if modes != ["sync"]:
        raise ValueError(
            "--search: expected a script in sync mode, as the modes are what is searched for, got "
            f"{', '.join(modes)}"
        )


def on_servers(load: JobLoad, servers: int) -> JobLoad:
    """The same job with its bytes spread evenly over so many servers."""
    lanes = tuple(
        replace(lane, sent=_even(lane.sent, servers), received=_even(lane.received, servers))
        for lane in load.lanes
    )
    return replace(load, lanes=lanes, memory=_even(load.memory, servers))


def _even(parts: Sequence[int], servers: int) -> tuple[int, ...]:
    return (-(-sum(parts) // servers),) * servers


def between(probes: Mapping[int, Measured], servers: int) -> Measured:
    """The figures for a number of servers: between those that were probed."""
    below = max(count for count in probes if count <= max(servers, min(probes)))
    above = min((count for count in probes if count >= servers), default=below)
    if above == below:
        return _over(probes[below], servers)
    weight = (servers - below) / (above - below)
    low, high = _over(probes[below], servers), _over(probes[above], servers)

    def mixed(name: str) -> float:
        one, other = getattr(low, name), getattr(high, name)
        return float(one + weight * (other - one))

    server = sum(low.server_cpu_seconds) * (1 - weight) + sum(high.server_cpu_seconds) * weight
    return replace(
        low,
        seconds=mixed("seconds"),
        exchange_seconds=mixed("exchange_seconds"),
        cpu_seconds=mixed("cpu_seconds"),
        exchange_cpu_seconds=mixed("exchange_cpu_seconds"),
        server_cpu_seconds=(server / servers,) * servers,
    )


def _over(measured: Measured, servers: int) -> Measured:
    """Measurements on some servers, spread over others."""

    def even(parts: Sequence[float]) -> tuple[float, ...]:
        return (sum(parts) / servers,) * servers

    return replace(
        measured,
        sent=even(measured.sent),
        received=even(measured.received),
        looked_up=even(measured.looked_up),
        server_cpu_seconds=even(measured.server_cpu_seconds),
    )


def _in_mode(mode: str, k_steps: int, load: JobLoad, sync: Measured) -> tuple[JobLoad, Measured]:
    if mode == "sync":
        return load, sync
    compute = sync.seconds - sync.exchange_seconds
    if mode == "async":
        lanes = tuple(_queued(lane, mode, 1) for lane in load.lanes)
        own = replace(sync, seconds=max(compute, sync.exchange_seconds), exchange_seconds=0.0)
        return replace(load, lanes=lanes), own
    lanes = tuple(_queued(lane, mode, k_steps) for lane in load.lanes)
    update = (1 - SHARED) * sum(sync.server_cpu_seconds)
    sends = sync.exchange_cpu_seconds / k_steps
    own = replace(
        sync,
        seconds=compute + update + sync.exchange_seconds / k_steps,
        exchange_seconds=0.0,
        cpu_seconds=sync.cpu_seconds - sync.exchange_cpu_seconds + update + sends,
        exchange_cpu_seconds=0.0,
        messages=1 / k_steps,
        server_cpu_seconds=tuple(each * SHARED / k_steps for each in sync.server_cpu_seconds),
        sent=tuple(each / k_steps for each in sync.sent),
        received=tuple(
            (whole - rows) / k_steps + rows
            for whole, rows in zip(sync.received, sync.looked_up, strict=True)
        ),
    )
    return replace(load, lanes=lanes), own


def _queued(lane: LaneLoad, mode: str, steps: int) -> LaneLoad:
    return replace(lane, mode=mode, waits=False, together=False, steps=steps)


# ---- choice ----
#
# The winner of a search, as a file beside the script, which ``strategy.auto_search`` reads.


@dataclass(frozen=True, slots=True)
class Choice:
    """A search's choice for a script.

    Attributes:
        mode: "sync", "async" or "geo".
        k_steps: of geo mode; otherwise 0.
        servers, trainers: of the job.
        seconds: of its predicted step.
    """

    mode: str
    k_steps: int
    servers: int
    trainers: int
    seconds: float

    @staticmethod
    def beside(script: str) -> Path:
        """The place of a script's file.

        Example:
            >>> Choice.beside("jobs/train.py").name
            'train.plan.json'
        """
        return Path(script).with_suffix(".plan.json")

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        with naming(path):
            path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Choice:
        """Reads a file of :meth:`write`.

        Raises:
            OSError: there is no such file.
            ValueError: something else has written it.
        """
        wrong = f"{path}: expected what `pserver plan --search --write` writes"
        try:
            found = cls(**bounded_json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{wrong}: {error}") from None
        k_steps = found.k_steps
        if not isinstance(k_steps, int) or isinstance(k_steps, bool) or k_steps < 0:
            raise ValueError(f"{wrong}, got k_steps {k_steps!r}")
        if found.mode not in ("sync", "async", "geo") or (found.mode == "geo") != (k_steps > 0):
            raise ValueError(f"{wrong}, got mode {found.mode!r} with k_steps {k_steps}")
        return found


# ---- prediction text ----
#
# A prediction, and a search, as text.


DISTURBING = 0.25  # cores


def prediction_text(found: Prediction, measured: Measured) -> str:
    """A line for the step, and a table of its parts.

    Args:
        measured: by the probe, on which the prediction stands.
    """
    head = (
        f"predicted step {spelled(found.seconds)}, {1 / found.seconds:.4g} steps/s of each "
        f"trainer; bottleneck: {found.bottleneck}"
    )
    rows = [("part", "of a step", "")]
    for part in found.parts:
        why = f"{part.why}; while the rest goes on" if part.hidden else part.why
        rows.append((part.name, spelled(part.seconds), why))
    probe = (
        f"from a probe of {measured.steps} steps of {spelled(measured.seconds)}, "
        f"{spelled(measured.exchange_seconds)} of them in the exchange"
    )
    return "\n".join([head, *table(rows), probe, *disturbance(measured)])


def disturbance(measured: Measured) -> list[str]:
    """A warning where other processes have disturbed the probe."""
    if measured.others < DISTURBING:
        return []
    return [
        f"other processes kept {measured.others:.1f} cores of this machine busy meanwhile: the job "
        "will take less without them; probe again when they rest"
    ]


def candidates_text(found: Sequence[Candidate], trainers: int) -> str:
    """A table, the first of which is the best."""
    rows = [("servers", "strategy", "of a step", "steps/s", "memory of a server", "bottleneck")]
    for each in found:
        seconds = each.prediction.seconds
        rows.append(
            (
                str(each.servers),
                each.setting,
                spelled(seconds),
                f"{trainers / seconds:.4g}",
                f"{each.memory / 1e6:.4g} MB",
                each.prediction.bottleneck,
            )
        )
    return "\n".join(table(rows))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def spelled(seconds: float) -> str:
    """A time as people write it.

    Example:
        >>> spelled(0.0123)
        '12.3 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ---- probe ----
#
# A probe: the script, with real servers, for some seconds on this machine.
#
# See [Note: what a probe measures].


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
    """The probe has given no figures; the message has the reason."""


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
        """Starts a process, with its output in a file."""
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
        """Adds the servers' processor time of a step of the window, and the other processes'."""
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
        """Pauses; raises where a server has ended, or the time is over."""
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


# ---- plan ----


FAILED = 1


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The arguments of ``pserver plan``.

    Attributes:
        servers, trainers: how many the job would have.
        probes: predict a step, too.
        link: bytes per second of each process's link; None: they share this machine's loopback.
        latency: seconds one way.
        apart: each process would have a machine like this one.
        search: compare modes and numbers of servers, up to ``servers``.
        memory: bytes that each server may have; None: any.
        write: the winner goes to a file beside the script.
        window: seconds of the steps that a probe measures.
    """

    servers: int
    trainers: int
    probes: bool = True
    link: float | None = None
    latency: float = 0.0
    apart: bool = False
    search: bool = False
    memory: int | None = None
    write: bool = False
    window: float = WINDOW_SECONDS

    @property
    def where(self) -> Where:
        """The machines."""
        return Where(_cores(), self.apart, self.link, self.latency)


def show(
    script: str, arguments: Sequence[str], settings: PlanSettings, environment: Mapping[str, str]
) -> int:
    """Runs the script as trainer 0 of such a job, up to its plan; then a probe.

    Args:
        script, arguments: of the trainer.
        settings: the job.
        environment: the script's environment variables, besides those of its role.

    Returns:
        0, also where there is a plan and its probe has failed; the script's exit status where it
        has no plan; 1 where a search has failed.

    Raises:
        ValueError: there is no such script, or a module beside it hides a package of ours.
    """
    check_script(script)
    probe = probe_of(script, arguments, settings, environment)
    load = probe.load()
    if isinstance(load, int):
        return load
    return _predict(probe, load, settings) if settings.probes else 0


def probe_of(
    script: str, arguments: Sequence[str], settings: PlanSettings, environment: Mapping[str, str]
) -> Probe:
    """The probe of a job; its processes have as many threads as the job's."""
    processes = 1 if settings.apart else settings.servers + settings.trainers
    threads = environment.get("OMP_NUM_THREADS", "")
    return Probe(
        script,
        tuple(arguments),
        settings.servers,
        settings.trainers,
        int(threads) if threads.isdecimal() else max(1, _cores() // processes),
        "auto" if settings.link is None else "tcp",
        environment,
        settings.window,
    )


def _predict(probe: Probe, load: JobLoad, settings: PlanSettings) -> int:
    if not load.lanes:
        print("pserver plan: no prediction for a job without servers", file=sys.stderr)
        return 0
    try:
        if settings.search:
            return _search(probe, load, settings)
        measured = _measured(probe)
    except ProbeFailed as failure:
        print(
            f"pserver plan: no prediction, the probe has failed: {failure}; --no-probe leaves it "
            "out",
            file=sys.stderr,
        )
        return FAILED if settings.search else 0
    print("\n" + prediction_text(predict(load, measured, settings.where), measured))
    return 0


def _search(probe: Probe, load: JobLoad, settings: PlanSettings) -> int:
    """Probes one server, and as many as there may be, if that is more."""
    check_modes(load)
    counts = sorted({1, min(settings.servers, MOST_SERVERS)})
    probes = {count: _measured(replace(probe, servers=count)) for count in counts}
    found = candidates(load, probes, settings.servers, settings.where, settings.memory)
    print("\n" + candidates_text(found, settings.trainers))
    for line in disturbance(max(probes.values(), key=lambda measured: measured.others)):
        print(line)
    if settings.write:
        best = found[0]
        choice = Choice(
            best.mode, best.k_steps, best.servers, load.trainers, best.prediction.seconds
        )
        choice.write(Choice.beside(probe.script))
        print(f"written to {Choice.beside(probe.script)}")
    return 0


def _measured(probe: Probe) -> Measured:
    count = min(probe.servers, MOST_SERVERS)
    servers = f"{count} server{'s' if count > 1 else ''}"
    print(f"probing {servers}, for {TOTAL_SECONDS:.0f} s at most ...", file=sys.stderr, flush=True)
    return probe.measure(time.monotonic() + TOTAL_SECONDS)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
