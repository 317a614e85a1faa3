"""What a job loses whose trainers are killed again and again: ``launch --max-restarts``, whole
processes.

Both figures come from one job: its steps before the first kill, and those from the first kill to
the end of the last one's period.  A step counts when its result is back at its trainer.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from harness import Promise, Row

PERIOD, KILLS = 52.0, 11  # seconds between two kills, 69 in an hour, for ten minutes
START_SECONDS = 60.0
PROMISE = Promise(
    "survival/a trainer killed every 52 s: a step",
    "the same job before the first kill",
    0.95,
    setting="2 trainers, 1 server, async over shm, a dense layer of 1 M weights, 1 thread each; "
    "launch starts the killed one again",
)
PROMISES = (PROMISE,)
SCRIPT = """
import os, struct, sys
import torch
from trainer import fleet

folder, stop = sys.argv[1:]
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
strategy.a_sync_configs = {"send_queue_size": 1}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(1000, 1000))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
name = f"{folder}/{fleet.worker_index()}-{os.getpid()}"
counter, taken = os.open(name, os.O_CREAT | os.O_RDWR), 0
x = torch.randn(256, 1000)
while not os.path.exists(stop):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    taken += 1
    os.pwrite(counter, struct.pack("q", taken), 0)
fleet.finish()
"""


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    period, kills = (2.0, 1) if tiny else (PERIOD, KILLS)
    with tempfile.TemporaryDirectory() as folder:
        yield _killed(Path(folder), period, kills)


def _killed(folder: Path, period: float, kills: int) -> Row:
    counters, stop = folder / "steps", folder / "stop"
    counters.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    flags = ("--servers", "1", "--trainers", "2", "--max-restarts", str(kills))
    launch = (sys.executable, "-m", "pserver", "launch", *flags, "--log-dir", str(folder / "logs"))
    words = [*launch, str(folder / "train.py"), str(counters), str(stop)]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL) as job:
        try:
            _wait_for_both(counters)
            alone = _milliseconds(counters, period)
            began, before = time.monotonic(), _taken(counters)
            for _ in range(kills):
                os.kill(_newest(counters, 1), signal.SIGKILL)
                time.sleep(period)  # what is measured
            elapsed = time.monotonic() - began
            steps = _taken(counters) - before
        finally:
            stop.touch()
            if job.wait(START_SECONDS):
                raise RuntimeError(f"the job ended with status {job.returncode}")
    return Row(PROMISE, 1e3 * elapsed / steps, alone, kills)


def _wait_for_both(counters: Path) -> None:
    """Until each trainer has taken some steps."""
    end = time.monotonic() + START_SECONDS
    while min((_count(path) for path in counters.iterdir()), default=0) < 20 or (
        len(list(counters.iterdir())) < 2
    ):
        if time.monotonic() > end:
            raise RuntimeError(f"the trainers have not begun within {START_SECONDS:g} s")
        time.sleep(0.1)


def _milliseconds(counters: Path, seconds: float) -> float:
    """Of a step, over all trainers."""
    began, before = time.monotonic(), _taken(counters)
    time.sleep(seconds)
    return 1e3 * (time.monotonic() - began) / (_taken(counters) - before)


def _taken(counters: Path) -> int:
    """Steps of all trainers, those of killed ones too."""
    return sum(_count(path) for path in counters.iterdir())


def _count(path: Path) -> int:
    content = path.read_bytes()
    return int(struct.unpack("q", content)[0]) if len(content) == 8 else 0


def _newest(counters: Path, trainer: int) -> int:
    """The process id of a trainer's last start."""
    own = [path for path in counters.iterdir() if path.name.startswith(f"{trainer}-")]
    newest = max(own, key=lambda path: path.stat().st_mtime)
    found = re.fullmatch(r"\d+-(\d+)", newest.name)
    assert found is not None, newest
    return int(found[1])
