"""The results of a job with servers, and the cost of a death: two panels, of real processes.

Left: AUC on unseen clicks over seconds, of two hosts joined by a link of 1 Gbit/s, with a trainer
and a server on each, beside one process alone and DDP with gloo on the same hosts.
The hosts are network namespaces, as in tests/benchmarks/links.py, so it needs root and iproute2.

Right: steps a second of an async job of two trainers and two servers, through ``kill -9`` of a
trainer and of a server, which ``pserver launch`` starts again.

::

    python docs/pictures/results.py             all runs, for some minutes: docs/results.svg
    python docs/pictures/results.py --samples 50000 --seconds 20 --out /tmp/results.svg

The model is DeepFM of trainer/examples/ctr.py on generated clicks of Criteo's format.  DDP has the
same model, with its rows in ``nn.EmbeddingBag`` whose sparse gradients all ranks exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from trainer import fleet
from trainer.examples.clicks import NUMBERS, SLOTS, Generated, squashed
from trainer.examples.ctr import MODES, DeepFM, auc_of

ROOT = Path(__file__).parent.parent.parent
PICTURE = Path(__file__).parent.parent / "results.svg"
BATCH = 512  # of all trainers together
FILES = ("clicks-0-0", "clicks-0-1")  # one a trainer
POINTS = 12  # of each curve
ROWS = 1 << 20  # of DDP's tables: ids are hashed into them
DIM, HIDDEN, RATE, LINEAR_RATE, DENSE_RATE = 16, 128, 0.01, 0.05, 1e-3  # the example's own
WAIT_SECONDS = 1200  # for a run
KILLS = ((1 / 3, "trainer-1"), (2 / 3, "server-1"))  # when, as a part of the run, and whose process
Curve = list[tuple[float, float]]


class WholeDeepFM(nn.Module):
    """The example's DeepFM with all rows in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, DIM, sparse=True)
        self.first_order = nn.Embedding(ROWS, 1, sparse=True)
        nn.init.uniform_(self.embedding.weight, -0.01, 0.01)
        nn.init.zeros_(self.first_order.weight)
        self.numbers = nn.Linear(NUMBERS, 1)
        self.deep = nn.Sequential(
            nn.Linear(SLOTS * DIM + NUMBERS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """float32 [batch, 13], int64 [batch, 26] -> logits [batch]."""
        numbers, ids = squashed(numbers), (ids * 0x1E3779B97F4A7C15 >> 20) % ROWS
        rows = self.embedding(ids)
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
        first = self.first_order(ids).sum((1, 2)) + self.numbers(numbers).squeeze(1)
        deep = self.deep(torch.cat([rows.flatten(1), numbers], 1)).squeeze(1)
        logits: Tensor = first + pairs + deep
        return logits


class Both:
    """The optimizers of DDP's model, as one: Adagrad of the rows, Adam of the network."""

    def __init__(self, model: WholeDeepFM) -> None:
        rows = [model.embedding.weight]
        weights = [model.first_order.weight]
        dense = [*model.numbers.parameters(), *model.deep.parameters()]
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(rows, lr=RATE),
            torch.optim.Adagrad(weights, lr=LINEAR_RATE),
            torch.optim.Adam(dense, lr=DENSE_RATE),
        ]

    def step(self) -> None:
        """Steps all of them."""
        for each in self._all:
            each.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for each in self._all:
            each.zero_grad()


Batches = Sequence[dict[str, Tensor]]


def read(folder: Path, names: Sequence[str], batch: int) -> Batches:
    """The batches of some files of clicks, in memory: the same ones in every mode."""
    found = fleet.QueueDataset()
    found.init(batch_size=batch, parser="criteo")
    found.set_filelist([str(folder / name) for name in names], trainer_id=0, trainers=1)
    return list(found)


def learn(mode: str, folder: Path, samples: int) -> Curve:
    """Trains one trainer; its AUC on unseen clicks by seconds of training, without evaluations."""
    rank = int(os.environ.get("RANK", os.environ.get("TRAINER_ID", 0)))
    size = 1 if mode == "alone" else 2
    own_files = FILES if mode == "alone" else FILES[rank : rank + 1]
    learned = read(folder, own_files, BATCH // size)
    unseen = read(folder, ["clicks-1-0"], 4096)
    torch.manual_seed(0)
    if mode == "ddp":
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]  # the dataset and the AUC are this process's alone
        fleet.init()
        whole = WholeDeepFM()
        model: nn.Module = DistributedDataParallel(whole)
        optimizer: Any = Both(whole)
        together = dist.barrier
    else:
        strategy = fleet.DistributedStrategy()
        configs = MODES.get(mode)
        strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
        fleet.init(strategy=strategy)
        model = fleet.distributed_model(DeepFM(DIM, HIDDEN, RATE, LINEAR_RATE))
        adam = torch.optim.Adam(model.parameters(), lr=DENSE_RATE)
        optimizer = fleet.distributed_optimizer(adam)

        def together() -> None:
            fleet.barrier_worker()
            optimizer.flush()

    own = model.module if isinstance(model, DistributedDataParallel) else model
    curve, seconds, steps, every = [(0.0, 0.5)], 0.0, 0, samples // BATCH // POINTS
    began = time.perf_counter()
    for batch in learned:
        loss = binary_cross_entropy_with_logits(
            model(batch["numbers"], batch["ids"]), batch["label"]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % every == 0 and len(curve) <= POINTS:
            together()
            seconds += time.perf_counter() - began
            own.eval()
            curve.append((seconds, auc_of(own, unseen)))
            own.train()
            together()
            began = time.perf_counter()
    if mode == "ddp":
        dist.destroy_process_group()
    fleet.finish()
    return curve if rank == 0 else []


def endless(folder: Path, seconds: float) -> None:
    """Trains for so many seconds, and writes down when each step ended."""
    rank = int(os.environ["TRAINER_ID"])
    learned = read(folder, FILES[rank : rank + 1], BATCH // 2)
    torch.manual_seed(0)
    fleet.init(strategy=fleet.DistributedStrategy())
    model = fleet.distributed_model(DeepFM(DIM, HIDDEN, RATE, LINEAR_RATE))
    adam = torch.optim.Adam(model.parameters(), lr=DENSE_RATE)
    optimizer = fleet.distributed_optimizer(adam)
    with open(folder / f"steps-{rank}-{os.getpid()}.txt", "w", buffering=1) as times:
        begun = folder / "begun"
        while not begun.exists() or time.time() - begun.stat().st_mtime < seconds:
            for batch in learned:
                logits = model(batch["numbers"], batch["ids"])
                binary_cross_entropy_with_logits(logits, batch["label"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                begun.touch() if not begun.exists() else None
                print(time.time(), file=times)
                if time.time() - begun.stat().st_mtime > seconds:
                    break
    fleet.finish()


# ---- runs ----


@contextmanager
def process(words: Sequence[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end if it still runs."""
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "PSERVER_INSECURE": "1", **environ}
    whole["PSERVER_INSECURE_COLLECTIVE"] = "1"  # nobody else is on these links
    with subprocess.Popen(words, env=whole, text=True, stdout=subprocess.PIPE) as found:
        try:
            yield found
        finally:
            if found.poll() is None:
                found.kill()


def measured(mode: str, folder: Path, samples: int) -> Curve:
    """The curve of one run, of new processes."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    from links import HOSTS, hosts  # the benchmarks' own hosts

    out = folder / f"{mode}.json"
    own = [sys.executable, str(Path(__file__).resolve()), "--run", mode, "--samples", str(samples)]
    own += ["--folder", str(folder), "--out", str(out)]
    if mode == "alone":
        with process(own) as alone:
            alone.communicate(timeout=WAIT_SECONDS)
        return json.loads(out.read_text())  # type: ignore[no-any-return]
    with hosts("1gbit") as prefixes:
        with servers(mode, prefixes, HOSTS) as endpoints, ExitStack() as stack:
            trainers = [
                stack.enter_context(process([*prefix, *own], **role(mode, rank, endpoints)))
                for rank, prefix in enumerate(prefixes)
            ]
            for each in trainers:
                each.communicate(timeout=WAIT_SECONDS)
                if each.returncode:
                    sys.exit(f"{mode}: a trainer ended with {each.returncode}")
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def role(mode: str, rank: int, endpoints: Sequence[str]) -> dict[str, str]:
    """The environment of one of two trainers."""
    if mode == "ddp":
        address = {"MASTER_ADDR": endpoints[0].split(":")[0], "MASTER_PORT": "29700"}
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        return address | ranks
    servers = {"PSERVER_ENDPOINTS": ",".join(endpoints), "TRAINERS": "2"}
    return servers | {"TRAINING_ROLE": "TRAINER", "TRAINER_ID": str(rank)}


@contextmanager
def servers(
    mode: str, prefixes: Sequence[Sequence[str]], addresses: Sequence[str]
) -> Iterator[list[str]]:
    """A server on each host, ready; none for DDP.  Gives their endpoints."""
    endpoints = [f"{address}:6174" for address in addresses]
    serve = [sys.executable, "-m", "pserver", "serve", "--insecure", "--endpoint"]
    with ExitStack() as stack:
        for prefix, endpoint in zip(prefixes, endpoints, strict=True) if mode != "ddp" else ():
            each = stack.enter_context(process([*prefix, *serve, endpoint]))
            assert each.stdout is not None, "a pipe"
            each.stdout.readline()
        yield endpoints


def survived(folder: Path, seconds: float) -> list[list[float]]:
    """The seconds at which steps ended since the first one, by trainer, and those of the kills."""
    script = [str(Path(__file__).resolve()), "--run", "endless", "--folder", str(folder)]
    script += ["--seconds", str(seconds)]
    launch = [*(sys.executable, "-m", "pserver", "launch", "--servers", "2", "--trainers", "2")]
    launch += ["--log-dir", str(folder / "logs"), "--checkpoint", str(folder / "saved")]
    launch += ["--every", "2", "--max-restarts", "5"]
    begun, kills = folder / "begun", list[float]()
    with process([*launch, *script]) as job:
        end = time.time() + WAIT_SECONDS
        while not begun.exists() and job.poll() is None and time.time() < end:
            time.sleep(0.05)
        if not begun.exists():
            sys.exit(f"the job took no step; see {folder / 'logs'}")
        start = begun.stat().st_mtime
        for part, which in KILLS:
            time.sleep(max(0.0, start + part * seconds - time.time()))
            os.kill(process_of(job.pid, which), signal.SIGKILL)
            kills.append(time.time() - start)
        job.communicate(timeout=WAIT_SECONDS)
        if job.returncode:
            sys.exit(f"the job ended with {job.returncode}")
    steps = []
    for rank in range(2):
        lines = [p.read_text().split() for p in folder.glob(f"steps-{rank}-*.txt")]
        steps.append(sorted(float(each) - start for own in lines for each in own))
    return [*steps, kills]


def process_of(launch: int, which: str) -> int:
    """The pid of a trainer or server that a launch has started."""
    kind, number = which.split("-")
    variables = {"trainer": f"TRAINER_ID={number}", "server": ""}[kind]
    found = []
    children = Path(f"/proc/{launch}/task/{launch}/children").read_text().split()
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        environ = Path(f"/proc/{child}/environ").read_text().split("\0")
        if kind == "server" and "serve" in words or variables and variables in environ:
            found.append(int(child))
    return found[int(number) if kind == "server" else 0]


# ---- the picture ----

NAMES = {
    "alone": "one process alone",
    "ddp": "DDP, gloo, 2 ranks",
    "sync": "sync, 2 trainers",
    "async": "async, 2 trainers",
    "k_step": "k-step (10), 2 trainers",
}


def picture(curves: dict[str, Curve], steps: list[list[float]], seconds: float, out: Path) -> None:
    """Draws both panels."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "results", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for mode, curve in curves.items():
        left.plot(
            *zip(*curve, strict=True), marker=".", label=f"{NAMES[mode]}: {curve[-1][0]:.0f} s"
        )
    left.set(xlabel="seconds of training, 1 Gbit/s", ylabel="AUC on unseen clicks", ylim=(0.5, 0.9))
    left.legend(loc="lower right", title="as many samples, in")
    *trainers, kills = steps
    wide, most = 0.5, 0.0
    bins = [wide * n for n in range(int(seconds / wide))]
    for rank, own in enumerate(trainers):
        counts = [sum(begin <= at < begin + wide for at in own) / wide for begin in bins]
        right.plot(bins, counts, label=f"trainer {rank}")
        most = max(most, *counts)
    above = 1.3 * most  # words stand above the curves
    for (_, which), at in zip(KILLS, kills, strict=True):
        right.axvline(at, color="#888", linestyle=":")
        words = f"kill -9\n{which.replace('-', ' ')}"
        right.text(at + 0.4, 0.98 * above, words, color="#555", va="top")
    right.set(xlabel="seconds", ylabel="steps a second", ylim=(0, above))
    right.legend(loc="upper left")
    figure.savefig(out, metadata={"Date": None})
    out.write_text("\n".join(line.rstrip() for line in out.read_text().splitlines()) + "\n")


def main() -> None:
    """Runs everything, one run after the other, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--samples", type=int, default=400_000)
    add("--seconds", type=float, default=45.0, help="of the run with kills")
    add("--modes", nargs="+", choices=NAMES, default=list(NAMES))
    add("--out", type=Path, default=PICTURE)
    add("--run", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run == "endless":
        endless(asked.folder, asked.seconds)
        return
    if asked.run:
        if curve := learn(asked.run, asked.folder, asked.samples):
            asked.out.write_text(json.dumps(curve))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        Generated().files(scratch, asked.samples, 2, 0, 1)
        Generated(seed=1).files(scratch, 20_000, 1, 0, 1)
        curves = dict[str, Curve]()
        for mode in asked.modes:
            curves[mode] = measured(mode, folder, asked.samples)
            print(f"{NAMES[mode]}: AUC {curves[mode][-1][1]:.4f} after {curves[mode][-1][0]:.1f} s")
        steps = survived(folder, asked.seconds)
        print(f"with kills: {len(steps[0])} and {len(steps[1])} steps in {asked.seconds:g} s")
        picture(curves, steps, asked.seconds, asked.out)
    print(f"picture: {asked.out}")


if __name__ == "__main__":
    main()
