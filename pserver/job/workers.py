"""The worker threads that update large steps, several slices at a time, where a server may use more
than one thread.

[Note: torch's threads]  Torch can divide one operation among threads, which synchronize after each
operation.  Slices that are updated side by side need no synchronization, so each worker sets
torch's own number of threads to 1.  Where one slice is most of the work, torch divides its
operations as usual.  Never more threads compute than torch was told to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import torch

# torch divides a batch of more than this part of a step's bytes; see [Note: torch's threads]
DIVIDED = 0.5


class Workers:
    """The worker threads of one installed program.

    They start when there is work for them, and end when nothing refers to this object.

    Args:
        threads: how many may compute at once.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._single = ThreadPoolExecutor(1, "update")
        self._parallel = ThreadPoolExecutor(
            threads, "update", initializer=_use_one_thread, initargs=(torch.get_num_threads(),)
        )

    def start(self, task: Callable[[int], None], sizes: Sequence[int]) -> None:
        """Calls ``task(n)`` in each of n threads; returns at once.

        Args:
            sizes: bytes of each batch of the task.  See [Note: torch's threads].
        """
        if max(sizes) > DIVIDED * sum(sizes):
            self._single.submit(task, 1)
        else:
            for _ in range(self.threads):
                self._parallel.submit(task, self.threads)


def _use_one_thread(others: int) -> None:
    """From here on torch does not divide the operations of this thread; new threads begin with
    ``others``, as they did.
    """
    # a thread's first call takes over the process's number: so read it before setting it
    torch.get_num_threads()
    torch.set_num_threads(1)
    other = Thread(target=torch.set_num_threads, args=(others,))
    other.start()
    other.join()
