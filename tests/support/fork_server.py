"""Python processes that begin with torch and the packages imported, which takes each of them
seconds of a core otherwise: a server of this process forks into them.

They are processes as any: a pid, an environment and streams of their own, signals, an exit status.
Their parent is the fork server.  What is particular to the start of an interpreter is tested where
processes are started by ``pserver launch`` or by ``subprocess``.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import IO

from tests.support.forking import BYTES
from tests.support.load import patiently, scaled

ROOT = Path(__file__).parents[2]
SERVE = "import sys; from tests.support.forking import serve; serve(int(sys.argv[1]))"
# what is read when an interpreter begins, or a library that is imported
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH_", "NUMBA_", "GRPC_", "CUDA_", "MALLOC_")
# which import torch; launch and plan do not, and what they start does
TORCH = {
    *(("-m", "pserver", command) for command in ("serve", "replay", "launch", "plan", "save")),
    *(("-m", f"pserver.launcher.{name}") for name in ("free_place", "last_word", "lost_server")),
}
OWN = ("PYTHONPATH", "PYTHONUNBUFFERED")  # of these, which a child reads by itself
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    **ONE_THREAD,
}
SECONDS = 100.0  # for the imports, on a busy machine


class Forked:
    """A process that the fork server has begun: what tests use of :class:`subprocess.Popen`.

    Attributes:
        returncode: None until it has ended; negative for the number of a signal.
    """

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end_with(self, status: int) -> None:
        """It has ended."""
        self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit status, or None."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it has not ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its server has not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Begins with the first process that is asked for, and ends with this process.

    Args:
        begun: a socket to one that has begun already.
    """

    def __init__(self, begun: socket.socket | None = None) -> None:
        self._lock = threading.Lock()  # one start at a time
        self._started: SimpleQueue[Forked] = SimpleQueue()
        self._socket = begun
        if begun is not None:
            self._hear(begun)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, *, joined: bool
    ) -> Forked:
        """Begins ``python ARGUMENTS``; see :func:`started`."""
        stdin, to_it = os.pipe()
        from_it, stdout = os.pipe()
        streams = [stdin, stdout, stdout if joined else 2]
        try:
            forked = self.order(arguments, environment, str(cwd), streams)
        finally:
            os.close(stdin)
            os.close(stdout)
        forked.stdin, forked.stdout = os.fdopen(to_it, "w"), os.fdopen(from_it)
        return forked

    def order(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        streams: Sequence[int],
        group: int | None = None,
    ) -> Forked:
        """Begins ``python ARGUMENTS`` with these standard streams, in a process group; None: in the
        fork server's.
        """
        order = {"arguments": [*arguments], "environment": {**environment}, "cwd": cwd}
        message = json.dumps({**order, "group": group}).encode()
        with self._lock:
            if self._socket is None:
                self._socket = self._begun()
            socket.send_fds(self._socket, [message], streams)
            try:
                return patiently(lambda left: self._started.get(timeout=left), SECONDS)
            except Empty:
                self._socket = None  # another one is asked next: this one may still answer
                raise TimeoutError(f"no fork within {scaled(SECONDS):g} s") from None

    def _begun(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(theirs.fileno())],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._started = SimpleQueue()
        self._hear(ours)
        atexit.register(process.wait, SECONDS)
        atexit.register(ours.shutdown, socket.SHUT_RDWR)
        return ours

    def _hear(self, asked: socket.socket) -> None:
        threading.Thread(target=self._listen, args=(asked, self._started), daemon=True).start()

    @staticmethod
    def _listen(asked: socket.socket, started: SimpleQueue[Forked]) -> None:
        running: dict[int, Forked] = {}
        while message := asked.recv(BYTES):
            said = json.loads(message)
            if "started" in said:
                pid = said["started"]
                running[pid] = Forked(pid)
                started.put(running[pid])
            else:
                running.pop(said["ended"]).end_with(said["status"])


FORK_SERVER = ForkServer()


def forks(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a process with these arguments imports torch, and nothing that an interpreter reads
    when it begins differs from the fork server's.
    """
    words = tuple(arguments[:3])
    known = words in TORCH or words[:2] in TORCH
    imports = known or words[0] == "-c" or words[0][:1] != "-"
    return imports and early(environment) == early(ENVIRONMENT)


def started(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    *,
    joined: bool = True,
) -> Forked | subprocess.Popen[str]:
    """``python ARGUMENTS``, forked where it can be; its input and output are pipes.

    Args:
        environment: in place of this process's; it runs on one thread in any case.
        joined: its standard error goes to its standard output, and else to this process's.
    """
    environment = {**environment, **ONE_THREAD}
    if forks(arguments, environment):
        return FORK_SERVER.start(arguments, environment, cwd, joined=joined)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else None,
        text=True,
    )


def finished(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    *,
    seconds: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS``, forked where it can be, at its end; it has no input.

    Args:
        environment: in place of this process's; it runs on one thread in any case.
        seconds: it has ended by then.

    Returns:
        its status, and what it has said on its two streams.

    Raises:
        subprocess.TimeoutExpired: it goes on; it is killed.
    """
    environment = {**(os.environ if environment is None else environment), **ONE_THREAD}
    with (
        TemporaryFile("w+") as stdout,
        TemporaryFile("w+") as stderr,
        open(os.devnull) as nothing,
    ):
        if forks(arguments, environment):
            streams = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            process: Forked | subprocess.Popen[str]
            process = FORK_SERVER.order(arguments, environment, str(cwd), streams)
        else:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env=environment,
                stdin=nothing,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
        try:
            status = patiently(process.wait, seconds)
        finally:
            process.kill()
            patiently(process.wait, SECONDS)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(
            [sys.executable, *arguments], status, stdout.read(), stderr.read()
        )


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an interpreter reads when it begins; MKL has OpenMP's number of threads
    unless it is told another one.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(EARLY) and name not in OWN
    }
    if found.get("MKL_NUM_THREADS") == found.get("OMP_NUM_THREADS"):
        found.pop("MKL_NUM_THREADS", None)
    return found
