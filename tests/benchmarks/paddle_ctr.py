"""Ours beside PaddlePaddle 2.6.2: a click model whose rows are on a server, async and k-step.

    python tests/benchmarks/paddle_ctr.py --venv DIRECTORY        makes Paddle's virtual environment
    there, where there is none

The model of ctr_data.py and ctr_roles.py (26 slots, 512 samples a batch, rows of 16, a network of
400-400-1, Zipf 1.2 over 10 M ids), with 1 trainer and 1 server, processes of this host, of one
thread each.  Async: Adagrad on rows, Adam on the network. k-step: SGD on all, which is what Paddle
has there; its trainer then holds the whole table, ours only what it touched.  They take turns, and
the medians are compared: samples a second (targets: 3 times Paddle's), and CPU seconds of the
server per million rows pulled and pushed (target: half of Paddle's).  A row counts once a batch,
however often its id stands there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ctr_data import BATCH, DIFFERENT, DIM, ROWS, SLOTS, WIDTH, batches
from paddle_cluster import PaddleCluster, environment, is_played, play

K_STEPS = 10  # that of ctr_roles.PLACES
ADAGRAD = "StdAdaGradSGDRule"  # one sum of squares for each number, as torch's


def build(paddle: Any, rows: int, k_step: bool) -> tuple[Any, Any]:
    """The model of ctr_roles.Clicks, and its batches."""
    import itertools

    ids = paddle.static.data("ids", [None, 1], "int64")  # of all slots, one lookup
    label = paddle.static.data("label", [None, 1], "float32")
    attribute = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    if k_step:
        looked = paddle.static.nn.embedding(ids, [rows, DIM], is_sparse=True, param_attr=attribute)
    else:
        looked = paddle.static.nn.sparse_embedding(ids, [rows, DIM], param_attr=attribute)
    hidden = paddle.reshape(looked, [-1, SLOTS * DIM])
    for _ in range(2):
        hidden = paddle.static.nn.fc(hidden, WIDTH, activation="relu")
    logits = paddle.static.nn.fc(hidden, 1)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logits, label))
    made = itertools.cycle(
        [{"ids": ids.reshape(-1, 1), "label": label} for ids, label in batches(0, rows)]
    )
    return loss, lambda: next(made)


def configure(strategy: Any) -> None:
    """Adagrad for the rows."""
    accessor = "table_parameters.emb.accessor"
    strategy.sparse_table_configs = {
        "emb": {
            "table_parameters.emb.table_class": "MemorySparseTable",
            f"{accessor}.accessor_class": "SparseAccessor",
            f"{accessor}.embed_sgd_param.name": ADAGRAD,
            f"{accessor}.embedx_sgd_param.name": ADAGRAD,
        }
    }


def compare(
    python: Path, k_step: bool, rows: int, runs: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Of each, Paddle's and ours: samples a second, and the server's CPU seconds per million
    rows.
    """
    from processes import Peer, cpu_seconds, peers, server

    words = ["--rows", str(rows), *(["--k-step"] if k_step else [])]
    with ExitStack() as stack:
        theirs = stack.enter_context(PaddleCluster(python, __file__, words))
        number, endpoint = stack.enter_context(server())
        ours = Peer(
            "ctr_trainer",
            0,
            1,
            endpoint,
            "auto",
            "k_step" if k_step else "async",
            rows,
            "sgd" if k_step else "adam",
        )
        stack.enter_context(peers(ours))
        servers, turns = (theirs.server_pids[0], number), []
        for _ in range(runs + 1):
            before = [cpu_seconds(pid) for pid in servers]
            took = theirs.seconds(steps), float(ours.ask(steps).split()[0])
            turns.append(
                (*took, *(cpu_seconds(pid) - was for pid, was in zip(servers, before, strict=True)))
            )
    medians = [statistics.median(column) for column in zip(*turns[1:], strict=True)]
    moved = steps * _unique(rows) / 1e6
    samples = tuple(steps * BATCH / seconds for seconds in medians[:2])
    return {
        "samples/s": samples,
        "server CPU s per million rows": tuple(spent / moved for spent in medians[2:]),
    }


def _unique(rows: int) -> float:
    """Different ids of a batch, on average."""
    return statistics.mean(len(set(ids.ravel().tolist())) for ids, _ in batches(0, rows)[:20])


def main() -> None:
    """Measures each mode and prints a line for each comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--venv", type=Path, help="Paddle's virtual environment, outside of this repository"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="of the table")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=DIFFERENT // 2, help="of a turn")
    parser.add_argument("--only", choices=("async", "k-step"))
    parser.add_argument("--k-step", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if is_played():
        configs = {"k_steps": K_STEPS} if words.k_step else {}
        rule = (
            (lambda paddle: paddle.optimizer.SGD(0.01))
            if words.k_step
            else (lambda paddle: paddle.optimizer.Adam(1e-3))
        )
        play(
            lambda paddle: build(paddle, words.rows, words.k_step),
            rule,
            configs,
            None if words.k_step else configure,
        )
        return
    if words.venv is None:
        parser.error("expected --venv DIRECTORY")
    python = environment(words.venv.absolute())
    for name in (words.only,) if words.only else ("async", "k-step"):
        for what, (theirs, ours) in compare(
            python, name == "k-step", words.rows, words.runs, words.steps
        ).items():
            print(
                f"{name}: {what}: ours {ours:.4g}, PaddlePaddle {theirs:.4g}, ratio "
                f"{ours / theirs:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
