"""``spawn``: a function run by several processes of this machine, which are one another's trainers.

The parent keeps the store that they meet at, so no port is guessed.  A child that raises writes its
traceback into a pipe; one that is killed leaves only its status.  When one has failed the others
get a moment to end by themselves, because whoever fails first need not be the first to be seen;
then they are ended, and the parent raises what the likeliest culprit said.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from pserver.errors import JobFailed, Lost
from trainer.collective.parallel_env import cause_of, fail, leave_parallel_env
from trainer.role import World

SETTLE_SECONDS = 3.0
GRACE_SECONDS = 5.0
START_METHODS = ("spawn", "forkserver")  # torch's threads do not survive a fork


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    **options: Any,
) -> SpawnedProcesses | None:
    """Runs ``func(*args)`` in processes that :func:`trainer.init_parallel_env` makes one another's
    trainers.

    Call it from a script's ``if __name__ == "__main__":``; ``func`` must be a function of a
    module's top level.

    Args:
        nprocs: how many; -1: as many as there are GPUs, or without GPUs as many as there are cores.
        join: waits until all have ended; otherwise the children are returned, whose ``join()``
            does.
        options: ``daemon`` (whether the children end when this process does in any case, and can
            have none themselves; False), and ``start_method`` ("spawn", or "forkserver").

    Raises:
        ProcessRaisedException: a child raised; the message has its traceback.  Of
            torch.multiprocessing, as the next.
        ProcessExitedException: a child ended with another exit code than 0, or by a signal.
        ValueError: ``nprocs`` is neither -1 nor 1 or more; an option has another value than it may.
        TypeError: there is no such option.
    """
    if unknown := sorted(set(options) - {"daemon", "start_method"}):
        raise TypeError(
            "spawn: expected no other options than daemon and start_method, got "
            f"{', '.join(unknown)}"
        )
    method = options.get("start_method", "spawn")
    if method not in START_METHODS:
        raise ValueError(
            f"start_method: expected one of {', '.join(START_METHODS)}, got {method!r}"
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or (nprocs != -1 and nprocs < 1):
        raise ValueError(f"nprocs: expected -1, or 1 or more, got {nprocs!r}")
    children = SpawnedProcesses(
        func,
        tuple(args),
        nprocs if nprocs > 0 else _places(),
        method,
        bool(options.get("daemon", False)),
    )
    if not join:
        return children
    children.join()
    return None


class SpawnedProcesses:
    """The processes that :func:`spawn` has started.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], count: int, method: str, daemon: bool
    ) -> None:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        context: Any = multiprocessing.get_context(method)
        self.processes: list[BaseProcess] = []
        self._reports: list[Connection] = []
        self._said: dict[int, tuple[str, str]] = {}
        self._ended: list[int] = []  # ranks, in the order in which their ends were seen
        self._settled = 0  # how many of these ended by themselves
        # the second end closes with this process, however that ends
        self._alive, self._parent = context.Pipe(duplex=False)
        for rank in range(count):
            world = World(rank, count, rank, "127.0.0.1", self._store.port, served=True)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(world, func, args, theirs, self._alive),
                name=f"trainer {rank}",
                daemon=daemon,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._reports.append(ours)

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all have ended well (True), or for ``timeout`` seconds.

        Raises:
            ProcessRaisedException, ProcessExitedException: see :func:`spawn`; the others have been
                ended then.
        """
        self._until_ended(timeout, failures=True)
        if any(self._failed(rank) for rank in self._ended):
            self._end_the_rest()
            raise self._error(self._guilty())
        return len(self._ended) == len(self.processes)

    def _until_ended(self, timeout: float | None, *, failures: bool) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while running := {
            process.sentinel: rank
            for rank, process in enumerate(self.processes)
            if rank not in self._ended
        }:
            left = None if end is None else end - time.monotonic()
            ready = wait(list(running), left) if left is None or left > 0 else []
            if not ready:
                return
            for sentinel in ready:
                rank = running[sentinel]  # type: ignore[index]  # sentinels are whole numbers here
                self.processes[rank].join()
                self._ended.append(rank)
            if failures and any(self._failed(rank) for rank in self._ended):
                return

    def _failed(self, rank: int) -> bool:
        return self.processes[rank].exitcode != 0

    def _end_the_rest(self) -> None:
        self._until_ended(SETTLE_SECONDS, failures=False)
        self._settled = len(self._ended)
        for stop in (BaseProcess.terminate, BaseProcess.kill):
            for rank, process in enumerate(self.processes):
                if rank not in self._ended:
                    stop(process)
            self._until_ended(GRACE_SECONDS, failures=False)

    def _guilty(self) -> int:
        """Of those that ended by themselves: killed by a signal, then with an error of its own,
        then whoever was first.
        """
        failed = [rank for rank in self._ended[: self._settled] if self._failed(rank)]
        return min(
            failed,
            key=lambda rank: (
                self._code(rank) >= 0,
                self._report(rank)[0] == "caused",
                failed.index(rank),
            ),
        )

    def _code(self, rank: int) -> int:
        return self.processes[rank].exitcode or 0

    def _report(self, rank: int) -> tuple[str, str]:
        """What a child has said of its end: ("own" or "caused" by another, its traceback)."""
        with suppress(EOFError, OSError):
            if self._reports[rank].poll():
                kind, _, text = self._reports[rank].recv_bytes().decode().partition("\n")
                self._said[rank] = (kind, text)
        return self._said.get(rank, ("own", ""))

    def _error(self, rank: int) -> Exception:
        code, pid = self._code(rank), self.processes[rank].pid or 0
        text = self._report(rank)[1]
        if text:
            return ProcessRaisedException(f"\n\n-- trainer {rank} ended with:\n{text}", rank, pid)
        if code < 0:
            name = signal.Signals(-code).name
            return ProcessExitedException(
                f"trainer {rank} was ended by {name}", rank, pid, exit_code=code, signal_name=name
            )
        return ProcessExitedException(
            f"trainer {rank} ended with exit code {code}", rank, pid, exit_code=code
        )


def _run(
    world: World,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    report: Connection,
    parent: Connection,
) -> None:
    """A child: runs the function, and says how that ended."""
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    world.enter()
    try:
        func(*args)
    except SystemExit as error:
        if error.code:
            fail(error)
        raise
    except Exception as error:
        found = cause_of(error)
        if found is not None:
            found.__cause__ = error
            error = found
        caused = isinstance(error, (Lost, JobFailed))
        if not caused:
            fail(error)
        report.send_bytes(
            f"{'caused' if caused else 'own'}\n{''.join(traceback.format_exception(error))}".encode()
        )
        sys.exit(1)
    finally:
        leave_parallel_env()


def _end_with(parent: Connection) -> None:
    """Nobody outlives the parent: nothing is ever sent here, so this returns when the parent is
    gone.
    """
    with suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(1)


def _places() -> int:
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
