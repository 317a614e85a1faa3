"""The program of :class:`tests.support.fork_server.ForkServer`: it has imported what servers and
trainers import, and forks into each process that is asked for.

A child is what ``python ARGUMENTS`` begins as, with those imports done: it has the working
directory, the environment, the standard streams and the ``__main__`` that it would have, and it
ends as the interpreter ends.  No thread has run before the fork.

``pserver launch`` and ``pserver plan`` fork once more when they begin, before they have threads:
into a fork server of their own, which begins their trainers and servers, and what asks these.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tests.support.fork_server import ForkServer

BYTES = 1 << 18  # of a message, at most
INSTALLED = f"{os.sep}site-packages{os.sep}"
START = (["-m", "pserver", "launch"], ["-m", "pserver", "plan"])  # other processes of Python


def serve(descriptor: int) -> None:
    """Forks for whom is at the other end of a socket; returns in a child, when it is to end."""
    kept: dict[str, Any] = {}
    atexit.register(_leave, kept)  # before any other, so that it is called last
    import numpy as np
    import torch

    import pserver.service.server  # noqa: F401
    import trainer.fleet  # noqa: F401
    from pserver.table.index import order_of

    torch.optim.SGD([torch.zeros(1)])  # which imports torch._dynamo
    order_of(np.arange(2), np.empty(2, np.uint64))  # which lets numba begin
    kept |= _installed() | {"itself": kept}  # a cycle that is frozen stays
    gc.collect()
    gc.freeze()  # children share the pages
    _fork(socket.socket(fileno=descriptor))


def _installed() -> dict[str, ModuleType]:
    """The modules so far that are neither Python's nor ours."""
    places = {name: getattr(each, "__file__", None) or "" for name, each in sys.modules.items()}
    packages = {name.partition(".")[0] for name, place in places.items() if INSTALLED in place}
    return {name: each for name, each in sys.modules.items() if name.partition(".")[0] in packages}


def _leave(kept: Iterable[str]) -> None:
    """Lets a process end without taking modules of these names apart, and without the destructors
    of libraries: both write to the pages that it shares, for a quarter of a second.
    """
    for name in kept:
        sys.modules.pop(name, None)
    library = ctypes.CDLL(None)
    library.fflush(None)
    library.on_exit(library._exit, None)


def _fork(asker: socket.socket) -> None:
    """Forks for whom is at the other end; returns in a child, when it is to end."""
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    while True:
        readable, _, _ = select.select([asker, wakes], [], [])
        if wakes in readable:
            os.read(wakes, 4096)
            _report(asker)
        if asker not in readable:
            continue
        message, streams, _, _ = socket.recv_fds(asker, BYTES, 3)
        if not message:
            sys.exit()
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asker.close()
            os.close(wakes)
            os.close(woken)
            _become(json.loads(message), streams)
            return
        for stream in streams:
            os.close(stream)
        asker.send(json.dumps({"started": pid}).encode())


def _report(asker: socket.socket) -> None:
    """Tells whose children have ended, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        said = {"ended": pid, "status": os.waitstatus_to_exitcode(status)}
        asker.send(json.dumps(said).encode())


def _starts() -> bool:
    """Lets the command that this process is to be fork its trainers and servers, and what asks
    them; returns whether this is one of those, at its end.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        _fork(theirs)
        return True
    theirs.close()
    atexit.register(os.waitpid, pid, 0)
    atexit.register(ours.shutdown, socket.SHUT_RDWR)
    from pserver.launcher import joining, processes, question, supervisor
    from pserver.launcher.planning import plan
    from tests.support.fork_server import ForkServer

    starts = _Starts(ForkServer(ours))
    own = SimpleNamespace(**{**vars(subprocess), "Popen": starts.popen, "run": starts.run})
    for module in (joining, plan, processes, question, supervisor):
        module.subprocess = own  # type: ignore[attr-defined]
    return False


class _Starts:
    """The functions of ``subprocess`` that a command uses, by forks where it can be.

    Args:
        server: that forks.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def popen(self, command: Sequence[str], **named: Any) -> Any:
        """As ``subprocess.Popen``, for processes that are not told anything."""
        from tests.support.fork_server import forks

        environment = {**(named.get("env") or os.environ)}
        if not forks(command[1:], environment):
            return subprocess.Popen(command, **named)
        read: dict[str, int] = {}
        with ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()

            def number(name: str, inherited: int) -> int:
                stream = named.get(name)
                if stream == subprocess.PIPE:
                    read[name], written = os.pipe()
                    stack.callback(os.close, written)
                    return written
                if stream == subprocess.DEVNULL:
                    return nothing
                if stream is None:
                    return inherited
                return int(stream if isinstance(stream, int) else stream.fileno())

            out = number("stdout", 1)
            errors = out if named.get("stderr") == subprocess.STDOUT else number("stderr", 2)
            streams, group = [nothing, out, errors], named.get("process_group")
            forked = self._server.order(command[1:], environment, os.getcwd(), streams, group)
        for name, descriptor in read.items():
            setattr(forked, name, os.fdopen(descriptor, "r" if named.get("text") else "rb"))
        return forked

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        check: bool = False,
        capture_output: bool = False,
        text: bool = False,
        **named: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """As ``subprocess.run``."""
        if capture_output:
            named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        said: dict[str, Any] = {}
        with ExitStack() as stack:
            kept = {
                name: stack.enter_context(TemporaryFile())
                for name in ("stdout", "stderr")
                if named.get(name) == subprocess.PIPE
            }
            process = self.popen(command, **named | kept)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            for name, file in kept.items():
                file.seek(0)
                said[name] = file.read().decode() if text else file.read()
        done = subprocess.CompletedProcess(command, status, **said)
        if check:
            done.check_returncode()
        return done


def _unbuffered(stream: TextIO, descriptor: int) -> TextIO:
    """As the interpreter makes it: no buffer between the text and the descriptor."""
    raw = open(descriptor, "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


def _become(order: Mapping[str, Any], streams: list[int]) -> None:
    """Runs ``python ARGUMENTS`` in this process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order["arguments"][:3] in START and _starts():
        return
    if (group := order.get("group")) is not None:
        os.setpgid(0, group)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["environment"].get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout, 1)
        sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr, 2)
    found = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    more = [path for path in found if path and path not in sys.path]
    sys.path[1:1] = more
    sys.orig_argv = [sys.executable, *order["arguments"]]
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in more):
        importlib.import_module("sitecustomize")
    first, *rest = order["arguments"]
    if first == "-m":
        with suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(" ".join(rest[:2]))  # the command line stays the fork server's
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update(__name__="__main__", __builtins__=builtins, __spec__=None, __package__=None)
    if first == "-c":
        sys.argv, sys.path[0], code = ["-c", *rest[1:]], "", compile(rest[0], "<string>", "exec")
    else:
        path = os.path.abspath(first)
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(path)
        names["__file__"] = path
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
    exec(code, names)
