"""Rows: what sharding costs beyond torch's own, and what a rank holds at each level against the
theory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from harness import Contender, Promise, Row, alternate, timed
from processes import Peer, peers
from transports import free_port

SETTING = "2 ranks on gloo, 12 layers of 1 MB, batch 16, AdamW, 1 thread each"
STEP = Promise("collective/p_g_os", "bare FSDP2, the same units", 0.95, setting=SETTING)
MEMORY = {
    (level, ranks): Promise(
        f"collective/{level} memory, {ranks} ranks",
        formula,
        1.15,
        "MB",
        most=True,
        setting="bytes that tensors hold after a backward and after a step; 12 layers of 1 MB, "
        "Adam",
    )
    for level, formula in (
        ("os", "P + G + 2P/n"),
        ("os_g", "P + (G + 2P)/n"),
        ("p_g_os", "(P + G + 2P)/n + a layer"),
    )
    for ranks in (2, 4)
}
PROMISES = (STEP, *MEMORY.values())
LAYERS = 12


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    width = 32 if tiny else 512
    if STEP in wanted:
        yield _step(width, runs)
    layer = 4 * (width * width + width)
    whole = LAYERS * layer
    for (level, ranks), promise in MEMORY.items():
        if promise in wanted:
            shared = {"os": 2, "os_g": 3, "p_g_os": 4}[level]
            theory = (
                (4 - shared) * whole + shared * whole / ranks + (layer if level == "p_g_os" else 0)
            )
            yield Row(promise, _held(level, ranks, width) / 1e6, theory / 1e6, 1)


def _started(level: str, ranks: int, width: int) -> list[Peer]:
    port = free_port()
    return [Peer("sharded", rank, ranks, port, level, width) for rank in range(ranks)]


def _step(width: int, runs: int) -> Row:
    ours, bare = _started("p_g_os", 2, width), _started("bare", 2, width)
    with peers(*ours, *bare):
        medians = alternate({"ours": _together(ours), "bare": _together(bare)}, runs)
    return Row(STEP, medians["ours"], medians["bare"], runs)


def _together(ranks: list[Peer]) -> Contender:
    """A step of all ranks, in milliseconds."""

    def step() -> None:
        for rank in ranks:
            rank.tell(5)
        for rank in ranks:
            rank.heard()

    run = timed(step)
    return lambda: run() / 5


def _held(level: str, ranks: int, width: int) -> float:
    started = _started(level, ranks, width)
    with peers(*started):
        for rank in started:
            rank.tell("memory")
        return max(float(rank.heard()) for rank in started)
