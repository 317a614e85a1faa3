"""How fast does each mode learn clicks?  The AUC on unseen samples against the seconds of training;
the best there is is known.

::

    python docs/pictures/ctr.py                 alone, and async, sync, k-step with 2 trainers:
                                                docs/ctr.svg
    python docs/pictures/ctr.py --modes alone async --samples 100000

The model is DeepFM of trainer/examples/ctr.py on its generated clicks, with its defaults.  A step
of all trainers together has 512 samples.  Each run is a real job: ``pserver launch`` with one
server.  Evaluations are not in the seconds.  The modes take turns; of each interval between two
evaluations the run counts in which it was shortest, as other work of the machine only adds.  All
runs take some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

import torch

from trainer import fleet
from trainer.examples import ctr
from trainer.examples.ctr import MODES, DeepFM

PICTURE = Path(__file__).parent.parent / "ctr.svg"
BATCH = 512  # of all trainers together
POINTS = 20  # of each curve, but for one more in the first interval
RUNS = 3  # of each mode
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 400, 60, 15, 25, 45  # of the picture, its margins
LOWEST, HIGHEST = 0.78, 0.88  # AUC
TICKS = [digit * 10**power for power in range(4) for digit in (1, 2, 5)]  # seconds between two
COLOURS = ("#000000", "#1f77b4", "#ff7f0e", "#2ca02c")
Curve = list[tuple[float, float]]  # seconds, AUC


def trainer(mode: str, samples: int, out: Path) -> None:
    """One trainer of a run, or the whole of one that trains alone; the first one writes the curve,
    and the AUC of the truth.
    """
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = MODES.get(mode) is not None, MODES.get(mode) or {}
    fleet.init(strategy=strategy)
    trainers = fleet.worker_num()
    asked = ctr.parsed(["--samples", str(samples), "--batch", str(BATCH // trainers)])
    net = DeepFM(asked.dim, asked.hidden, asked.rate, asked.linear_rate)
    model = fleet.distributed_model(net)
    adam = torch.optim.Adam(model.parameters(), lr=asked.dense_rate)
    optimizer = fleet.distributed_optimizer(adam)
    with tempfile.TemporaryDirectory() as folder:
        learned, unseen, truth = ctr.datasets(asked, folder)
        assert unseen is not None
        test, curve, every = unseen, Curve(), samples // BATCH // POINTS
        wanted = {every // 2, *range(every, samples // BATCH + 1, every)}

        class Points(ctr.Progress):
            def step(self, label: torch.Tensor, logits: torch.Tensor) -> None:
                self._steps += 1
                if self._steps in wanted:
                    fleet.barrier_worker()
                    optimizer.flush()
                    stopped = time.perf_counter()
                    curve.append((stopped - self._began, ctr.evaluate(model, test)))
                    fleet.barrier_worker()
                    self._began += time.perf_counter() - stopped

        ctr.train(model, learned, optimizer, Points(every))
    if fleet.is_first_worker():
        out.write_text(json.dumps([curve, truth]))
    fleet.finish()


def run(mode: str, samples: int) -> tuple[Curve, float]:
    """One job, from its start to its results: the curve, and the AUC of the truth."""
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


def shortest(runs: Sequence[Curve]) -> Curve:
    """The curve of one mode: the AUC on average over its runs, and the shortest of their intervals.

    Example:
        >>> shortest([[(1.0, 0.5), (4.0, 0.6)], [(2.0, 0.5), (3.0, 0.6)]])
        [(1.0, 0.5), (2.0, 0.6)]
    """
    ends = zip(*([0.0, *(seconds for seconds, _ in curve)] for curve in runs), strict=True)
    taken = [min(b - a for a, b in zip(*each, strict=True)) for each in pairwise(ends)]
    aucs = [mean(auc for _, auc in points) for points in zip(*runs, strict=True)]
    return list(zip(accumulate(taken), aucs, strict=True))


def place(seconds: float, auc: float, most: float) -> tuple[float, float]:
    """Where a point of a curve is in the picture."""
    across = seconds / most * (WIDTH - LEFT - RIGHT)
    up = (auc - LOWEST) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM)
    return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)


def line(points: Curve, most: float, stroke: str) -> str:
    """A curve as SVG."""
    text = " ".join(f"{x},{y}" for x, y in (place(*point, most) for point in points))
    return f'<polyline points="{text}" fill="none" {stroke}/>'


def label(x: float, y: float, text: str, more: str = "") -> str:
    """A text as SVG."""
    return f'<text x="{x}" y="{y}" {more}>{text}</text>'


def picture(curves: dict[str, Curve], truth: float) -> str:
    """An SVG: one line a run, and one for the truth."""
    most = max(seconds for curve in curves.values() for seconds, _ in curve)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        label(WIDTH / 2, HEIGHT - 8, "seconds of training", 'text-anchor="middle"'),
        label(0, 0, "AUC on unseen samples", 'transform="translate(14 250) rotate(-90)"'),
    ]
    for percent in range(78, 89, 2):
        auc = percent / 100
        parts.append(line([(0, auc), (most, auc)], most, 'stroke="#ddd"'))
        y = place(0, auc, most)[1] + 4
        parts.append(label(LEFT - 6, y, f"{auc:.2f}", 'text-anchor="end"'))
    between = next(each for each in TICKS if most / each <= 8)
    for tick in range(0, int(most) + 1, between):
        x, y = place(tick, LOWEST, most)
        parts.append(label(x, y + 16, f"{tick:,}", 'text-anchor="middle"'))
    whole = {**curves, "the truth itself": [(0, truth), (most, truth)]}
    strokes = [f'stroke="{colour}" stroke-width="1.5"' for colour in COLOURS[: len(curves)]]
    strokes.append('stroke="#888" stroke-dasharray="3 3"')
    for number, ((name, curve), stroke) in enumerate(zip(whole.items(), strokes, strict=True)):
        y = HEIGHT - BOTTOM - 20 * (len(whole) - number)
        seen = [point for point in curve if point[1] >= LOWEST]  # below it the axis ends
        parts.append(line(seen, most, stroke))
        seconds = f" in {curve[-1][0]:,.0f} s" if name in curves else ""
        parts.append(f'<path d="M 370 {y - 4} h 30" {stroke}/>')
        parts.append(label(408, y, f"{name}: {curve[-1][1]:.4f}{seconds}"))
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Runs what is asked for, one job after another, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    modes = ("alone", "async", "sync", "k_step")
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each mode; default: 3")
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--trainer", metavar="MODE", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.trainer:
        trainer(words.trainer, words.samples, words.out)
        return
    runs, truth = dict[str, list[Curve]](), 0.0
    for _ in range(words.runs):
        for mode in words.modes:
            name = mode if mode == "alone" else f"{mode}, 2 trainers"
            curve, truth = run(mode, words.samples)
            runs.setdefault(name, []).append(curve)
            print(f"{name}:", *(f"{seconds:.1f} s {auc:.4f}" for seconds, auc in curve), flush=True)
    words.out.write_text(picture({name: shortest(each) for name, each in runs.items()}, truth))
    print(f"picture: {words.out}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
