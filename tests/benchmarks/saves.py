"""Saves beside steps: what the steps of one server notice of a checkpoint that is being written."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Promise, Row

from pserver.job.job_files import Saving
from pserver.job.program import InstalledProgram
from pserver.limits import Limits
from pserver.membership.decisions import Decisions
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from pserver.table.gradient import RowGradient
from pserver.telemetry.memory import resident_bytes
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table, Uniform
from transpiler.plan.plan import Deployment, Lane, Plan

DENSE_BYTES, PARAMETERS = 2**28, 16  # of values; Adam has twice as much of states
ROWS, DIM, BATCH = 10_000_000, 16, 26 * 512
BEFORE = 5.0  # seconds of steps that no save runs beside
ADAM = Rule(
    "adam",
    {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"amsgrad": False, "maximize": False},
)
ADAGRAD = Rule("adagrad", {"lr": 0.05})
SETTING = "one process, 1 thread for steps and 1 for the save, a directory on this machine's disk"
OF_DENSE = f"{SETTING}; 256 MB of parameters with Adam"
OF_ROWS = f"{SETTING}; 10 M rows of 16 float32 with Adagrad, steps of 26 x 512 ids, Zipf 1.2"
ALONE = "steps beside which no save is written"
DENSE_PAUSE = Promise(
    "survival/checkpoint, dense: longest extra step",
    "a copy of all that the server holds",
    1.5,
    most=True,
    setting=OF_DENSE,
)
DENSE_STEP = Promise(
    "survival/checkpoint, dense: mean step", ALONE, 1.1, most=True, setting=OF_DENSE
)
ROWS_PAUSE = Promise(
    "survival/checkpoint, 10 M rows: longest extra step", "100 ms", 1, most=True, setting=OF_ROWS
)
ROWS_STEP = Promise(
    "survival/checkpoint, 10 M rows: mean step", ALONE, 1.1, most=True, setting=OF_ROWS
)
ROWS_MEMORY = Promise(
    "survival/checkpoint, 10 M rows: memory",
    "the process without a save",
    1.1,
    "MB",
    True,
    OF_ROWS,
)
PROMISES = (DENSE_PAUSE, DENSE_STEP, ROWS_PAUSE, ROWS_STEP, ROWS_MEMORY)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    saves = min(runs, 3)
    if {DENSE_PAUSE, DENSE_STEP} & set(wanted):
        yield from _dense(DENSE_BYTES // (256 if tiny else 1), saves, 0.2 if tiny else BEFORE)
    if {ROWS_PAUSE, ROWS_STEP, ROWS_MEMORY} & set(wanted):
        yield from _rows(ROWS // (1000 if tiny else 1), saves, 0.2 if tiny else BEFORE)


def _installed(plan: Plan) -> tuple[InstalledProgram, Membership]:
    program = pserver_program(Deployment(plan, ("h:1",), server_index=0))
    members, job = Membership(1, 0.0), Lifecycle()
    rounds = [lane.kind.waits_for_all for lane in plan.lanes]
    decisions = Decisions(1, 0, rounds, members, lambda process, why: None, job)
    return InstalledProgram(program, members, job, decisions, Limits()), members


@dataclass
class _Steps:
    """What was measured of steps: seconds, and the most memory that the process had."""

    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    def take(self, step: Callable[[], None], until: Callable[[], bool]) -> None:
        while not until() or not self.seconds:
            began = time.perf_counter()
            step()
            self.seconds.append(time.perf_counter() - began)
            self.memory = max(self.memory, resident_bytes())


def _compared(
    installed: InstalledProgram,
    members: Membership,
    step: Callable[[], None],
    saves: int,
    seconds: float,
) -> tuple[list[_Steps], list[_Steps]]:
    """Steps without a save, and steps beside one, in turns."""
    without, beside = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(saves):
            alone, saved = _Steps(), _Steps()
            end = time.perf_counter() + seconds
            alone.take(step, lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
            path = str(Path(folder) / str(number % 2))

            def save(path: str = path) -> None:
                saving = Saving(path, installed, members, continues=True)
                saving.cut()
                saving.write()

            writes = threading.Thread(target=save)
            writes.start()
            saved.take(step, lambda writes=writes: not writes.is_alive())  # type: ignore[misc]
            writes.join()
            without.append(alone)
            beside.append(saved)
    return without, beside


def _extra(without: list[_Steps], beside: list[_Steps]) -> float:
    """By how many milliseconds the longest step is longer beside a save: the median of saves."""
    pairs = zip(without, beside, strict=True)
    return 1e3 * statistics.median(max(b.seconds) - max(a.seconds) for a, b in pairs)


def _mean(steps: list[_Steps]) -> float:
    return 1e3 * statistics.median(statistics.fmean(each.seconds) for each in steps)


def _dense(size: int, saves: int, seconds: float) -> Iterator[Row]:
    rows = size // 4 // PARAMETERS // 256
    named = [(f"p{i}", (rows, 256), "float32", 0) for i in range(PARAMETERS)]
    plan = plan_parameters(named, [ADAM], mode="async", trainers=1, servers=1)
    installed, members = _installed(plan)
    updates = installed.slices.updates
    gradients = {name: torch.full_like(update.value, 0.1) for name, update in updates.items()}

    def step() -> None:
        with installed.quiesce.updating():
            for name, update in updates.items():
                update.update(gradients[name], ADAM.hparams)

    step()
    copies = _copies(installed)
    without, beside = _compared(installed, members, step, saves, seconds)
    yield Row(DENSE_PAUSE, _extra(without, beside), statistics.median(copies), saves)
    yield Row(DENSE_STEP, _mean(beside), _mean(without), saves)


def _copies(installed: InstalledProgram) -> list[float]:
    """Milliseconds of copies of all that the server holds, into memory that is there."""
    source = [tensor.clone() for _, tensor in installed.slices.tensors()]
    target = [tensor.clone() for tensor in source]
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for into, tensor in zip(target, source, strict=True):
            into.copy_(tensor)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def _rows(count: int, saves: int, seconds: float) -> Iterator[Row]:
    table = Table("t", DIM, (Segment(0, DIM, 0),), initial=Uniform(-0.01, 0.01))
    installed, members = _installed(Plan((Lane("async"),), 1, 1, (ADAGRAD,), (), tables=(table,)))
    held = installed.tables["t"]
    hparams: Any = {0: ADAGRAD.hparams}
    for begin in range(0, count, 65536):
        ids = torch.arange(begin, min(begin + 65536, count))
        held.update(RowGradient(ids, torch.zeros(len(ids), DIM)), hparams, {})
    random = np.random.default_rng(0)
    batches = [np.unique(random.zipf(1.2, BATCH) % count) for _ in range(40)]
    gradients = [
        RowGradient(torch.from_numpy(ids), torch.full((len(ids), DIM), 0.01)) for ids in batches
    ]
    turn = iter(range(2**62))

    def step() -> None:
        with installed.quiesce.updating():
            held.update(gradients[next(turn) % len(gradients)], hparams, {})

    before = resident_bytes()
    without, beside = _compared(installed, members, step, saves, seconds)
    yield Row(ROWS_PAUSE, _extra(without, beside), 100.0, saves)
    yield Row(ROWS_STEP, _mean(beside), _mean(without), saves)
    most = max(each.memory for each in beside)
    yield Row(ROWS_MEMORY, most / 1e6, before / 1e6, saves)
