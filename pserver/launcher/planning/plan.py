"""``pserver plan``: the split of a job before it is started, and its predicted step.

The script runs up to its plan, which it prints instead of joining servers.  Then probes run some
of its steps for real, and the cost model converts them to the job in question.

[Note: other modes from a sync probe]  The compute part is the same in every mode.  An async step
waits for the message before it: the longer of compute and exchange counts.  In geo mode a trainer
runs the optimizer itself, which takes as long as the servers' updates, and exchanges every k steps.
Between two probed numbers of servers the figures are interpolated; beyond the larger one they are
those of the larger one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pserver.launcher.cluster import Cluster, JobTokens
from pserver.launcher.planning.cost import (
    Figures,
    JobLoad,
    LaneLoad,
    Measured,
    Prediction,
    Probed,
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
    load: JobLoad, probes: Mapping[int, Probed], servers: int, where: Where, memory: int | None
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


def between(probes: Mapping[int, Probed], servers: int) -> Probed:
    """The figures for a number of servers: between those that were probed."""
    return Probed(
        _between({count: each.alone for count, each in probes.items()}, servers),
        _between({count: each.pair for count, each in probes.items()}, servers),
    )


def _between(probes: Mapping[int, Measured], servers: int) -> Measured:
    below = max(count for count in probes if count <= max(servers, min(probes)))
    above = min((count for count in probes if count >= servers), default=below)
    if above == below:
        return _over(probes[below], servers)
    weight = (servers - below) / (above - below)
    low, high = _over(probes[below], servers), _over(probes[above], servers)

    def mixed(name: str) -> float:
        one, other = getattr(low, name), getattr(high, name)
        return float(one + weight * (other - one))

    def spread(name: str) -> tuple[float, ...]:
        one, other = sum(getattr(low, name)), sum(getattr(high, name))
        return ((one + weight * (other - one)) / servers,) * servers

    return replace(
        low,
        seconds=mixed("seconds"),
        exchange_seconds=mixed("exchange_seconds"),
        cpu_seconds=mixed("cpu_seconds"),
        exchange_cpu_seconds=mixed("exchange_cpu_seconds"),
        server_cpu_seconds=spread("server_cpu_seconds"),
        update_seconds=spread("update_seconds"),
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
        update_seconds=even(measured.update_seconds),
    )


def _in_mode(mode: str, k_steps: int, load: JobLoad, sync: Probed) -> tuple[JobLoad, Probed]:
    if mode == "sync":
        return load, sync
    lanes = tuple(_queued(lane, mode, max(1, k_steps)) for lane in load.lanes)
    alone, pair = (_queueing(mode, k_steps, each) for each in (sync.alone, sync.pair))
    return replace(load, lanes=lanes), Probed(alone, pair)


def _queueing(mode: str, k_steps: int, sync: Measured) -> Measured:
    compute = sync.seconds - sync.exchange_seconds
    if mode == "async":
        return replace(sync, seconds=max(compute, sync.exchange_seconds), exchange_seconds=0.0)
    update = sum(sync.update_seconds)
    sends = sync.exchange_cpu_seconds / k_steps
    served = [
        max(0.0, whole - own) / k_steps
        for whole, own in zip(sync.server_cpu_seconds, sync.update_seconds, strict=True)
    ]
    return replace(
        sync,
        seconds=compute + update + sync.exchange_seconds / k_steps,
        exchange_seconds=0.0,
        cpu_seconds=sync.cpu_seconds - sync.exchange_cpu_seconds + update + sends,
        exchange_cpu_seconds=0.0,
        messages=1 / k_steps,
        server_cpu_seconds=tuple(served),
        update_seconds=(0.0,) * len(served),
        sent=tuple(each / k_steps for each in sync.sent),
        received=tuple(
            (whole - rows) / k_steps + rows
            for whole, rows in zip(sync.received, sync.looked_up, strict=True)
        ),
    )


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


def prediction_text(found: Prediction, probed: Probed) -> str:
    """A line for the step, and a table of its parts.

    Args:
        probed: that on which the prediction stands.
    """
    head = (
        f"predicted step {spelled(found.seconds)}, {1 / found.seconds:.4g} steps/s of each "
        f"trainer; bottleneck: {found.bottleneck}"
    )
    rows = [("part", "of a step", "")]
    for part in found.parts:
        why = f"{part.why}; while the rest goes on" if part.hidden else part.why
        rows.append((part.name, spelled(part.seconds), why))
    alone = probed.alone
    probe = (
        f"from a probe of {alone.steps} steps of {spelled(alone.seconds)}, "
        f"{spelled(alone.exchange_seconds)} of them in the exchange"
    )
    if probed.pair != alone:
        probe += f", and of {probed.pair.steps} of {spelled(probed.pair.seconds)} of two trainers"
    return "\n".join([head, *table(rows), probe, *disturbance([probed])])


def disturbance(probes: Iterable[Probed]) -> list[str]:
    """A warning where other processes have disturbed the probes."""
    others = max(max(each.alone.others, each.pair.others) for each in probes)
    if others < DISTURBING:
        return []
    return [
        f"other processes kept {others:.1f} cores of this machine busy meanwhile: the job "
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
# A probe: the script in one trainer or two, with real servers, for some seconds on this machine.
#
# See [Note: what a probe measures].


ONLY = "PSERVER_PLAN_ONLY"  # read in trainer/environment, as the next four
FILE, SECONDS, END = "PSERVER_PROBE", "PSERVER_PROBE_SECONDS", "PSERVER_PROBE_END"
COUNT = "PSERVER_PROBE_TRAINERS"
ENDLESS = "1000000"  # seconds of a window
TOTAL_SECONDS = 45.0  # of a probe, with the start of its processes
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


FIRST = "trainer 0"


class ProbeFailed(Exception):
    """The probe has given no figures; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A script, and the job that it is meant for.

    Attributes:
        script, arguments: of the trainers.
        servers: of the probe.
        trainers: of the job.
        threads: of each process; 0: one of a server, and trainers divide the other cores, as each
            process is to have a machine of its own.
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

    def load(self, servers: int) -> JobLoad | int:
        """Runs the script up to its plan on so many servers, which it prints; returns the plan's
        loads, or its exit status where it had no plan.
        """
        endpoints = ",".join(f"server-{index}:6174" for index in range(servers))
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "load.json")
            done = subprocess.run(
                [sys.executable, self.script, *self.arguments],
                env={**self.environment, **self._role(endpoints), ONLY: "1", FILE: path},
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

    def measure(self, trainers: int, end: float) -> Measured:
        """Runs the small job.

        Args:
            trainers: of the probe, 1 or 2.
            end: on the monotonic clock; it has ended by then.

        Raises:
            ProbeFailed: a process has failed, or it took too long.
        """
        places = ("127.0.0.1:0",) * self.servers
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
            serve = [sys.executable, "-m", "pserver", "serve", "--once", "--endpoint", places[0]]
            serve += ["--transport", self.transport]
            serve += ["--checksum", "on"] if self.transport == "tcp" else []
            for number in range(self.servers):
                threads = _threads(self.threads or 1)
                run.start(f"server {number}", serve, given | threads | tokens.for_servers)
            endpoints = run.ready()
            threads = _threads(self.threads or max(1, (_cores() - self.servers) // trainers))
            for number in range(trainers):
                run.start(
                    f"trainer {number}",
                    [sys.executable, self.script, *self.arguments],
                    {
                        **given,
                        **threads,
                        **tokens.for_trainers,
                        **self._role(",".join(endpoints)),
                        "TRAINER_ID": str(number),
                        "PSERVER_TRANSPORT": self.transport,
                        COUNT: str(trainers),
                        FILE: str(folder / ("measured.json" if number == 0 else "of another")),
                        # the others train until the first one has its figures
                        SECONDS: f"{self.window:g}" if number == 0 else ENDLESS,
                        END: f"{end - WRITE_SECONDS:.1f}",
                    },
                )
            return run.measured(folder / "measured.json", self.window)


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


@dataclass(frozen=True, slots=True)
class _Sample:
    """Processor time until a moment: of each server, of the trainers, and of the whole machine."""

    time: float
    servers: tuple[float, ...]
    trainers: float
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
        """Waits for trainer 0's file.

        Args:
            window: for how many seconds steps are measured.
        """
        trainer = self._processes[FIRST]
        while trainer.poll() is None:
            self._samples.append(
                _Sample(
                    time.monotonic(),
                    tuple(self._used("server")),
                    sum(self._used("trainer")),
                    busy_seconds(),
                )
            )
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
                f"{self._last(FIRST)}"
            )
        found = self._completed(_read(path, self._end))
        if not found.messages:
            raise ProbeFailed(
                f"no message was sent in {found.steps} steps; a longer --window, or fewer k_steps "
                "for the prediction, see some"
            )
        return found

    def _completed(self, found: Measured) -> Measured:
        """Adds the servers' processor time of a step of the window, and the other processes'."""
        first = min(self._samples, key=lambda sample: abs(sample.time - found.begun))
        last = min(self._samples, key=lambda sample: abs(sample.time - found.ended))
        passed = last.time - first.time
        if not passed:
            return found
        pairs = zip(first.servers, last.servers, strict=True)
        used = [(after - before) / passed for before, after in pairs]
        own = sum(used) + (last.trainers - first.trainers) / passed
        return replace(
            found,
            server_cpu_seconds=tuple(each * found.seconds for each in used),
            others=max(0.0, (last.machine - first.machine) / passed - own),
        )

    def _used(self, role: str) -> Iterator[float]:
        """Processor time of each process of a role."""
        for name, process in self._processes.items():
            if name.startswith(role):
                yield processor_seconds(process.pid)

    def _wait(self, what: str) -> None:
        """Pauses; raises where another process than the first trainer has ended, or the time is
        over.
        """
        for name, process in self._processes.items():
            short = name.startswith("trainer") and process.poll() == 0  # as the first one, then
            if name != FIRST and process.poll() is not None and not short:
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
MOST_PLANNED = 4096  # servers: their endpoints go into one environment variable


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
        figures: the file of the probes' figures, where they are to be kept; "": none.
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
    figures: str = ""

    def where(self, cores: int) -> Where:
        """The machines, each with so many cores."""
        return Where(cores, self.apart, self.link, self.latency)

    @property
    def transport(self) -> str:
        """The transport of a probe: that of hosts, where the job has a link."""
        return "auto" if self.link is None else "tcp"


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
        has no plan; 1 where that is 0, or a search has failed.

    Raises:
        ValueError: there is no such script, or a module beside it hides a package of ours; or
            there is no place for the file of figures, or it is of another job, or of none.
    """
    check_script(script)
    if settings.figures and not (folder := Path(settings.figures).parent).is_dir():
        raise ValueError(f"--figures: expected a file in a folder, and there is no folder {folder}")
    probe = probe_of(script, arguments, settings, environment)
    load = probe.load(settings.servers)
    if load == 0:
        given = f", and was given {shlex.join(arguments)}" if arguments else ""
        print(
            "pserver plan: the script came to its end without a plan, which "
            f"fleet.distributed_optimizer makes, or the start of a transpiled program{given}",
            file=sys.stderr,
        )
        return FAILED
    if isinstance(load, int):
        return load
    return _predict(probe, load, settings) if settings.probes else 0


def probe_of(
    script: str, arguments: Sequence[str], settings: PlanSettings, environment: Mapping[str, str]
) -> Probe:
    """The probe of a job; on one machine its processes have as many threads as the job's."""
    shared = 0 if settings.apart else max(1, _cores() // (settings.servers + settings.trainers))
    threads = environment.get("OMP_NUM_THREADS", "")
    return Probe(
        script,
        tuple(arguments),
        settings.servers,
        settings.trainers,
        int(threads) if threads.isdecimal() else shared,
        settings.transport,
        environment,
        settings.window,
    )


def _predict(probe: Probe, load: JobLoad, settings: PlanSettings) -> int:
    if not load.lanes:
        print("pserver plan: no prediction for a job without servers", file=sys.stderr)
        return 0
    try:
        found = _figures(probe, load, settings)
    except ProbeFailed as failure:
        print(
            f"pserver plan: no prediction, the probe has failed: {failure}; --no-probe leaves it "
            "out",
            file=sys.stderr,
        )
        return FAILED if settings.search else 0
    if settings.search:
        return _search(probe, found, settings)
    (probed,) = found.probes.values()
    print("\n" + prediction_text(predict(load, probed, settings.where(found.cores)), probed))
    return 0


def _figures(probe: Probe, load: JobLoad, settings: PlanSettings) -> Figures:
    """The figures of the file, or of probes, which go there if it is named: for a search of one
    server, and of as many as there may be, if that is more.

    Raises:
        ProbeFailed: a probe has.
        ValueError: the script is in another mode than a search needs, or the file is of other
            probes.
    """
    if settings.search:
        check_modes(load)
    if settings.figures and Path(settings.figures).exists():
        kept = Figures.read(settings.figures)
        check_figures(kept, load, settings)
        return kept
    found = Figures(_cores(), settings.apart, settings.transport, load, {})
    probes = {count: _probed(replace(probe, servers=count)) for count in _counts(found, settings)}
    found = replace(found, probes=probes)
    if settings.figures:
        found.write(settings.figures)
    return found


def _counts(found: Figures, settings: PlanSettings) -> list[int]:
    """The numbers of servers to probe.

    Where each process would have a machine of its own, servers that are probed beside the trainer
    may not take its cores.
    """
    most = max(1, found.cores // 2) if found.apart else MOST_SERVERS
    largest = min(settings.servers, most, MOST_SERVERS)
    return sorted({1, largest}) if settings.search else [largest]


def check_figures(found: Figures, load: JobLoad, settings: PlanSettings) -> None:
    """Returns if figures of a file are those of this job.

    Raises:
        ValueError: they are not; the message says what differs.
    """
    differences = {
        "the plan (the script, its mode, --servers or --trainers)": found.load != load,
        "--link (one has links, the other has none)": found.transport != settings.transport,
        "--hosts": found.apart != settings.apart,
        "--search": sorted(found.probes) != _counts(found, settings),
    }
    for what, differs in differences.items():
        if differs:
            raise ValueError(
                f"--figures: {settings.figures} has figures of another job: {what} differs; remove "
                "it to probe again, or name another file"
            )


def _search(probe: Probe, figures: Figures, settings: PlanSettings) -> int:
    load, probes = figures.load, figures.probes
    where = settings.where(figures.cores)
    found = candidates(load, probes, settings.servers, where, settings.memory)
    print("\n" + candidates_text(found, settings.trainers))
    for line in disturbance(probes.values()):
        print(line)
    if settings.write:
        best = found[0]
        choice = Choice(
            best.mode, best.k_steps, best.servers, load.trainers, best.prediction.seconds
        )
        choice.write(Choice.beside(probe.script))
        print(f"written to {Choice.beside(probe.script)}")
    return 0


def _probed(probe: Probe) -> Probed:
    """One probe of one trainer, and one of two where the job has more than one."""
    measured = []
    for trainers in range(1, min(probe.trainers, 2) + 1):
        counts = f"{_count(trainers, 'trainer')} and {_count(probe.servers, 'server')}"
        print(
            f"probing {counts}, for {TOTAL_SECONDS:.0f} s at most ...", file=sys.stderr, flush=True
        )
        measured.append(probe.measure(trainers, time.monotonic() + TOTAL_SECONDS))
    return Probed(measured[0], measured[-1])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
