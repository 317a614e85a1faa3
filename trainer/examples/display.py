"""What trainer 0 shows while it trains: epoch, step, loss, samples per second, and how the tensors
travel.
"""

from __future__ import annotations

import time
from types import TracebackType

import torch
from rich.progress import Progress, TextColumn

from trainer import fleet


class Display:
    """A live line on a terminal; elsewhere (in a log) a line for each epoch.  Call ``fleet.init``
    before.

    Args:
        epochs: how many there will be.
        transport: shown as it is.
    """

    def __init__(self, epochs: int, transport: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), disable=not fleet.is_first_worker()
        )
        self._live = self._progress.console.is_terminal
        self._task = self._progress.add_task("")
        self._epoch, self._epochs, self._transport = 1, epochs, transport
        self._step, self._samples, self._begin, self._text = 0, 0, time.perf_counter(), ""

    def step(self, loss: torch.Tensor, samples: int) -> None:
        """One step has been taken, over ``samples`` samples on each trainer."""
        self._step += 1
        self._samples += samples * fleet.worker_num()
        rate = self._samples / (time.perf_counter() - self._begin)
        self._text = (
            f"epoch {self._epoch:2}/{self._epochs}  step {self._step:4}  loss {loss.item():.4f}"
        )
        self._text += f"  {rate:5.0f} samples/s  {self._transport}"
        self._progress.update(self._task, description=self._text)

    def epoch(self) -> None:
        """An epoch has ended."""
        if fleet.is_first_worker() and not self._live:
            print(self._text, flush=True)
        self._epoch += 1

    def __enter__(self) -> Display:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._progress.stop()
