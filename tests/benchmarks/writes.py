"""Rows: what it costs a step to see whether the script has written into parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from harness import Promise, Row, alternate, timed
from jobs import trainer
from processes import server

from trainer.senders.sync_lane import SyncSender

MODEL = "16 MB in 8 tensors, 1 thread"
LOOKING = Promise(
    "writes/looking for them",
    "the step",
    0.005,
    most=True,
    setting=f"1 trainer, 1 server, sync, shm; {MODEL}; timed alone, on average over steps",
)
PROMISES = (LOOKING,)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """The row of this file, if it is wanted."""
    if LOOKING not in wanted:
        return
    torch.set_num_threads(1)
    elements = [2**10 if tiny else 2**19] * 8
    with server("shm") as (_, endpoint), trainer(endpoint, elements, "shm") as one:
        senders = [s for s in one.communicator.lanes if isinstance(s, SyncSender)]
        for _ in range(4):  # the first steps compare everything
            one.step()

        def look() -> None:
            for sender in senders:
                sender.begin()
                sender.writes.end_step()

        medians = alternate({"looking": timed(look), "step": timed(one.step)}, runs)
    yield Row(LOOKING, medians["looking"], medians["step"], runs)
