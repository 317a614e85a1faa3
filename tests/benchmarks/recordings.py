"""What steps cost whose server records the job's log."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

import torch
from harness import Promise, Row, alternate, timed
from jobs import trainer
from processes import server

SETTING = "1 trainer, 1 server over tcp, sync, SGD, 1 thread each, files on this machine's disk"
WITHOUT = "the same step, of which nothing is recorded"
LARGE = Promise(
    "survival/record-log, 16 MB model", WITHOUT, 2.0, most=True, setting=f"{SETTING}; 2 parameters"
)
SMALL = Promise(
    "survival/record-log, 300 tensors of 1 KB", WITHOUT, 1.5, most=True, setting=SETTING
)
PROMISES = (LARGE, SMALL)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    if LARGE in wanted:
        yield _compared(LARGE, [2**21 // (256 if tiny else 1)] * 2, runs)
    if SMALL in wanted:
        yield _compared(SMALL, [256] * (30 if tiny else 300), runs)


def _compared(promise: Promise, elements: Sequence[int], runs: int) -> Row:
    """Steps with a recorded log and without, in turns."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        contenders = {}
        for name, flags in (("recorded", ("--record-log", folder)), ("plain", ())):
            _, endpoint = stack.enter_context(server("tcp", flags=flags))
            contenders[name] = timed(stack.enter_context(trainer(endpoint, elements, "tcp")).step)
        medians = alternate(contenders, runs)
    return Row(promise, medians["recorded"], medians["plain"], runs)
