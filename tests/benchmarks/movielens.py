"""Rows: the example of MovieLens-100K, beside the same model in plain torch and in TorchRec:
samples a second, and the seconds until it knows ratings that it has not seen.

The contenders begin anew several times, and take turns with their passes over the ratings.  A first
pass counts for the AUC alone.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from harness import Promise, Row
from movielens_roles import BATCH, DIM
from processes import Peer, peers, server
from transports import free_port

from trainer.examples.click_files import HEAD

DATA = Path(__file__).parents[2] / "build" / "movielens"
PASSES = 6  # over the ratings, as many as the example's
KNOWN = 0.78  # the AUC to reach; all end near 0.785
MODEL = (
    f"80,000 ratings of 8 columns, DeepFM, rows of {DIM}, Adagrad and Adam, batch {BATCH} of each "
    "trainer, 1 thread each; ours reads strings from a file in every pass, the others have numbers "
    "in memory"
)
OURS = {"alone": 0, "1 x 1 async": 1, "2 x 2 async": 2}  # servers, and as many trainers
PLAIN, TORCHREC = "plain torch", "TorchRec"
AGAINST = {
    PLAIN: "the same model in plain torch, one process",
    TORCHREC: "the same model in TorchRec, one process, its rows in fbgemm's tables on the CPU",
}
# each with the contender that is ours, and the other one
SPEEDS = {
    Promise(f"movielens/{name}", AGAINST[other], None, "samples/s", setting=MODEL): (own, other)
    for name, own, other in (
        *((own, own, PLAIN) for own in OURS),
        ("beside TorchRec", "alone", TORCHREC),
    )
}
TIMES = {
    Promise(
        f"movielens/until AUC {KNOWN}, {own}",
        AGAINST[PLAIN],
        None,
        "s",
        setting=f"seconds of training; {MODEL}",
    ): (own, PLAIN)
    for own in OURS
}
PROMISES = (*SPEEDS, *TIMES)
Curve = list[tuple[float, float]]  # seconds of training, and the AUC then


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if tiny else DATA
        if tiny:
            _write(folder)
        compared = {each: pair for each, pair in (SPEEDS | TIMES).items() if each in wanted}
        for promise, (_, other) in list(compared.items()):
            if not (folder / "train.tsv").exists():
                reason = "the ratings are missing: make build/movielens/train.tsv"
            elif other == TORCHREC and find_spec("torchrec") is None:
                reason = "TorchRec is not installed beside us: see docs/benchmarks.md"
            else:
                continue
            yield Row(promise, skipped=reason)
            del compared[promise]
        if compared:
            yield from _measured(compared, folder, runs)


def _measured(
    compared: Mapping[Promise, tuple[str, str]], folder: Path, runs: int
) -> Iterator[Row]:
    samples = (folder / "train.tsv").read_text(encoding="utf-8").count("\n") - 1
    names = list(dict.fromkeys(name for pair in compared.values() for name in pair))
    speeds, times = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(-(-runs // (PASSES - 1))):
        for name, curve in _curves(names, folder).items():
            steady = pairwise(curve[1:])  # without the first pass
            speeds[name] += [samples / (after - before) for (before, _), (after, _) in steady]
            times[name] += seconds_until(KNOWN, curve)
    for promise, pair in compared.items():
        ours, others = ((speeds if promise in SPEEDS else times)[name] for name in pair)
        if ours and others:
            yield Row(promise, statistics.median(ours), statistics.median(others), len(ours))
        else:
            yield Row(promise, skipped=f"the AUC stayed below {KNOWN}")


def _curves(names: Sequence[str], folder: Path) -> dict[str, Curve]:
    """New processes of each contender, which take turns."""
    with ExitStack() as stack:
        groups = dict[str, list[Peer]]()
        for name in names:
            if name in OURS:
                count = OURS[name]
                ends = ",".join(stack.enter_context(server())[1] for _ in range(count))
                trainers = range(max(count, 1))
                groups[name] = [Peer("movielens", n, len(trainers), ends, folder) for n in trainers]
            elif name == TORCHREC:
                groups[name] = [Peer("movielens_torchrec", folder, free_port())]
            else:
                groups[name] = [Peer("movielens_plain", folder)]
        stack.enter_context(peers(*(peer for group in groups.values() for peer in group)))
        curves: dict[str, Curve] = {name: [(0.0, 0.5)] for name in groups}
        for _ in range(PASSES):
            for name, group in groups.items():
                seconds = curves[name][-1][0] + max(_answers(group, "learn"))
                curves[name].append((seconds, _answers(group, "auc")[0]))
        return curves


def _answers(group: Sequence[Peer], line: str) -> list[float]:
    for peer in group:
        peer.tell(line)
    return [float(peer.heard()) for peer in group]


def seconds_until(auc: float, curve: Curve) -> list[float]:
    """The seconds until a curve reaches an AUC, between two passes as on a line; none if it does
    not.
    """
    for (began, low), (ended, high) in pairwise(curve):
        if high >= auc:
            return [began + (ended - began) * (auc - low) / (high - low)]
    return []


def _write(folder: Path, lines: int = 400) -> None:
    """Ratings of people of two tastes and films of two kinds."""
    draw = random.Random(0)
    for name in ("train", "test"):
        rows = ["\t".join(HEAD)]
        for _ in range(lines):
            user, movie = draw.randint(1, 40), draw.randint(1, 30)
            rows.append(f"{(user + movie) % 2}\t{user}\t{movie}" + "\ta" * (len(HEAD) - 3))
        (folder / f"{name}.tsv").write_text("\n".join([*rows, ""]), encoding="utf-8")
