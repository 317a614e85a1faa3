"""Rows: what it costs a step that servers deal out the samples."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from harness import Promise, Row, alternate, timed
from jobs import trainer
from processes import server
from torch import nn

from pserver import wire_pb2 as wire
from pserver.client.client import LeaseCalls
from pserver.job_log.own_state import ranges_of
from pserver.lane.leases import JobLeases
from pserver.leases.epoch import Epoch
from pserver.leases.table import LeaseAsked
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership

BATCH = 32  # samples of a step, as in the example of digits
LEASES = Promise(
    "survival/leases",
    "the step",
    0.01,
    most=True,
    setting=f"1 trainer, 1 server, shm; the network of the example of digits, {BATCH} samples a "
    "step; the lease's call by its steps, its check and count in COMMIT; timed alone",
)
PROMISES = (LEASES,)


class Leased:
    """The leases of a trainer, with the messages in which they travel."""

    def __init__(self) -> None:
        job, members = Lifecycle(), Membership(1, 0.0)
        self._lock = job.condition
        self._server, self._member = JobLeases(members, job, 0.0), Member(0, "a", "shm", 0.0)
        members.add(self._member)
        control: Any = SimpleNamespace(lease=self._call)
        self._calls = LeaseCalls(control, lambda ask: ask(""), lambda: None)
        self._asked, self._epoch = 0, Epoch(0, "", "0", 2**40, BATCH)

    def _call(self, request: wire.LeaseRequest, meanwhile: object) -> wire.LeaseReply:
        told = wire.LeaseRequest.FromString(request.SerializeToString())
        reply = self._server.lease(self._member, told)
        return wire.LeaseReply.FromString(reply.SerializeToString())

    def steps(self) -> int:
        """A lease, and the steps that it covers.

        Returns:
            How many these are.
        """
        self._asked += 1
        batches = self._calls.ask(LeaseAsked(self._asked, self._epoch, 64)).cut(BATCH)
        for batch in batches:
            leases = [wire.LeaseRange(epoch=0, start=start, stop=stop) for start, stop in batch]
            said = wire.Commit.FromString(wire.Commit(leases=leases).SerializeToString())
            ranges = ranges_of(said.leases)
            with self._lock:
                self._server.check(0, "a", ranges)
                self._server.decided(0, "a", ranges)
        return len(batches)


def _network() -> nn.Module:
    """That of trainer/examples/digits.py."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """The row of this file, if it is wanted."""
    if LEASES not in wanted:
        return
    torch.set_num_threads(1)
    model, samples = _network(), torch.randn(BATCH, 1, 8, 8)
    labels = torch.randint(10, (BATCH,))
    elements = [each.numel() for each in model.parameters()]
    leased = Leased()

    def lease() -> float:
        began = time.perf_counter()
        steps = leased.steps()
        return (time.perf_counter() - began) / steps * 1e3  # ms

    with server("shm") as (_, endpoint), trainer(endpoint, elements, "shm") as one:

        def step() -> None:
            nn.functional.cross_entropy(model(samples), labels).backward()
            one.step()
            model.zero_grad()

        medians = alternate({"lease": lease, "step": timed(step)}, runs)
    yield Row(LEASES, medians["lease"], medians["step"], runs)
