"""The threads on which large steps are updated, slices side by side, where a server may use more
than one.

[Note: torch's threads]  Torch can divide one operation among threads, which meet again after each.
Slices that go side by side need no meeting, so here each has one thread, for which torch's own
number is 1.  Where one slice is most of the work, operations are divided as usual.  Never more
threads compute than torch was told to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import torch

DIVIDED = 0.5  # of a step's bytes: a batch of more is divided by torch, see [Note: torch's threads]


class Workers:
    """See the module's docstring.  Its threads are made when there is work for them, and end when
    nobody refers to it.

    Args:
        threads: that may compute at once.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._one = ThreadPoolExecutor(1, "update")
        self._several = ThreadPoolExecutor(
            threads, "update", initializer=_undivided, initargs=(torch.get_num_threads(),)
        )

    def start(self, task: Callable[[int], None], sizes: Sequence[int]) -> None:
        """Calls ``task(n)`` in each of n threads.

        Args:
            sizes: of the batches that the task is made of, in bytes.  See [Note: torch's threads].
        """
        if max(sizes) > DIVIDED * sum(sizes):
            self._one.submit(task, 1)
        else:
            for _ in range(self.threads):
                self._several.submit(task, self.threads)


def _undivided(others: int) -> None:
    """From here on torch does not divide the operations of this thread; new threads begin with
    ``others``, as they did.
    """
    # a thread's first call takes over the number of the process: not after it has been set
    torch.get_num_threads()
    torch.set_num_threads(1)
    other = Thread(target=torch.set_num_threads, args=(others,))
    other.start()
    other.join()
