"""``spawn``: runs a function in several processes of this machine, which are the trainers of one
job.

The parent serves the store of their rendezvous, so no port is guessed.  A spawned process that
raises writes its traceback into a pipe; one that is killed leaves only its status.  When one has
failed the others get SETTLE_SECONDS to end by themselves, because the first to fail need not be the
first that is noticed; then they are terminated, and the parent raises the likeliest cause.
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
from pserver.timeouts import KILL_SECONDS
from pserver.undone import or_undone
from trainer.collective.world import cause_of, fail, leave_parallel_env
from trainer.environment.environment import World
from transpiler.plan.settings import check_flag

SETTLE_SECONDS = 3.0
START_METHODS = ("spawn", "forkserver")  # torch's threads do not survive a fork


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    **options: Any,
) -> SpawnedProcesses | None:
    """Runs ``func(*args)`` in processes that :func:`trainer.init_parallel_env` makes the trainers
    of one job.

    Call it from a script's ``if __name__ == "__main__":``; ``func`` must be a function of a
    module's top level.

    Example::

        spawn(torch.set_num_threads, (1,), nprocs=2)    # in place of a function that trains

    Args:
        func: runs in each process; it calls ``init_parallel_env()`` first.
        args: of ``func``, the same in each process.
        nprocs: the number of processes; -1: one for each GPU, or without GPUs one for each core.
        join: whether to wait until all have ended.
        options: ``daemon`` (whether the processes always end with this one, and can have no child
            processes; False), and ``start_method`` ("spawn", or "forkserver").

    Returns:
        None; without ``join`` the processes, whose ``join()`` waits for them.

    Raises:
        ProcessRaisedException: a process raised an exception; the message has its traceback.  Of
            torch.multiprocessing, as the next.
        ProcessExitedException: a process ended with an exit code other than 0, or by a signal.
        ValueError: ``nprocs`` is neither -1 nor 1 or more, or an option has a wrong value.
        TypeError: there is no such option.
    """
    if unknown := sorted(set(options) - {"daemon", "start_method"}):
        raise TypeError(
            "spawn: expected no other options than daemon and start_method, got "
            f"{', '.join(unknown)}"
        )
    check_flag("join", join)
    method = options.get("start_method", "spawn")
    if method not in START_METHODS:
        raise ValueError(
            f"start_method: expected one of {', '.join(START_METHODS)}, got {method!r}"
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or (nprocs != -1 and nprocs < 1):
        raise ValueError(f"nprocs: expected -1, or 1 or more, got {nprocs!r}")
    spawned = SpawnedProcesses(
        func,
        tuple(args),
        nprocs if nprocs > 0 else _default_count(),
        method,
        check_flag("daemon", options.get("daemon", False)),
    )
    if not join:
        return spawned
    with or_undone(
        spawned.end_the_rest
    ):  # an interrupt is one of this process alone, in a notebook
        spawned.join()
    return None


class SpawnedProcesses:
    """The processes that :func:`spawn` has started, and the store of their rendezvous.

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
        self._settled = 0  # the number of these that ended by themselves
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
        """Waits until all have ended successfully (True), or for ``timeout`` seconds.

        Raises:
            ProcessRaisedException, ProcessExitedException: see :func:`spawn`; the others have been
                terminated then.
        """
        self._until_ended(timeout, failures=True)
        if any(self._failed(rank) for rank in self._ended):
            self.end_the_rest()
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

    def end_the_rest(self) -> None:
        """Ends the running processes, after some seconds in which they may end by themselves."""
        self._until_ended(SETTLE_SECONDS, failures=False)
        self._settled = len(self._ended)
        for stop in (BaseProcess.terminate, BaseProcess.kill):
            for rank, process in enumerate(self.processes):
                if rank not in self._ended:
                    stop(process)
            self._until_ended(KILL_SECONDS, failures=False)

    def _guilty(self) -> int:
        """The likeliest cause among the processes that ended by themselves: one killed by a signal,
        then one with an error of its own, then the first.
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
        """A process's report of its end: by an error of its "own", or "caused" by another trainer;
        and its traceback.
        """
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
    """Runs the function in a spawned process, and reports its end."""
    threading.Thread(target=_end_with_parent, args=(parent,), name="parent", daemon=True).start()
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
        text = "".join(traceback.format_exception(error))
        report.send_bytes(f"{'caused' if caused else 'own'}\n{text}".encode())
        sys.exit(1)
    finally:
        leave_parallel_env()


def _end_with_parent(parent: Connection) -> None:
    """Ends this process with its parent: nothing is ever sent here, so reading ends when the parent
    ends.
    """
    with suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(1)


def _default_count() -> int:
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
