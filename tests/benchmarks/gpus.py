"""Rows: a trainer that computes on a GPU, beside plain torch there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

import torch
from ctr import MODEL as CLICKS
from ctr_data import ROWS
from harness import Contender, Promise, Row, alternate
from processes import Peer, peers, server
from steps import together

THREADS = 4  # of the server
BATCH = 32_768
MODEL = f"16 MB model of two wide layers, batch {BATCH:,}, SGD; 1 trainer, 1 server of {THREADS}"
COPIED = Promise(
    "gpu/sync step",
    "plain torch on the GPU, its gradients copied to pinned memory and its parameters back",
    None,
    setting=f"{MODEL} threads, shm",
)
SYNC = Promise(
    "gpu/sync step, overlap",
    COPIED.against,
    None,
    setting=f"{MODEL} threads, shm; gradients leave during the backward",
)
ASYNC = Promise(
    "gpu/async step",
    "plain torch on the GPU",
    None,
    setting=f"{MODEL} threads, shm; until every step is applied",
)
ROWS_ASYNC = Promise(
    "gpu/CTR async step",
    "the same model in plain torch on the GPU, nn.Embedding(sparse=True) there",
    None,
    setting=f"1 trainer, 1 server, until every step is applied; {CLICKS}",
)
PROMISES = (COPIED, SYNC, ASYNC, ROWS_ASYNC)
CONFIGS = {COPIED: "", SYNC: "overlap=1", ASYNC: "k_steps=0"}


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    if not torch.cuda.is_available():
        yield from (Row(promise, skipped="no CUDA device") for promise in wanted)
        return
    if chosen := [promise for promise in CONFIGS if promise in wanted]:
        yield from _dense(chosen, runs, *((64, 64) if tiny else (2048, BATCH)))
    if ROWS_ASYNC in wanted:
        yield _clicks(runs, *((26_000, 5) if tiny else (ROWS, 40)))


def _dense(chosen: Sequence[Promise], runs: int, width: int, rows: int) -> Iterator[Row]:
    """Our trainers in turn with torch alone, with and without copies."""
    with ExitStack() as stack:
        groups = {
            name: [Peer("plain_on_gpu", width, rows, copied)]
            for copied, name in enumerate(("alone", "copied"))
        }
        for promise in chosen:
            _, endpoint = stack.enter_context(server("shm", THREADS))
            arguments = (0, 1, endpoint, "shm", width, CONFIGS[promise], "cuda:0", rows)
            groups[promise.name] = [Peer("trainer", *arguments)]
        stack.enter_context(peers(*(peer for group in groups.values() for peer in group)))
        medians = alternate({name: together(group, 20) for name, group in groups.items()}, runs)
    for promise in chosen:
        other = "alone" if promise is ASYNC else "copied"
        yield Row(promise, medians[promise.name], medians[other], runs)


def _clicks(runs: int, rows: int, steps: int) -> Row:
    """A click model whose rows a server holds, in turn with one whose rows are on the GPU."""

    def turn(peer: Peer) -> Contender:
        return lambda: float(peer.ask(steps).split()[0]) / steps * 1e3

    with ExitStack() as stack:
        _, endpoint = stack.enter_context(server("shm"))
        ours = Peer("ctr_trainer", 0, 1, endpoint, "shm", "async", rows, "adagrad", 1, "cuda:0")
        alone = Peer("ctr_plain", 0, rows, "adagrad", "cuda:0")
        stack.enter_context(peers(ours, alone))
        medians = alternate({"ours": turn(ours), "alone": turn(alone)}, runs)
    return Row(ROWS_ASYNC, medians["ours"], medians["alone"], runs)
