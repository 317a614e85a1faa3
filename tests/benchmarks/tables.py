"""Rows: a sparse table beside a plain torch tensor that is indexed by row number; its memory, and
its pauses while it grows.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from harness import Contender, Promise, Row, alternate

from pserver.table.ids import unique
from pserver.table.table import SparseTable, compile_kernels
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table, Uniform

DIM, BATCH, BATCHES = 16, 26 * 512, 40
ADAGRAD = Rule("adagrad", {"lr": 0.05})
TABLE = Table("bench", DIM, (Segment(0, DIM, 0),), initial=Uniform(-0.01, 0.01))
SMALL, LARGE, BEGIN = 10_000_000, 50_000_000, 1_000_000
SETTING = (
    "one process, 1 thread, rows of 16 float32 with Adagrad, batches of 26 x 512 ids, Zipf 1.2"
)
TORCH = "a plain torch tensor indexed by row number, its fastest operations"
AT_SMALL = Promise("table/lookup + Adagrad, 10 M rows", TORCH, 0.8, setting=SETTING)
AT_LARGE = Promise("table/lookup + Adagrad, 50 M rows", TORCH, 0.7, setting=SETTING)
BYTES = Promise(
    "table/bytes per row",
    "values and state alone, 128 bytes",
    1.35,
    "bytes",
    True,
    "memory of the process, 10 M rows",
)
PAUSE = Promise(
    "table/longest pause",
    "100 ms",
    1,
    "ms",
    True,
    "CPU time of updates with 26 x 512 new ids each, from 1 M to 50 M rows",
)
COLD = Promise(
    "table/cold start of the kernels",
    "5 s",
    1,
    "s",
    True,
    "CPU time until a process has a table's kernels where none is cached, with Adagrad",
)
PROMISES = (AT_SMALL, AT_LARGE, BYTES, PAUSE, COLD)
COMPILES = """
import time
from tables import ADAGRAD, TABLE, compile_kernels
began = time.process_time()
compile_kernels(TABLE, [ADAGRAD])
print(time.process_time() - began)
"""
NEEDED = 320  # bytes of memory for a row here and in torch


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    if COLD in wanted:
        yield Row(COLD, statistics.median(_cold() for _ in range(runs)), 5.0, runs)
    if set(wanted) <= {COLD}:
        return
    compile_kernels(TABLE, [ADAGRAD])
    for timed, kept, count in ((AT_SMALL, BYTES, SMALL), (AT_LARGE, PAUSE, LARGE)):
        if timed in wanted or kept in wanted:
            yield from _at(timed, kept, wanted, count // 1000 if tiny else count, runs)


def _cold() -> float:
    """Compiles all kernels of a table in a process of its own: seconds of its processor."""
    with tempfile.TemporaryDirectory() as kept:
        own = {**os.environ, "NUMBA_CACHE_DIR": kept}
        command = [sys.executable, "-c", COMPILES]
        here = Path(__file__).parent
        found = subprocess.run(command, env=own, cwd=here, capture_output=True, check=True)
        return float(found.stdout)


def _at(
    timed: Promise, kept: Promise, wanted: Collection[Promise], count: int, runs: int
) -> Iterator[Row]:
    """A table of this many rows: what is timed, and what is measured while it grows."""
    missing = count * NEEDED - _available()
    if missing > 0:
        why = f"{missing / 1e9:.1f} GB more memory would be needed"
        yield from (Row(promise, skipped=why) for promise in (timed, kept) if promise in wanted)
        return
    before = _resident()
    table, pause = _grown(count)
    if kept in wanted:
        value, bound = ((_resident() - before) / count, 128.0) if kept is BYTES else (pause, 100.0)
        yield Row(kept, value, bound, 1)
    if timed in wanted:
        medians = alternate(_contenders(table, count), runs)
        yield Row(timed, medians["ours"], medians["torch"], runs)


def _grown(count: int) -> tuple[SparseTable, float]:
    """A table with a row for every id below ``count``; and the longest update beyond 1 M rows, in
    ms of this thread's time.
    """
    table, longest = SparseTable(TABLE, [ADAGRAD]), 0.0
    gradient = np.zeros((BATCH, DIM), np.float32)
    order = np.arange(0, count, BATCH)
    for begin in order:
        # 2654435761 is a prime: all ids, scattered
        ids = np.arange(begin, min(begin + BATCH, count)) * 2654435761 % count
        began = time.thread_time()
        table.update(ids, gradient[: len(ids)], [{}])
        if begin >= min(BEGIN, count // 50):
            longest = max(longest, time.thread_time() - began)
    return table, longest * 1e3


def zipf(count: int, below: int, random: np.random.Generator) -> np.ndarray:
    """int64[count]: ranks by Zipf's law with exponent 1.2, cut off at ``below``; rank r is id r *
    2654435761 mod ``below``.
    """
    power = 1 - 1.2
    drawn = (random.random(count) * ((below + 1.0) ** power - 1) + 1) ** (1 / power)
    return np.minimum(drawn.astype(np.int64) - 1, below - 1) * 2654435761 % below


def _contenders(table: SparseTable, count: int) -> dict[str, Contender]:
    """A round of lookups and updates, the same ids for both; milliseconds a batch."""
    random = np.random.default_rng(0)
    batches = [zipf(BATCH, count, random) for _ in range(BATCHES)]
    pushed = [unique(ids)[0] for ids in batches]
    gradients = [random.normal(size=(len(ids), DIM)).astype(np.float32) for ids in pushed]
    found = np.empty((BATCH, DIM), np.float32)

    def ours(index: int) -> None:
        table.lookup(batches[index], found)
        table.update(pushed[index], gradients[index], [{}])

    values, squares = torch.full((count, DIM), 0.01), torch.full((count, DIM), 0.0)
    looked, touched = list(map(torch.from_numpy, batches)), list(map(torch.from_numpy, pushed))
    slopes, read = list(map(torch.from_numpy, gradients)), torch.from_numpy(found)

    def plain(index: int) -> None:
        torch.index_select(values, 0, looked[index], out=read)
        ids, slope = touched[index], slopes[index]
        sums = squares.index_select(0, ids).addcmul_(slope, slope)
        squares.index_copy_(0, ids, sums)
        stepped = values.index_select(0, ids).addcdiv_(slope, sums.sqrt_().add_(1e-10), value=-0.05)
        values.index_copy_(0, ids, stepped)

    return {"ours": _round(ours), "torch": _round(plain)}


def _round(step: Callable[[int], None]) -> Contender:
    def run() -> float:
        began = time.perf_counter()
        for index in range(BATCHES):
            step(index)
        return (time.perf_counter() - began) / BATCHES * 1e3

    return run


def _resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _available() -> int:
    """Bytes of memory that could be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
