"""What the job's log costs a step: whole jobs of this tree and of one from before it, in turns.

::

    git worktree add /tmp/before c5436c8^
    python tests/benchmarks/log_cost.py --before /tmp/before --runs 7
    python tests/benchmarks --keep

Before the log each server decided by itself whether a step counts.  Now a step counts on all
servers or on none: with two of them one small message goes each way.  No part of ``make bench``, as
it needs the other tree.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import Contender, Promise, Row, alternate
from kept import ROOT, now, write

OUTPUT = ROOT / "build" / "bench.json"
PATIENCE_SECONDS = 120.0
BEFORE = "the same job without the log"
SETTING = "1 trainer, 2 servers, the transport that launch takes, SGD, 1 thread each"
WIDE, SMALL = "16 MB model", "300 tensors of 1 KB"
PROMISES = {
    (mode, what): Promise(
        f"survival/log, {mode}, {what}", BEFORE, target, most=True, setting=SETTING
    )
    for mode in ("sync", "async")
    for what, target in ((WIDE, 1.05), (SMALL, 1.25))
}
SCRIPT = f"""
import statistics, sys, time
import torch
from torch import nn
from trainer import fleet

mode, what = sys.argv[1:]
torch.manual_seed(0)
strategy = fleet.DistributedStrategy()
if mode == "async":
    strategy.a_sync, strategy.a_sync_configs = True, {{"send_queue_size": 1}}
fleet.init(strategy=strategy)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ParameterList([nn.Parameter(torch.randn(256)) for _ in range(300)])

    def forward(self, x):
        return sum((each * each).sum() for each in self.each)


if what == {WIDE!r}:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
else:
    model = Small()
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
x, times = torch.randn(16, 1024), []
for _ in range(160):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
print("a step takes", 1e3 * statistics.median(times[40:]), "ms", flush=True)
fleet.finish()
"""


def job(tree: Path, mode: str, what: str) -> Contender:
    """A run is one job of that tree; it gives the milliseconds of a step."""

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(SCRIPT)
            launch = (sys.executable, "-m", "pserver", "launch", "--servers", "2")
            words = [*launch, "--trainers", "1", "--log-dir", folder, str(script), mode, what]
            done = subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
            )
            found = re.search(r"a step takes (\S+) ms", done.stdout)
            if found is None:
                raise RuntimeError(f"the job of {tree} has failed: {done.stdout}{done.stderr}")
            return float(found[1])

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the rows where ``make bench`` does."""
    parser = argparse.ArgumentParser(
        description="Measures what the job's log costs a step.", allow_abbrev=False
    )
    parser.add_argument("--before", type=Path, required=True, help="a tree without the log")
    parser.add_argument("--runs", type=int, default=7, help="jobs of each tree")
    arguments = parser.parse_args(argv)
    rows = []
    for (mode, what), promise in PROMISES.items():
        jobs = {"now": job(ROOT, mode, what), "before": job(arguments.before, mode, what)}
        medians = alternate(jobs, arguments.runs)
        rows.append(row := Row(promise, medians["now"], medians["before"], arguments.runs))
        print(f"{promise.name}: {row.value:.4g} ms, before {row.baseline:.4g}, {row.ratio:.3f}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    write(OUTPUT, [{**row.plain(), **now()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
