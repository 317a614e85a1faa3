"""``pserver plan``: the split of a job that nobody has started, and the step that it would take.

The script runs up to its plan, which it prints instead of joining servers.  Then a probe runs some
of its steps for real, and the cost model says what they become in the job that is asked for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pserver.launcher.planning.candidates import candidates, check_modes
from pserver.launcher.planning.choice import Choice
from pserver.launcher.planning.cost import Where, predict
from pserver.launcher.planning.figures import JobLoad, Measured
from pserver.launcher.planning.prediction_text import candidates_text, disturbance, prediction_text
from pserver.launcher.planning.probe import (
    MOST_SERVERS,
    TOTAL_SECONDS,
    WINDOW_SECONDS,
    Probe,
    ProbeFailed,
)

INTERRUPTED = 130
FAILED = 1


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What ``pserver plan`` is asked.

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
        ValueError: there is no such script.
    """
    if not Path(script).is_file():
        raise ValueError(f"no script at {script!r}")
    probe = probe_of(script, arguments, settings, environment)
    try:
        load = probe.load()
        if isinstance(load, int):
            return load
        return _predict(probe, load, settings) if settings.probes else 0
    except KeyboardInterrupt:
        return INTERRUPTED


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
