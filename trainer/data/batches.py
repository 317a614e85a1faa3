"""Batches of tensors from columns, made ahead by a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trainer.data.columns import Columns, Ragged

# slot -> a tensor, or (values, offsets) of a ragged slot
Batch = dict[str, Any]
T = TypeVar("T")


def tensors_of(columns: Columns, pinned: bool | None = None) -> Batch:
    """A batch: for each slot a tensor, or the values and offsets that an embedding with pooling
    takes.  The tensors share the columns' memory where it is not pinned.

    Args:
        pinned: in memory from which a GPU copies by itself; None: where there is one.
    """
    pins = torch.cuda.is_available() if pinned is None else pinned

    def tensor(array: Any) -> Tensor:
        found = torch.from_numpy(array)
        return found.pin_memory() if pins else found

    return {
        name: (tensor(column.values), tensor(column.bounds[:-1]))
        if isinstance(column, Ragged)
        else tensor(column)
        for name, column in columns.items()
    }


class Prefetched(Generic[T]):
    """What an iterator gives, made ahead by a thread, at most so many at a time.

    Args:
        begin: makes the iterator, in the thread, which also closes it.
        most: that wait to be taken.
    """

    def __init__(self, begin: Callable[[], Iterator[T]], most: int) -> None:
        self._begin, self._most = begin, most
        self._moved = threading.Condition()  # guards what follows
        self._made = deque[T]()
        self._over = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __iter__(self) -> Generator[T]:
        self._thread.start()
        try:
            while True:
                with self._moved:
                    self._moved.wait_for(lambda: self._made or self._over)
                    if not self._made:
                        break
                    one = self._made.popleft()
                    self._moved.notify_all()
                yield one
            if self._error is not None:
                raise self._error
        finally:
            self._close()

    def _close(self) -> None:
        with self._moved:
            self._closed = True
            self._made.clear()
            self._moved.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            iterator = self._begin()
            try:
                for one in iterator:
                    if not self._put(one):
                        break
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # the script's thread raises it
            self._error = error
        finally:
            with self._moved:
                self._over = True
                self._moved.notify_all()

    def _put(self, one: T) -> bool:
        """Whether it is still wanted."""
        with self._moved:
            self._moved.wait_for(lambda: len(self._made) < self._most or self._closed)
            self._made.append(one)
            self._moved.notify_all()
            return not self._closed
