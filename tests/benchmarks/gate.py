"""``make bench ONLY=gate``: in some ten minutes, the rows that a change of the engine can spoil.

Of each path that a step takes there is one that shows its cost per byte, per tensor, per row and
per trainer, and what it needs besides time.
"""

from __future__ import annotations

GATE = "gate"
RUNS = 3  # of each contender, unless said otherwise
ROWS = (
    "wire/tcp 16 MB, raw",
    "wire/shm 16 MB, copies",
    "wire/tcp 300 x 1 KB, rpc",
    "wire/tcp sync step, 2 trainers",
    "wire/tcp async step",
    "wire/metrics of a step",
    "wire/tcp fan-in, 64 trainers, async",
    "wire/tcp fan-in, 64 trainers, sync",
    "wire/tcp CPU of both ends",
    "wire/tcp server memory",
    "wire/shm trainer memory",
    "table/pull + push, tcp",
    "table/CTR async step, tcp",
    "table/CTR k-step",
    "survival/record-log, 16 MB model",
    "survival/record-log, 300 tensors of 1 KB",
)


def taken(name: str, only: str) -> bool:
    """Whether ``--only`` takes a row of this name."""
    return name in ROWS if only == GATE else name.startswith(only)
