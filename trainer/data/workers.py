"""Pieces of files, parsed in parallel, in their order.

Formats whose kernels hold no GIL are parsed by threads: nothing is copied between processes.  A
parser in Python is run by processes, where there are to be several.  They end with the iteration,
with an error, and with the process that has started them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from trainer.data.formats import Format
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece

T = TypeVar("T")


def in_parallel(
    form: Format, pieces: Iterable[Piece], workers: int, skip: bool
) -> Generator[tuple[Piece, Parsed]]:
    """Parses pieces; at most ``workers + 1`` of them are in memory.

    Args:
        pieces: in the order in which they come back.
        skip: leave wrong lines out, and count them.

    Raises:
        WrongLine, OSError: see :meth:`trainer.data.lines.LineFormat.read`.
        RuntimeError: a worker process was killed.
    """
    return _each(form.read, form, pieces, workers, skip)


def counted(
    form: Format, pieces: Iterable[Piece], workers: int, skip: bool
) -> Generator[tuple[Piece, int]]:
    """How many samples pieces have; see :func:`in_parallel`."""
    return _each(form.count, form, pieces, workers, skip)


def _each(
    what: Callable[[Piece, bool], T],
    form: Format,
    pieces: Iterable[Piece],
    workers: int,
    skip: bool,
) -> Generator[tuple[Piece, T]]:
    pool = _pool(form, workers)
    waiting = deque[tuple[Piece, Future[T]]]()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(what, piece, skip)))
            if len(waiting) > workers:
                first, found = waiting.popleft()
                yield first, found.result()
        while waiting:
            first, found = waiting.popleft()
            yield first, found.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a process that runs the script's parser was killed, as for want of memory: expected "
            "it to end by itself; set_thread() says how many there are"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pool(form: Format, workers: int) -> Executor:
    if not form.in_processes or workers == 1:
        return ThreadPoolExecutor(workers, "parses")
    # a fork would copy the locks of this process's threads
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=_begin_worker)


def _begin_worker() -> None:
    """An interrupt is the parent's to act on, whose end is this process's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"
    wait([parent.sentinel])
    os._exit(1)
