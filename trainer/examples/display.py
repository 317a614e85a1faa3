"""What trainer 0 shows while it trains: epoch, step, loss, samples per second, and how the tensors
travel.
"""

from __future__ import annotations

import sys
import time

import torch

from pserver import fleet


class Display:
    """A line for each epoch, and what ``pserver launch`` and ``fleet.shard`` show of each step.
    Call ``fleet.init`` before.

    Args:
        epochs: how many there will be.
        transport: shown as it is.

    Attributes:
        live: for ``fleet.shard(progress=)``: only on a terminal, because a log has these lines.
    """

    def __init__(self, epochs: int, transport: str) -> None:
        self.live = sys.stdout.isatty()
        self._epoch, self._epochs, self._transport = 1, epochs, transport
        self._step, self._samples, self._begin, self._text = 0, 0, time.perf_counter(), ""

    def step(self, loss: torch.Tensor, samples: int) -> None:
        """One step has been taken, over ``samples`` samples on each trainer."""
        self._step += 1
        self._samples += samples * fleet.worker_num()
        fleet.report(samples=samples, loss=loss)
        rate = self._samples / (time.perf_counter() - self._begin)
        self._text = (
            f"epoch {self._epoch:2}/{self._epochs}  step {self._step:4}  loss {loss.item():.4f}"
        )
        self._text += f"  {rate:5.0f} samples/s  {self._transport}"

    def epoch(self) -> None:
        """An epoch has ended."""
        if fleet.is_first_worker():
            print(self._text, flush=True)
        self._epoch += 1
