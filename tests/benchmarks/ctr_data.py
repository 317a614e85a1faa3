"""The click model of the benchmarks: its sizes, and batches for it.

Numpy alone: Paddle's interpreter has no torch.
"""

from __future__ import annotations

import numpy as np

SLOTS, BATCH, DIM, WIDTH = 26, 512, 16, 400
ROWS = 10_000_000  # of all slots together
ZIPF = 1.2
DIFFERENT = 200  # batches; then they come again
PRIME = 2654435761  # scatters ranks over a slot's rows


def batches(
    seed: int, rows: int = ROWS, count: int = DIFFERENT
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of ids, int64 [batch, slots], each slot's in a range of its own, and labels, float32
    [batch, 1].
    """
    random, of_slot = np.random.default_rng(seed), rows // SLOTS
    power = 1.0 - ZIPF
    top = (of_slot + 1.0) ** power
    found = []
    for _ in range(count):
        ranks = (1.0 + random.random((BATCH, SLOTS)) * (top - 1.0)) ** (1.0 / power)
        ids = (
            np.minimum(ranks.astype(np.int64) - 1, of_slot - 1) * PRIME % of_slot
            + np.arange(SLOTS) * of_slot
        )
        found.append((ids, (random.random((BATCH, 1)) < 0.3).astype(np.float32)))
    return found
