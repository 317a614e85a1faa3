"""Ranks that stand by: gloo processes that run one function after another, each on all of them.

They serve a test whose cases are chosen by pytest: what a case asks for is run, and nothing else.
After a failure they are ended, because a rank may still wait for another; the next call starts
others.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.load import patiently

SECONDS = 120.0  # for one function, the start of the processes included, on a busy machine
COLLECTIVE_SECONDS = 30.0


class StandingRanks:
    """So many processes of one group; the script's thread asks.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function of a module with these arguments on every rank.

        Raises:
            AssertionError: it raised on some rank; the message has the tracebacks.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        said = [
            pipe.recv() if patiently(pipe.poll, SECONDS) else f"no answer within {SECONDS:g} s"
            for pipe in self._pipes
        ]
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        with tempfile.NamedTemporaryFile(delete=False) as file:
            Path(file.name).unlink()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, file.name, rank, self._size), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """Ends the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection, store: str, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            function(*args)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")
