"""A trainer's batches in a job with automatic checkpoints: it may save between two of them, and
they continue at their position after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

from trainer.samplers.pass_log import LoggedPass
from trainer.samplers.saves import Saves


class Resumable(Protocol):
    """Batches of which a pass can begin in its middle.

    Attributes:
        number: of the last pass among those of the job, by which its order was drawn.
        size: samples of a full batch; 0: unknown.
    """

    number: int
    size: int

    def __len__(self) -> int:
        """The number of batches."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of a new pass."""

    def after(self, batches: int, number: int) -> Iterator[Any]:
        """The batches of the pass of this number, without its first ones."""

    def skip(self) -> None:
        """Skips a pass that is over, which the script would iterate over."""


class SavedBatches:
    """Batches that follow the saves of their job; each iteration is a pass.

    Args:
        batches: this trainer's, :class:`Resumable`.
        name: of the loader.
        saves: of the job.
    """

    def __init__(self, batches: Iterable[Any], name: str, saves: Saves) -> None:
        self._batches = cast(Resumable, batches)
        self._name, self._saves = name, saves

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._saves.between(None)
        begun = self._saves.begin(self._name)
        begun.of_size(self._batches.size)
        if begun.skipped is None:
            self._batches.skip()
            return iter(())
        if begun.live:
            # drawing begins before the random sources are restored, as it did originally
            batches = self._batches.after(begun.skipped, begun.drawn)
            self._saves.ready(begun)
        else:
            self._saves.ready(begun)
            batches = iter(self._batches)
            begun.drawn = self._batches.number
        return self._given(batches, begun)

    def _given(self, batches: Iterator[Any], begun: LoggedPass) -> Iterator[Any]:
        try:
            for batch in batches:
                begun.given += 1
                yield batch
                self._saves.between(begun)
        finally:
            self._saves.passes.end(begun)
