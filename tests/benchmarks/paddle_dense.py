"""Ours beside PaddlePaddle 2.6.2: async and k-step training of one dense model, samples a second.

    python tests/benchmarks/paddle_dense.py --venv DIRECTORY      makes Paddle's virtual environment
    there, where there is none

Both train a multi-layer perceptron of two wide layers (mean squared error, SGD) with 1 trainer and
1 server, processes of this host, of the same number of threads.  They take turns, and the medians
are compared.  Ours waits after each turn until the servers have applied every step; Paddle has no
such call.  Not a part of ``make bench``: Paddle is a gigabyte.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paddle_cluster import PaddleCluster, environment, is_played, play

RATE = 1e-3
ROWS = 16  # of a batch: that of jobs.wide_batch
STEPS = 100  # of a turn


def build(paddle: Any, width: int) -> tuple[Any, Any]:
    """The model of jobs.wide_model, and its batch."""
    import numpy

    x = paddle.static.data("x", [None, width // 2], "float32")
    y = paddle.static.data("y", [None, width // 2], "float32")
    hidden = paddle.static.nn.fc(x, width, activation="relu")
    loss = paddle.mean(paddle.square(paddle.static.nn.fc(hidden, width // 2) - y))
    batch = {name: numpy.random.randn(ROWS, width // 2).astype("float32") for name in ("x", "y")}
    return loss, lambda: batch


def compare(python: Path, width: int, k_steps: int, runs: int) -> tuple[float, float]:
    """Samples a second: Paddle's and ours."""
    from processes import Peer, peers, server

    words = ["--width", str(width), "--k-steps", str(k_steps)]
    with ExitStack() as stack:
        theirs = stack.enter_context(PaddleCluster(python, __file__, words))
        _, endpoint = stack.enter_context(server())
        ours = Peer("trainer", 0, 1, endpoint, "auto", width, f"k_steps={k_steps}")
        stack.enter_context(peers(ours))
        turns = [(theirs.seconds(STEPS), float(ours.ask(STEPS))) for _ in range(runs + 1)]
    paddle_seconds, our_seconds = (
        statistics.median(turn[side] for turn in turns[1:]) for side in (0, 1)
    )
    return STEPS * ROWS / paddle_seconds, STEPS * ROWS / our_seconds


def main() -> None:
    """Measures each mode and prints a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--venv", type=Path, help="Paddle's virtual environment, outside of this repository"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=2048,
        help="of the hidden layer; its square is the number of weights",
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--k-steps", type=int, default=10)
    words = parser.parse_args()
    if is_played():
        play(
            lambda paddle: build(paddle, words.width),
            lambda paddle: paddle.optimizer.SGD(RATE),
            {"k_steps": words.k_steps} if words.k_steps else {},
        )
        return
    if words.venv is None:
        parser.error("expected --venv DIRECTORY")
    python = environment(words.venv.absolute())
    for name, k_steps in (("async", 0), (f"k-step, k = {words.k_steps}", words.k_steps)):
        theirs, ours = compare(python, words.width, k_steps, words.runs)
        print(
            f"{name}: ours {ours:.0f} samples/s, PaddlePaddle {theirs:.0f}, ratio "
            f"{ours / theirs:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
