"""``fleet.shard(progress=True)``: how far a pass has come, on a terminal or in a log."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from pserver.onlookers import onlooker
from trainer.environment.environment import Connection, Role
from trainer.job.data_position import CountedBatches
from trainer.job.job import Job
from trainer.job.reported import Reported

DRAW_SECONDS = 0.1


class ProgressBar:
    """One pass: a bar while it runs on a terminal, a line at its end elsewhere.

    The script's thread draws, between two batches: nothing is drawn while it computes.

    Args:
        reported: what the script says of its training, which is shown beside the bar.
        console: where it goes; None: standard output.
    """

    def __init__(self, reported: Reported, console: Console | None = None) -> None:
        self._reported = reported
        self._console = console or Console()
        self._bar: Progress | None = None
        self._number = self._batch = self._samples = 0
        self._began = self._drawn = 0.0

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def begin(self, number: int, batches: int) -> None:
        """A pass begins; ``batches`` is 0 where their number is not known."""
        self._number, self._batch = number, 0
        self._samples, _ = self._reported.now()
        self._began = self._drawn = time.perf_counter()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn(f"pass {number}"),
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.add_task("", total=batches or None)
            self._bar.start()
            atexit.register(self._bar.stop)  # after an error the pass may never be told its end

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def advance(self, batch: int) -> None:
        """So many batches have been given."""
        self._batch = batch
        now = time.perf_counter()
        if self._bar is not None and now - self._drawn >= DRAW_SECONDS:
            self._drawn = now
            self._draw(self._bar)

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def end(self) -> None:
        """The pass is over: the bar stays as it is then; elsewhere this is the line's time."""
        if self._bar is not None:
            self._draw(self._bar)
            self.leave()
        elif not self._console.is_terminal or self._console.is_dumb_terminal:
            seconds = time.perf_counter() - self._began
            text = f"pass {self._number}: {self._batch} batches in {seconds:.1f} s"
            print("  ".join([text, *self._said()]), file=self._console.file, flush=True)

    def leave(self) -> None:
        """Gives the terminal back."""
        bar, self._bar = self._bar, None
        if bar is not None:
            atexit.unregister(bar.stop)
            bar.stop()

    def _draw(self, bar: Progress) -> None:
        (task,) = bar.tasks
        bar.update(task.id, completed=self._batch, description="  ".join(self._said()))
        bar.refresh()

    def _said(self) -> list[str]:
        """Samples per second in this pass, and the last values."""
        samples, values = self._reported.now()
        seconds = time.perf_counter() - self._began
        rate = [f"{(samples - self._samples) / seconds:,.0f} samples/s"] if samples else []
        return rate + [f"{name} {value:.4g}" for name, value in sorted(values.items())]


def counted(batches: Iterable[Any], job: Job, progress: bool) -> Iterable[Any]:
    """A trainer's batches, counted for whoever watches the job; the same object where nobody can.

    Args:
        progress: show it here, on trainer 0, where ``launch`` does not show it.
    """
    shown = progress and job.role.trainer_id == 0 and not Connection.from_environment().panel
    if not shown and job.role.role is not Role.TRAINER:
        return batches
    display = (lambda: ProgressBar(job.reported)) if shown else None
    return CountedBatches(batches, job.position, display)
