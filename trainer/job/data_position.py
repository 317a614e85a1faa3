"""Where a trainer is in its data: its passes over what ``fleet.shard`` gives, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset


class Display(Protocol):
    """What shows a pass while it runs: see :class:`trainer.job.progress_bar.ProgressBar`."""

    def begin(self, number: int, batches: int) -> None:
        """A pass begins; ``batches`` is 0 where their number is not known."""

    def advance(self, batch: int) -> None:
        """So many batches have been given."""

    def end(self) -> None:
        """The pass is over, by its end, by ``break``, or by an error."""


class DataPosition:
    """How far the last pass has come.  The script's thread writes it, any thread reads it."""

    def __init__(self) -> None:
        self._now = (0, 0, 0)

    def now(self) -> tuple[int, int, int]:
        """Passes begun, batches given of the last one, and how many it has (0: not known)."""
        return self._now

    def begin(self, batches: int) -> int:
        """A pass begins.

        Returns:
            Its number, from 1.
        """
        self._now = (self._now[0] + 1, 0, batches)
        return self._now[0]

    def at(self, number: int, batch: int, batches: int) -> None:
        """A batch of a pass has been given; of an older pass it does not count."""
        if number == self._now[0]:
            self._now = (number, batch, batches)


class CountedBatches:
    """Batches of any iterable, unchanged, whose position is counted; each iteration is a pass.

    Args:
        batches: what is iterated over.
        position: of this trainer.
        display: makes what shows a pass; None: nothing does.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        position: DataPosition,
        display: Callable[[], Display] | None = None,
    ) -> None:
        self._batches, self._position, self._display = batches, position, display

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # what has no length says so

    def __iter__(self) -> Iterator[Any]:
        # at once, not at the first batch: a loader draws random numbers here, and starts workers
        return self._counted(iter(self._batches))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        many = length(self._batches)
        number = self._position.begin(many)
        display = None if self._display is None else self._display()
        if display is not None:
            display.begin(number, many)
        try:
            for batch, each in enumerate(batches, 1):
                self._position.at(number, batch, many)
                if display is not None:
                    display.advance(batch)
                yield each
        finally:
            if display is not None:
                display.end()


def length(batches: Iterable[Any]) -> int:
    """How many batches there will be; 0 where that is not known.

    A loader over an iterable data set only guesses, and warns when it was wrong: it is not asked.
    """
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return 0
    try:
        return len(batches)  # type: ignore[arg-type]  # what has no length says so
    except (TypeError, NotImplementedError):
        return 0
