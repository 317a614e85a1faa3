"""How fast does each mode learn clicks?  The AUC on unseen samples against the samples learned
from; the best there is is known.

::

    python docs/pictures/ctr.py                 alone, and async, sync, k-step with 2 trainers:
                                                docs/ctr.svg
    python docs/pictures/ctr.py --modes alone async --samples 100000

The model is DeepFM of trainer/examples/ctr.py on its generated clicks, with its defaults.  A step
of all trainers together has 512 samples.  Each run is a real job: ``pserver launch`` with one
server.  All runs take some minutes.  The picture needs matplotlib (``pip install matplotlib``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer import fleet
from trainer.examples.clicks import Generated, auc
from trainer.examples.ctr import MODES, DeepFM, evaluate

PICTURE = Path(__file__).parent.parent / "ctr.svg"
BATCH = 512  # of all trainers together
POINTS = 10  # of each curve
CATEGORIES, DIM, HIDDEN, RATE, LINEAR_RATE, DENSE_RATE = 2000, 16, 128, 0.01, 0.05, 1e-3
UNSEEN = Generated(20_000, 4096, CATEGORIES, seed=1)


def trainer(mode: str, samples: int, out: Path) -> None:
    """One trainer of a run, or the whole of one that trains alone; the first one writes the
    curve.
    """
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = MODES.get(mode) is not None, MODES.get(mode) or {}
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(DeepFM(DIM, HIDDEN, RATE, LINEAR_RATE))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=DENSE_RATE))
    trainers = fleet.worker_num()
    clicks = Generated(samples, BATCH // trainers, CATEGORIES).shard(fleet.worker_index(), trainers)
    curve, every = [(0, 0.5)], len(clicks) // POINTS
    for step, (label, numbers, ids) in enumerate(clicks, start=1):
        loss = F.binary_cross_entropy_with_logits(model(numbers, ids), label)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            fleet.barrier_worker()
            optimizer.flush()
            if fleet.is_first_worker():
                curve.append((step * BATCH, evaluate(model, UNSEEN)))
            fleet.barrier_worker()
    if fleet.is_first_worker():
        out.write_text(json.dumps(curve))
    fleet.finish()


def run(mode: str, samples: int) -> list[tuple[int, float]]:
    """One job, from its start to its results."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "curve.json"
        script = [
            str(Path(__file__).resolve()),
            "--trainer",
            mode,
            "--samples",
            str(samples),
            "--out",
            str(out),
        ]
        launch = [
            "-m",
            "pserver",
            "launch",
            "--servers",
            "1",
            "--trainers",
            "2",
            "--log-dir",
            scratch,
        ]
        command = [sys.executable, *(launch if mode != "alone" else []), *script]
        subprocess.run(command, check=True, capture_output=True, timeout=1800)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def best() -> float:
    """The AUC of the true logits."""
    labels, logits = zip(
        *((batch[0].numpy(), truth) for batch, truth in UNSEEN.with_truth()), strict=True
    )
    return auc(np.concatenate(labels), np.concatenate(logits))


def draw(curves: dict[str, list[Any]], path: Path) -> None:
    """One line a run, and one for the truth."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5))
    for name, curve in curves.items():
        samples, scores = zip(*curve, strict=True)
        panel.plot(
            samples,
            scores,
            "k--" if name == "alone" else "-",
            marker=".",
            label=f"{name}: {scores[-1]:.4f}",
        )
    panel.axhline(best(), color="gray", linestyle=":", label=f"the truth itself: {best():.4f}")
    panel.set(xlabel="samples", ylabel="AUC on 20 000 unseen samples")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Runs what is asked for, one job after another, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = ("alone", "async", "sync", "k_step")
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--trainer", metavar="MODE", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.trainer:
        trainer(words.trainer, words.samples, words.out)
        return
    curves = {}
    for mode in words.modes:
        name = mode if mode == "alone" else f"{mode}, 2 trainers"
        curves[name] = run(mode, words.samples)
        print(f"{name}: AUC {curves[name][-1][1]:.4f}", flush=True)
    draw(curves, words.out)
    print(f"the truth itself: {best():.4f}; picture: {words.out}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
