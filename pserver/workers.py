"""The threads on which large steps are updated, slices side by side, while those that serve streams send what is updated already.

[Note: torch's threads]  Torch can divide one operation among threads, which meet again after each.  Slices that go side by side
need no meeting, so here each has one thread, for which torch's own number is 1.  Where one slice is most of the work, operations
are divided as usual.  Never more threads compute than torch was told to use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import torch

DIVIDED = 0.5  # of a step's bytes: a batch of more is divided by torch, see [Note: torch's threads]

Batch = tuple[str, ...]  # slices that are updated in one go
Spread = Callable[[Callable[[Batch], None], Iterable[Batch]], None]  # calls the first for each of the second, in any order


class Workers:
    """See the module's docstring.  Its threads are made when there is work for them, and end when nobody refers to it.

    Args:
        threads: that may compute at once.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._one = ThreadPoolExecutor(1, "update")
        self._several = ThreadPoolExecutor(threads, "update", initializer=_undivided) if threads > 1 else self._one

    def start(self, task: Callable[[Spread], None], sizes: Sequence[int]) -> None:
        """Calls ``task(spread)`` in one of the threads; it raises nothing.

        Args:
            sizes: of the batches that it will spread, in bytes.  See [Note: torch's threads].
        """
        if self._threads == 1 or max(sizes) > DIVIDED * sum(sizes):
            self._one.submit(task, in_turn)
        else:
            self._several.submit(task, self._spread)

    def _spread(self, work: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
        left = deque(batches)

        def some() -> None:
            while left:
                try:
                    batch = left.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                work(batch)

        others = [self._several.submit(some) for _ in range(self._threads - 1)]
        try:
            some()
        finally:
            left.clear()
            begun = [other for other in others if not other.cancel()]  # all threads may be at work for others, who wait for us
            errors = [other.exception() for other in begun]
        for error in errors:
            if error is not None:
                raise error


def in_turn(work: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
    """The simplest :data:`Spread`."""
    for batch in batches:
        work(batch)


def _undivided() -> None:
    """From here on torch does not divide the operations of this thread; what new threads begin with stays as it is."""
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    other = Thread(target=torch.set_num_threads, args=(own,))
    other.start()
    other.join()
