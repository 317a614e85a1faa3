"""How far a dataset has come in loading its files, on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pserver.onlookers import onlooker


class LoadBar:
    """A bar while it is entered; nothing where there is no terminal.

    Args:
        what: "loading".
        total: pieces, or samples.
        shown: whether this process shows bars.
        console: None: standard output.
    """

    def __init__(self, what: str, total: int, shown: bool, console: Console | None = None) -> None:
        console = console or Console()
        self._bar: Progress | None = None
        if shown and console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn(what),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=console,
            )
            self._bar.add_task("", total=total)

    def __enter__(self) -> LoadBar:
        self._begin()
        return self

    @onlooker("the bar of loading", end=lambda bar: bar.leave())
    def _begin(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @onlooker("the bar of loading")
    def _end(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Gives the terminal back."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    @onlooker("the bar of loading", end=lambda bar: bar.leave())
    def at(self, done: int, samples: int) -> None:
        """So much of the total is done, and there are so many samples."""
        if self._bar is not None:
            (task,) = self._bar.tasks
            self._bar.update(task.id, completed=done, description=f"{samples:,} samples")
