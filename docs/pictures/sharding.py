"""How much memory does a rank need at each level of group_sharded_parallel?  Against the theory,
with Adam, on 1, 2 and 4 ranks.

::

    python docs/pictures/sharding.py            every level: docs/sharding.svg  (a minute)
    python docs/pictures/sharding.py --levels os p_g_os --ranks 2

The script counts the bytes that tensors hold after a backward and after a step, takes the larger
number, on the rank that has most, and also reports how much the process has grown since a first
small model.  The picture needs matplotlib, of the extra ``docs``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import group_sharded_parallel, init_parallel_env, spawn

PICTURE = Path(__file__).parent.parent / "sharding.svg"
LEVELS = ("os", "os_g", "p_g_os")
WIDTH, LAYERS = 768, 24


def network(width: int) -> nn.Module:
    """Equal layers, each a unit."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def theory(level: str, ranks: int, parameters: float, unit: float) -> float:
    """Bytes of a rank: parameters and gradients of equal size, and Adam's two moments."""
    shared = {"none": 0, "os": 2, "os_g": 3, "p_g_os": 4}[level]
    return (
        (4 - shared) * parameters + shared * parameters / ranks + (unit if level == "p_g_os" else 0)
    )


def held() -> int:
    """Bytes that tensors hold, but for those from before ``gc.freeze()``."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def grown() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def rank(level: str, width: int, out: str) -> None:
    """One rank's process: some steps at a level, and what it held."""
    torch.set_num_threads(1)
    init_parallel_env()
    train(level, 8)  # what torch keeps from the first time on
    gc.collect()
    gc.freeze()
    before = grown()
    most, largest = train(level, width)
    result = {"held": most, "grown": largest - before}
    Path(out, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))


def train(level: str, width: int) -> tuple[int, int]:
    """Some steps; the most bytes that tensors held, and the most that the process had."""
    model = network(width)
    optimizer: Any = torch.optim.Adam(model.parameters())
    if level != "none":
        options: dict[str, Any] = (
            {"segment_size": 1}
            if level == "p_g_os"
            else {"buffer_max_size": 2 * width * (width + 1)}
        )
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, **options)
    most = largest = 0
    for _ in range(3):
        model(torch.ones(2, width)).sum().backward()
        most, largest = max(most, held()), max(largest, grown())
        optimizer.step()
        most, largest = max(most, held()), max(largest, grown())
        optimizer.zero_grad()
    return most, largest


def measure(level: str, ranks: int, width: int) -> dict[str, int]:
    """The most that any of so many ranks needed."""
    with tempfile.TemporaryDirectory() as scratch:
        spawn(rank, (level, width, scratch), nprocs=ranks)
        results = [json.loads(path.read_text()) for path in Path(scratch).iterdir()]
    return {key: max(result[key] for result in results) for key in results[0]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar a run, with the theory as a line across it and the process as a dot."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 4.5))
    names = [
        f"{row['level']}\n{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}" for row in rows
    ]
    panel.bar(names, [row["held"] / 1e6 for row in rows], color="#9bb8d3", label="tensors")
    panel.plot(
        names,
        [row["grown"] / 1e6 for row in rows],
        "o",
        color="#555555",
        label="growth of the process",
    )
    for index, row in enumerate(rows):
        ends = (index - 0.45, index + 0.45)
        panel.hlines(
            row["theory"] / 1e6,
            *ends,
            colors="#c23b22",
            linewidth=2,
            label="theory" if index == 0 else None,
        )
    panel.set_ylabel("MB on a rank")
    panel.grid(axis="y", alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Runs what is asked for and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--out", type=Path, default=PICTURE)
    words = parser.parse_args()
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in network(words.width)]
    rows = []
    for level, ranks in [
        ("none", 1),
        *((level, ranks) for level in words.levels for ranks in words.ranks),
    ]:
        row = {"level": level, "ranks": ranks, **measure(level, ranks, words.width)}
        row["theory"] = theory(level, ranks, sum(layers), max(layers))
        rows.append(row)
        figures = [f"{key} {row[key] / 1e6:7.1f} MB" for key in ("held", "theory", "grown")]
        print(
            f"{level:7} {ranks} ranks: {', '.join(figures)}; {row['held'] / row['theory']:.2f} of "
            "the theory",
            flush=True,
        )
    draw(rows, words.out)
    print(f"picture: {words.out}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What is freed goes back at once; otherwise a process shows what it once had.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    main()
