"""Several jobs of a process, one after the other: what is open after each of them.

``several_jobs.py KIND...``, in a trainer's environment, or in none for "spawn" and "programs";
prints a line of JSON for each job.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import DistributedEmbedding, fleet, spawn
from transpiler import DistributedStrategy

JOBS = 3
SETTLE_SECONDS = 10.0  # until threads have ended that nobody waits for
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 1}},
    "merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}},
    "dgc": {"dgc": True},
    "rows": {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
    },
    "replicas": {"hybrid_configs": {"dp_degree": 2}},
    "shards": {"sharding": True, "sharding_configs": {"sharding_degree": 2}},
}


SERVED: dict[str, tuple[bool, dict[str, Any]]] = {
    "sync": (False, {}),
    "async": (True, {}),
    "staleness": (True, {"staleness": 2}),
    "k-step": (True, {"k_steps": 2}),
    "mixed": (False, {"modes": {"rows*": "sync", "*": "collective"}}),
    "failed on servers": (False, {}),
}


class Net(nn.Module):
    """A layer behind rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = DistributedEmbedding(4, name="rows"), nn.Linear(4, 2)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.rows(torch.arange(3))).sum()
        return out


def strategy_of(kind: str) -> DistributedStrategy:
    strategy = DistributedStrategy()
    if kind in SERVED:
        strategy.a_sync, strategy.a_sync_configs = SERVED[kind]
    for name, value in KINDS.get(kind, {}).items():
        setattr(strategy, name, value)
    return strategy


def train(kind: str) -> None:
    """Two steps, values that all trainers have, and the end; or a failure in the middle."""
    fleet.init(is_collective=True, strategy=strategy_of(kind))
    try:
        model = fleet.distributed_model(nn.Linear(4, 2))
        optimizer = fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert fleet.all_gather_object(fleet.worker_index()) == [0, 1]
        if kind == "failed":
            raise ArithmeticError("of the script")
    finally:
        fleet.finish()


def serve(kind: str) -> None:
    """Some steps with servers, a barrier, and the end; or a failure."""
    fleet.init(strategy=strategy_of(kind))
    try:
        model = fleet.distributed_model(Net())
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        fleet.barrier_worker()
        if kind == "failed on servers":
            raise ArithmeticError("of the script")
    finally:
        fleet.finish()


def programs() -> None:
    """Two trainers of a program without servers, as threads of this process."""
    from tests.support.collective_trainers import GRAD, Trainer, batches, fine, ports, together

    endpoints, data = ports(2), batches(2, 2)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    fine(together(2, lambda rank: team[rank].train([row[rank] for row in data])))


def refused() -> None:
    """A job that is none: its strategy contradicts itself."""
    try:
        fleet.init(is_collective=True, strategy=strategy_of("dgc"), every=1.0)
    except ValueError:
        return
    raise AssertionError("every: expected a ValueError without a checkpoint")


def job(kind: str) -> None:
    if kind == "spawn":
        spawn(torch.set_num_threads, (1,), nprocs=2, start_method="forkserver")
    elif kind == "programs":
        programs()
    elif kind == "refused":
        refused()
    else:
        try:
            (serve if kind in SERVED else train)(kind)
        except ArithmeticError:
            assert kind.startswith("failed")


def opened() -> dict[str, int]:
    """How many threads, descriptors and pieces of shared memory this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": sum("/dev/shm/" in line or "memfd:" in line for line in maps),
    }


def settled(most: dict[str, int] | None) -> dict[str, int]:
    """The same when it is at most so many; without that when it does not change any more."""
    end, before = time.monotonic() + SETTLE_SECONDS, opened()
    while time.monotonic() < end:
        time.sleep(0.1)
        now = opened()
        if all(now[key] <= most[key] for key in most) if most else now == before:
            return now
        before = now
    return before


def main() -> None:
    torch.set_num_threads(1)
    for kind in sys.argv[1:]:
        first: dict[str, int] | None = None
        for _ in range(JOBS):
            job(kind)
            found = settled(first)
            first = first or found
            print("OPEN " + json.dumps([kind, found]), flush=True)


main()
