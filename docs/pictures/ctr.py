"""How fast does each mode learn clicks?  The AUC on unseen samples against the samples learned
from; the best there is is known.

::

    python docs/pictures/ctr.py                 alone, and async, sync, k-step with 2 trainers:
                                                docs/ctr.svg
    python docs/pictures/ctr.py --modes alone async --samples 100000

The model is DeepFM of trainer/examples/ctr.py on its generated clicks, with its defaults.  A step
of all trainers together has 512 samples.  Each run is a real job: ``pserver launch`` with one
server.  All runs take some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from trainer import fleet
from trainer.examples import ctr
from trainer.examples.ctr import MODES, DeepFM

PICTURE = Path(__file__).parent.parent / "ctr.svg"
BATCH = 512  # of all trainers together
POINTS = 10  # of each curve
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 400, 60, 15, 15, 45  # of the picture, its margins
LOWEST, HIGHEST = 0.5, 0.9  # AUC
COLOURS = ("#000000", "#1f77b4", "#ff7f0e", "#2ca02c")
Curve = list[tuple[int, float]]


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
        test, curve, every = unseen, [(0, 0.5)], samples // BATCH // POINTS

        class Points(ctr.Progress):
            def step(self, label: torch.Tensor, logits: torch.Tensor) -> None:
                self._steps += 1
                if self._steps % every == 0:
                    fleet.barrier_worker()
                    optimizer.flush()
                    curve.append((self._steps * BATCH, ctr.evaluate(model, test)))

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


def place(samples: float, auc: float, most: int) -> tuple[float, float]:
    """Where a point of a curve is in the picture."""
    across = samples / most * (WIDTH - LEFT - RIGHT)
    up = (auc - LOWEST) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM)
    return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)


def line(points: Curve, most: int, stroke: str) -> str:
    """A curve as SVG."""
    text = " ".join(f"{x},{y}" for x, y in (place(*point, most) for point in points))
    return f'<polyline points="{text}" fill="none" {stroke}/>'


def label(x: float, y: float, text: str, more: str = "") -> str:
    """A text as SVG."""
    return f'<text x="{x}" y="{y}" {more}>{text}</text>'


def picture(curves: dict[str, Curve], truth: float) -> str:
    """An SVG: one line a run, and one for the truth."""
    most = max(samples for curve in curves.values() for samples, _ in curve)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        label(WIDTH / 2, HEIGHT - 8, "samples", 'text-anchor="middle"'),
        label(0, 0, "AUC on unseen samples", 'transform="translate(14 250) rotate(-90)"'),
    ]
    for tenth in range(5, 10):
        parts.append(line([(0, tenth / 10), (most, tenth / 10)], most, 'stroke="#ddd"'))
        y = place(0, tenth / 10, most)[1] + 4
        parts.append(label(LEFT - 6, y, f"{tenth / 10}", 'text-anchor="end"'))
    for fifth in range(6):
        x, y = place(most * fifth / 5, LOWEST, most)
        parts.append(label(x, y + 16, f"{most * fifth / 5:,.0f}", 'text-anchor="middle"'))
    whole = {**curves, "the truth itself": [(0, truth), (most, truth)]}
    strokes = [f'stroke="{colour}" stroke-width="1.5"' for colour in COLOURS[: len(curves)]]
    strokes.append('stroke="#888" stroke-dasharray="3 3"')
    for number, ((name, curve), stroke) in enumerate(zip(whole.items(), strokes, strict=True)):
        y = HEIGHT - BOTTOM - 20 * (len(whole) - number)
        parts.append(line(curve, most, stroke))
        parts.append(f'<path d="M 400 {y - 4} h 30" {stroke}/>')
        parts.append(label(438, y, f"{name}: {curve[-1][1]:.4f}"))
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
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--trainer", metavar="MODE", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.trainer:
        trainer(words.trainer, words.samples, words.out)
        return
    curves, truth = dict[str, Curve](), 0.0
    for mode in words.modes:
        name = mode if mode == "alone" else f"{mode}, 2 trainers"
        curves[name], truth = run(mode, words.samples)
        print(f"{name}: AUC {curves[name][-1][1]:.4f}, the truth itself {truth:.4f}", flush=True)
    words.out.write_text(picture(curves, truth))
    print(f"picture: {words.out}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
