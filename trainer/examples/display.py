"""Trainer 0's output while it trains: epoch, step, loss, samples per second, and the transport of
tensors.
"""

from __future__ import annotations

import sys
import time

import torch

from pserver import fleet


class Display:
    """Prints a line for each epoch, and reports each step to ``pserver launch`` and
    ``fleet.shard``.  Call ``fleet.init`` before.

    Args:
        epochs: their number.
        transport: shown as it is.

    Attributes:
        live: for ``fleet.shard(progress=)``: only on a terminal, because a log has these lines.
    """

    def __init__(self, epochs: int, transport: str) -> None:
        self.live = sys.stdout.isatty()
        self._epoch, self._epochs, self._transport = 1, epochs, transport
        self._step, self._samples, self._begin, self._text = 0, 0, time.perf_counter(), ""

    def step(self, loss: torch.Tensor, samples: int) -> None:
        """Counts a step over ``samples`` samples on each trainer."""
        self._step += 1
        self._samples += samples * fleet.worker_num()
        fleet.report(samples=samples, loss=loss)
        rate = self._samples / (time.perf_counter() - self._begin)
        self._text = (
            f"epoch {self._epoch:2}/{self._epochs}  step {self._step:4}  loss {loss.item():.4f}"
        )
        self._text += f"  {rate:5.0f} samples/s  {self._transport}"

    def epoch(self) -> None:
        """Prints a line at the end of an epoch."""
        if fleet.is_first_worker():
            print(self._text, flush=True)
        self._epoch += 1
