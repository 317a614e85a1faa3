"""One server or trainer, on its node: the class that Ray makes an actor of."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pserver.errors import JobFailed, Lost
from pserver.launcher.launch import SERVE
from pserver.launcher.processes import Group, Process, Terminal
from pserver.launcher.started_processes import READY
from pserver.launcher.supervisor import GRACE_SECONDS
from pserver.ray.captured_output import captured_output
from pserver.ray.installed import ray_library
from pserver.ray.news import Ended, News, Place
from pserver.ray.node_keys import public_bytes, write_credentials
from pserver.ray.order import Order
from pserver.ray.spoken_lines import SpokenLines
from pserver.ray.variables import without_other_jobs
from pserver.security import tokens
from pserver.security.keys import new_key

MOST_RESULT = 32_768  # bytes of what a function returns: Ray gives answers of up to 100 KB inline
MOST_TAIL, MOST_TAIL_LINE = 40, 500  # lines, and characters of each


class RoleActor:
    """A process of a job, as the driver sees it.

    It serves one attempt: the driver ends it, and Ray places another one for the next attempt.
    Several of its methods run at once, in threads of Ray's.

    Args:
        kind: "server" or "trainer".
        number: which of them.
    """

    def __init__(self, kind: str, number: int) -> None:
        self._kind, self.name = kind, f"{kind} {number}"
        self._key = new_key()
        self._spoken = SpokenLines()
        self._stack = ExitStack()  # what is undone when the process has ended
        self._process: Process | None = None

    def __repr__(self) -> str:
        """What Ray calls it in its own lines."""
        return self.name

    def place(self) -> Place:
        """Where it is."""
        ray = ray_library()
        node = ray.get_runtime_context().get_node_id()
        return Place(ray.util.get_node_ip_address(), node, public_bytes(self._key))

    def start(self, order: Order) -> None:
        """Starts the server, or the trainer's script.

        Raises:
            FileNotFoundError: this node has no such script.
        """
        environment = self._prepare(order)
        if self._kind == "server":
            command = [*SERVE, "--once", *order.flags]
        else:
            command = [sys.executable, script_here(order), *order.arguments]
        group = self._stack.enter_context(Group())
        nowhere = self._stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        self._process = Process(
            self.name,
            command,
            environment,
            Path(os.devnull),  # the driver gets the lines
            0,
            group,
            Terminal(nowhere, 0),
            line=self._take,
            ended=self._end,
        )

    def prepare(self, order: Order) -> None:
        """Gives this process the environment of a trainer, before its function comes: with it come
        torch, and what else reads the environment once.
        """
        environment = self._prepare(order)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)

    def train(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Begins to call the trainer's function, in a thread of its own."""
        threading.Thread(
            target=self._call, args=(function, arguments), name="trainer", daemon=True
        ).start()

    def news(self, seconds: float) -> News:
        """What has happened since the last call; waits until something has, or the time is over."""
        return self._spoken.news(seconds)

    def stop(self, number: int) -> None:
        """Asks the process to end, kills it after a grace, and returns when it is gone.

        A function goes on: the driver ends the actor, and with it the function.
        """
        process = self._process
        if process is not None and process.status is None:
            process.stop(number)
            if not self._spoken.wait_for_end(GRACE_SECONDS):
                process.stop(signal.SIGKILL)
                self._spoken.wait_for_end(GRACE_SECONDS)
        self._stack.close()

    # ---- the process ----

    def _prepare(self, order: Order) -> dict[str, str]:
        """Writes the credentials; returns the whole environment of the process."""
        inherited = without_other_jobs(os.environ)
        held = tokens.Held(tokens.folder(os.environ))
        self._stack.callback(held.remove)
        named = write_credentials(held.directory(), self._kind, order.credentials, self._key)
        if os.path.isdir(order.folder):
            os.chdir(order.folder)
        return {**inherited, **order.variables, **named}

    def _take(self, process: Process, line: str) -> None:
        self._spoken.say(line)
        if self._kind == "server" and (match := READY.search(line)):
            self._spoken.ready(match[1])

    def _end(self, process: Process) -> None:
        assert process.status is not None, "it has ended"
        self._spoken.end(Ended(process.status, _shortened(process.tail), process.told))

    # ---- a function in this process ----

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            del lines[:-MOST_TAIL]
            self._spoken.say(line)

        with captured_output(say):
            ended = _called(function, arguments)
        tail = _shortened(lines) if ended.status and not ended.tail else ended.tail
        self._stack.close()
        self._spoken.end(Ended(ended.status, tail, ended.told, ended.value))


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> Ended:
    """Calls a function, as a script would have been run.  What it raises is printed."""
    try:
        value = function(*arguments)
        _check_result(value)
        return Ended(0, value=value)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return Ended((error.code or 0) & 0xFF)
        print(error.code, file=sys.stderr)
        return Ended(1)
    except BaseException as error:
        text = traceback.format_exc()
        print(text, end="", file=sys.stderr)
        told = str(error) if isinstance(error, JobFailed | Lost) else ""
        return Ended(1, _shortened(text.splitlines()), told)


def _check_result(value: Any) -> None:
    """Returns if a result is small enough to be told.

    Raises:
        ValueError: it is not.
    """
    size = len(ray_library().cloudpickle.dumps(value))
    if size > MOST_RESULT:
        raise ValueError(
            f"expected a function that returns at most {MOST_RESULT} bytes, got {size} bytes of "
            f"{type(value).__name__}: Ray carries small results; a model goes into a file, by "
            "fleet.save or fleet.export"
        )


def script_here(order: Order) -> str:
    """The script's path on this node.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in (order.script, os.path.abspath(order.near)):
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(
        f"expected the script {order.script} on this node, or {order.near} in {os.getcwd()}, found "
        "neither: put it where all nodes see it, or give Ray its folder as working_dir"
    )


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:MOST_TAIL_LINE] for line in lines[-MOST_TAIL:])
