"""A row: what metrics add to a step, timed alone, beside the smallest step that there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from harness import Promise, Row, alternate, timed
from jobs import trainer
from processes import server

from pserver.telemetry.metrics import JobSteps
from pserver.telemetry.trace import now
from trainer.communicator.metrics import TrainerSteps

STEP = Promise(
    "wire/metrics of a step",
    "the step",
    0.01,
    most=True,
    setting="1 trainer, 1 server, shm, sync, one tensor of 16 KB; both processes' calls",
)
PROMISES = (STEP,)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """The row, if it is wanted."""
    torch.set_num_threads(1)
    if STEP not in wanted:
        return
    job, own = JobSteps().lane(0), TrainerSteps()
    answered = own.answered(0, 0)

    def added() -> None:
        """What a sync step calls, on the server and on the trainer."""
        began = now()
        job.arrived(0, now() - began)
        job.updated(now())
        job.applied(began)
        job.pushed(refused=False)
        own.closed(0)
        with own.blocked(0):
            pass
        answered(now() - began)

    with server() as (_, endpoint), trainer(endpoint, [4096], "shm") as joined:
        medians = alternate({"added": timed(added), "step": timed(joined.step)}, runs)
    yield Row(STEP, medians["added"], medians["step"], runs)
