"""Does every update mode learn as well as one process alone?  Handwritten digits, the same number
of samples for all.

All runs use the same learning rate, the one that is right for one process, and it falls linearly.
At a constant rate Adam's loss has spikes, and a last step inside a spike says nothing about a mode.
The picture shows the model that the servers hold at the end.  In most modes the trainers hold the
same model.  In geo a trainer's own parameters include changes that have not left it yet.

::

    python docs/pictures/convergence.py         every mode, 2 and 4 trainers: docs/convergence.svg
    python docs/pictures/convergence.py --modes sync geo --trainers 2 --epochs 5

Each run is a real job: ``pserver launch`` with one server.  All runs take some minutes.  The
picture needs matplotlib, of the extra ``docs``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import fleet

OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.5}
MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {},
    "half-async": {"half_async": True, "max_merge_var_num": 2},
    "staleness 3": {"staleness": 3},
    "delay-compensated": {"dc_asgd": 0.1, "send_queue_size": 1},
    "geo, k = 5": {"k_steps": 5},
    "DiLoCo, k = 5": {"k_steps": 5, "outer_optimizer": OUTER},
}
RATE = 2e-3
BATCH = 32  # of all trainers together
SERVER = Path(__file__)
PICTURE = Path(__file__).parent.parent / "convergence.svg"


def data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1437 samples to learn from, and the images and labels of 360 to be judged by."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learn, judge = order[:1437], order[1437:]
    return TensorDataset(images[learn], labels[learn]), images[judge], labels[judge]


def network() -> nn.Module:
    """Two convolutions and two matrices."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def trainer(mode: str, epochs: int, out: Path) -> None:
    """One trainer of a run, or the whole of one that trains alone; the first one writes its losses
    and the accuracy.
    """
    strategy = None
    if MODES.get(mode) is not None:
        strategy = fleet.DistributedStrategy()
        strategy.a_sync, strategy.a_sync_configs = True, MODES[mode]
    fleet.init()
    learn, images, labels = data()
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=RATE), strategy)
    steps = epochs * len(learn) // BATCH
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    loader = DataLoader(learn, batch_size=BATCH // fleet.worker_num(), shuffle=True)
    began, samples, curve = time.perf_counter(), 0, []
    for _ in range(epochs):
        for x, y in fleet.shard(loader, seed=0):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            samples += len(y) * fleet.worker_num()
            curve.append((samples, time.perf_counter() - began, loss.item()))
    fleet.barrier_worker()
    optimizer.flush()  # what this trainer has changed,
    fleet.barrier_worker()  # and all others
    if fleet.is_first_worker():
        if optimizer.communicator is not None:
            optimizer.communicator.pull()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        out.write_text(json.dumps({"accuracy": accuracy, "curve": curve}))
    fleet.finish()


def run(mode: str, trainers: int, epochs: int) -> dict[str, Any]:
    """One job, from its start to its results."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        script = [
            str(Path(__file__).resolve()),
            "--trainer",
            mode,
            "--epochs",
            str(epochs),
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
            str(trainers),
            "--log-dir",
            scratch,
        ]
        subprocess.run(
            [sys.executable, *(launch if trainers else []), *script],
            check=True,
            capture_output=True,
            timeout=600,
        )
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss against samples and against seconds, one line a run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "convergence"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 6), sharey=True, layout="constrained")
    for name, result in results.items():
        window = torch.tensor(result["curve"]).unfold(0, min(40, len(result["curve"])), 1).mean(-1)
        for panel, column in zip(panels, (0, 1), strict=True):
            style = "k-" if name == "alone" else "--" if "4 trainers" in name else "-"
            panel.plot(
                window[:, column],
                window[:, 2],
                style,
                linewidth=1,
                label=f"{name}: {result['accuracy']:.3f}",
            )
    for panel, words in zip(panels, ("samples", "seconds"), strict=True):
        panel.set(xlabel=words, yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("training loss (running mean)")
    title = (
        f"Adam, its rate falling from {RATE:g} in every mode; behind each name the accuracy "
        "of what the servers hold at the end"
    )
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main() -> None:
    """Runs what is asked for, one job after another, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--trainers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--trainer", metavar="MODE", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.trainer:
        trainer(words.trainer, words.epochs, words.out)
        return
    results = {"alone": run("sync", 0, words.epochs)}
    print(f"alone: accuracy {results['alone']['accuracy']:.4f}", flush=True)
    for trainers in words.trainers:
        for mode in words.modes:
            name = f"{mode}, {trainers} trainers"
            results[name] = run(mode, trainers, words.epochs)
            behind = results["alone"]["accuracy"] - results[name]["accuracy"]
            print(
                f"{name}: accuracy {results[name]['accuracy']:.4f} ({-100 * behind:+.1f} points)",
                flush=True,
            )
    draw(results, words.out)
    print(f"picture: {words.out}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
