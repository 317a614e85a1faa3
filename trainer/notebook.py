"""Servers in the background of this process, which is their only trainer: for notebooks, and for
trying things out.

::

    with local_cluster(servers=2):
        fleet.init()
        ...
        fleet.finish()
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from types import TracebackType

from pserver.launcher.cluster import Cluster, JobTokens, ProcessEnvironments
from pserver.launcher.launch import SERVE
from pserver.launcher.processes import ChildProcess, Group, Terminal
from pserver.launcher.started_processes import READY
from pserver.timeouts import KILL_SECONDS
from trainer import fleet
from trainer.job.job import present_or_none

READY_SECONDS = 120.0  # for servers to begin: they import torch
LOOPBACK = "127.0.0.1:0"


class LocalCluster:
    """Servers of this machine, with this process as their only trainer.

    It is a context manager; where the servers are to outlive a cell of a notebook, :meth:`start`
    and :meth:`close` do the same.  It may be entered again after its end.  The servers end with
    this process, however that ends; their output goes to files.

    Args:
        servers: the number of servers.
        logs: a folder for ``server-0.log``, ``server-1.log``, ...; None: a temporary one.

    Attributes:
        endpoints: of the servers, while they run: HOST:PORT each.

    Raises:
        TypeError, ValueError: ``servers`` is no number of 1 or more.
    """

    def __init__(self, servers: int = 2, logs: str | os.PathLike[str] | None = None) -> None:
        if isinstance(servers, bool) or not isinstance(servers, int):
            raise TypeError(f"servers: expected a whole number, got {servers!r}")
        if servers < 1:
            raise ValueError(f"servers: expected 1 or more, got {servers}")
        self._servers, self._logs = servers, logs
        self.endpoints: list[str] = []
        self._stack: ExitStack | None = None

    def __repr__(self) -> str:
        running = ", ".join(self.endpoints) or "not running"
        return f"local_cluster(servers={self._servers}): {running}"

    def start(self) -> LocalCluster:
        """Starts the servers, and gives this process the environment of their trainer.

        Returns:
            This object.

        Raises:
            RuntimeError: this process is in a job or in a cluster already, or a server does not
                start; the message has its last lines.
        """
        if present_or_none() is not None:
            raise RuntimeError("local_cluster: call fleet.finish() first: a job is running")
        if role := os.environ.get("TRAINING_ROLE"):
            raise RuntimeError(
                f"local_cluster: expected a process outside of a cluster, got one with "
                f"TRAINING_ROLE={role}: close its cluster first"
            )
        with ExitStack() as stack:
            self._begin(stack)
            self._stack = stack.pop_all()
        atexit.register(self.close)
        return self

    def _begin(self, stack: ExitStack) -> None:
        folder = self._logs or stack.enter_context(TemporaryDirectory(prefix="pserver-"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        places = (LOOPBACK,) * self._servers
        # a cluster has a script, which its trainers run; nothing starts the trainer of this one
        cluster = Cluster(sys.executable, (), places, ("",), log_dir=str(folder), job="notebook")
        tokens = stack.enter_context(JobTokens(cluster, os.environ))
        environments = ProcessEnvironments(cluster, os.environ)
        group = stack.enter_context(Group())
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        events: SimpleQueue[ChildProcess] = SimpleQueue()
        ready: dict[ChildProcess, str] = {}

        def see(process: ChildProcess, line: str) -> None:
            if process not in ready and (match := READY.search(line)):
                ready[process] = match[1]
                events.put(process)

        started: list[ChildProcess] = []
        stack.callback(_stop, started, events)
        for number in range(self._servers):
            environment = {**environments.of("server", number), **tokens.for_servers}
            started.append(
                ChildProcess(
                    f"server {number}",
                    [*SERVE, "--endpoint", LOOPBACK, "--keep-failed", "0"],
                    {**environment, "PYTHONUNBUFFERED": "1"},
                    Path(folder) / f"server-{number}.log",
                    0,
                    group,
                    Terminal(nowhere, 0),
                    line=see,
                    ended=events.put,
                )
            )
        _await_ready(started, ready, events)
        self.endpoints = [ready[process] for process in started]
        stack.callback(self.endpoints.clear)
        tokens.publish(self.endpoints)
        variables = environments.trainer_roles(self.endpoints)[0] | tokens.for_trainers
        _set_variables(stack, variables)

    def close(self) -> None:
        """Ends the job of this process, if one is running, and the servers; harmless when called
        twice.

        Raises:
            PServerError: the job has failed.
        """
        stack, self._stack = self._stack, None
        if stack is not None:
            atexit.unregister(self.close)
            with stack:
                fleet.finish()

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as further:
            if error is None:
                raise
            error.add_note(f"the job could not be ended: {further}")  # the first error rises


def local_cluster(servers: int = 2, logs: str | os.PathLike[str] | None = None) -> LocalCluster:
    """Servers in the background of this process, which is their only trainer.

    Example::

        with local_cluster(servers=1):
            fleet.init()
            model = fleet.distributed_model(nn.Linear(4, 2))
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters()))
            fleet.finish()

    Args:
        servers: the number of servers.
        logs: a folder for their output, in files; None: a temporary one.

    Returns:
        A context manager: see :class:`LocalCluster`.

    Raises:
        TypeError, ValueError: ``servers`` is no number of 1 or more.
    """
    return LocalCluster(servers, logs)


def _await_ready(
    started: list[ChildProcess],
    ready: dict[ChildProcess, str],
    events: SimpleQueue[ChildProcess],
) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while len(ready) < len(started):
        try:
            process = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            process = next(each for each in started if each not in ready)
            what = f"was not ready within {READY_SECONDS:.0f} seconds"
        else:
            if process.status is None:
                continue
            what = f"ended with status {process.status}"
        last = "\n".join(process.tail) or "it has said nothing"
        raise RuntimeError(f"local_cluster: {process.name} {what}:\n{last}")


def _stop(started: list[ChildProcess], events: SimpleQueue[ChildProcess]) -> None:
    """Ends the servers; those that do not end in time are killed with their group."""
    deadline = time.monotonic() + KILL_SECONDS
    for process in started:
        process.stop(signal.SIGTERM)
    while any(process.status is None for process in started):
        try:
            events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return


def _set_variables(stack: ExitStack, variables: dict[str, str]) -> None:
    """Sets variables of this process's environment until the stack ends."""
    for name, value in variables.items():
        before = os.environ.get(name)
        if before is None:
            stack.callback(os.environ.pop, name, None)
        else:
            stack.callback(os.environ.__setitem__, name, before)
        os.environ[name] = value
