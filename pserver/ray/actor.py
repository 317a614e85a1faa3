"""One server or trainer on its node: the class of the actor, its orders, and its news."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pserver.config import MOST_JOB_NAME, check_seconds, refuse_url
from pserver.errors import JobFailed, Lost
from pserver.extras import extra
from pserver.launcher.launch import SERVE
from pserver.launcher.processes import ChildProcess, Group, Terminal
from pserver.launcher.started_processes import READY
from pserver.security import tokens
from pserver.security.keys import (
    AUTHORITY_FILE,
    REVOKED,
    Authority,
    PrivateKey,
    certificate_bytes,
    key_bytes,
    new_key,
    write_private,
)
from pserver.security.tokens import Role, Secret
from pserver.side_business import SideBusiness
from pserver.timeouts import KILL_SECONDS

# ---- captured output ----
#
# The output of a function that trains in the actor's own process.


DRAIN_SECONDS = 1.0  # a process that the function has started may hold the pipe open for longer


@contextmanager
def captured_output(say: Callable[[str], None]) -> Iterator[None]:
    """Turns this process's output on its descriptors 1 and 2 into lines while the block runs.

    Args:
        say: called for each line, in a thread of its own.
    """
    reads, writes = os.pipe()
    kept = os.dup(1), os.dup(2)
    reader = threading.Thread(target=_read, args=(reads, say), name="output", daemon=True)
    _flush()
    os.dup2(writes, 1)
    os.dup2(writes, 2)
    os.close(writes)
    reader.start()
    try:
        yield
    finally:
        _flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        reader.join(DRAIN_SECONDS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _read(descriptor: int, say: Callable[[str], None]) -> None:
    with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as lines:
        saying = SideBusiness("what this process prints")
        for line in lines:
            saying.do(partial(say, line.rstrip("\n").rpartition("\r")[2]))


# ---- installed ----
#
# Ray, if it is installed.


def ray_library() -> Any:
    """The package ``ray``.

    Raises:
        ImportError: it cannot be imported; the message says how to install it.
    """
    with extra("ray", "pserver.ray.run needs Ray"):
        import ray
        import ray.cloudpickle
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    return ray


# ---- news ----
#
# What an actor says of its process.


@dataclass(frozen=True)
class ActorPlace:
    """The place of an actor.

    Attributes:
        address: of its node, as other nodes reach it.
        node: the hexadecimal digits by which Ray names it.
        public_key: of the key that the actor has made for its process, as PEM.
    """

    address: str
    node: str
    public_key: bytes


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process.

    Attributes:
        status: its exit status, or 128 + the signal that killed it.
        tail: its last lines; from its last traceback on, where there is one.
        told: its line about the error by which another process has ended it; "" where there is
            none.
        value: what a function has returned.
    """

    status: int
    tail: tuple[str, ...] = ()
    told: str = ""
    value: Any = None


@dataclass(frozen=True)
class ActorEvents:
    """The events since an actor was last asked.

    Attributes:
        lines: of output.
        left_out: lines that came faster than they were fetched, and are lost.
        endpoint: of a server that is ready; "" until then.
        ended: None while the process runs.
    """

    lines: tuple[str, ...] = ()
    left_out: int = 0
    endpoint: str = ""
    ended: ProcessEnd | None = None


# ---- order ----
#
# The orders of an actor: the part of its process in the job.


@dataclass(frozen=True)
class Credentials:
    """The credentials of a process; the actor writes them into files of its own.

    Attributes:
        token: of the job's secret, as a token file holds it.
        files: by name, what stands in the folder of keys besides the private key, which the actor
            has made itself; empty: the job has no keys.
    """

    token: str = field(repr=False)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class StartRequest:
    """The start of a server, or of a trainer's script.

    Attributes:
        variables: its environment besides the node's.
        credentials: its own.
        flags: of ``pserver serve``, for a server.
        script: the path of the trainer's script as the driver knows it; "" where there is none.
        near: the same path from the driver's working directory, for nodes that have a copy of it.
        folder: the driver's working directory.
        arguments: the script's.
    """

    variables: dict[str, str]
    credentials: Credentials
    flags: tuple[str, ...] = ()
    script: str = ""
    near: str = ""
    folder: str = ""
    arguments: tuple[str, ...] = ()


# ---- node keys ----
#
# The job's secret, and keys for TLS between nodes.
#
# An actor makes the private key of its process itself, and it stays in a file of that node.  The
# driver, which is the job's authority for as long as the job runs, gets the public key and answers
# with a certificate.  So no private key is on the way, whatever Ray's own connections are like.
#
# Keys are needed where processes are at several addresses.  On one address they use the loopback,
# which no one else reaches.


LOOPBACK = "127.0.0.1"
KEYS = "PSERVER_KEYS"


class JobKeys:
    """The secret of one attempt, and the authority that signs its keys.

    Args:
        addresses: of all processes.
        environment: the variables that the user has given: with keys of his own, or with
            PSERVER_INSECURE=1, none are made.
    """

    def __init__(self, addresses: Collection[str], environment: Mapping[str, str]) -> None:
        self._secret = Secret.make()
        self._local = len(set(addresses)) == 1
        self._now = datetime.now(UTC)
        given = environment.get(KEYS) or environment.get("PSERVER_INSECURE") == "1"
        self._authority = None if self._local or given else Authority.new(self._now)

    def host(self, address: str) -> str:
        """The host on which a server listens, on a node of this address."""
        return LOOPBACK if self._local else address

    def credentials(self, kind: str, address: str, public_key: bytes) -> Credentials:
        """The credentials of a process.

        Args:
            kind: "server" or "trainer".
            public_key: of the key that its actor has made, as PEM.
        """
        role = Role.OPERATOR if kind == "server" else Role.TRAINER
        token = self._secret.of(role).text
        if self._authority is None:
            return Credentials(token)
        key = serialization.load_pem_public_key(public_key)
        assert isinstance(key, ec.EllipticCurvePublicKey), "as the actor makes it"
        signed = self._authority.issue(key, kind, (address,), self._now)
        files = {
            f"{kind}.pem": certificate_bytes(signed),
            AUTHORITY_FILE: certificate_bytes(self._authority.certificate),
            REVOKED: self._authority.revocations((), self._now),
        }
        return Credentials(token, files)


def public_bytes(key: PrivateKey) -> bytes:
    """The public half of a key, as PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def write_credentials(
    folder: Path, kind: str, credentials: Credentials, key: PrivateKey
) -> dict[str, str]:
    """Writes what a process has into files that only this user can read.

    Args:
        folder: the process's own.

    Returns:
        The variables that name them.
    """
    token = folder / f"{kind}.token"
    tokens.write(token, Secret.parse(credentials.token))
    variables = {"PSERVER_TOKEN_FILE": str(token)}
    if credentials.files:
        keys = folder / "keys"
        write_private(keys / f"{kind}.key", key_bytes(key))
        for name, content in credentials.files.items():
            write_private(keys / name, content)
        variables[KEYS] = str(keys)
    return variables


# ---- request ----
#
# The arguments of ``run``, and their checks.


STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
MOST_PROCESSES = 65536
# The settings of a process that follow from its place in the job, or from the actor that starts it.
OUR_SETTINGS = (
    "TRAINING_ROLE",
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "PSERVER_TOKEN_FILE",
    "PSERVER_METRICS",
)
FLAGS_OF_OURS = ("--endpoint", "--once", "--keys", "--insecure", "--metrics", "--keep-failed")
Target = str | os.PathLike[str] | Callable[..., Any]


@dataclass(frozen=True)
class JobRequest:
    """A job, as :func:`pserver.ray.run` has been asked for it; see there for each field.

    Raises:
        TypeError: a field is of another type.
        ValueError: there is no such script, or a field is out of its range or has no effect; one
            sentence.
    """

    target: Target
    servers: int = 1
    trainers: int = 1
    arguments: Sequence[Any] = ()
    server_resources: Mapping[str, float] | None = None
    trainer_resources: Mapping[str, float] | None = None
    max_restarts: int = 0
    environment: Mapping[str, str] | None = None
    server_flags: Sequence[str] = ()
    strategy: str = "PACK"
    start_timeout: float = 300.0
    log_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("servers", "trainers"):
            _check_whole(name, getattr(self, name), 1, MOST_PROCESSES)
        _check_whole("max_restarts", self.max_restarts, 0, MOST_PROCESSES)
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy: expected one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        check_seconds("start_timeout", self.start_timeout)
        if self.log_dir is not None:
            refuse_url("log_dir", self.log_dir)
        self._check_target()
        self._check_words()
        for name in ("server_resources", "trainer_resources"):
            _check_resources(name, getattr(self, name))

    @property
    def is_function(self) -> bool:
        """Whether a trainer calls a function; otherwise it runs a script."""
        return callable(self.target)

    @property
    def script(self) -> str:
        """The path of the script, as it was given.

        Raises:
            TypeError: the target is a function.
        """
        if not isinstance(self.target, str | os.PathLike):
            raise TypeError(f"expected a script, got {self.target!r}")
        return os.fspath(self.target)

    @property
    def name(self) -> str:
        """The job's name in metrics."""
        if self.is_function:
            return getattr(self.target, "__name__", "function")[:MOST_JOB_NAME]
        return Path(self.script).stem[:MOST_JOB_NAME]

    def resources(self, kind: str) -> dict[str, float]:
        """The resources of each process of a kind: "CPU", "GPU", "memory" (bytes), or others.

        Args:
            kind: "server" or "trainer".
        """
        given = self.server_resources if kind == "server" else self.trainer_resources
        return {"CPU": 1, **(given or {})}

    def processes(self) -> list[tuple[str, int]]:
        """The kind and the number of each process: servers first."""
        counts = (("server", self.servers), ("trainer", self.trainers))
        return [(kind, number) for kind, count in counts for number in range(count)]

    def _check_target(self) -> None:
        if self.is_function:
            return
        if not isinstance(self.target, str | os.PathLike):
            raise TypeError(
                f"target: expected the path of a script or a function, got {self.target!r}"
            )
        if not Path(self.script).is_file():
            raise ValueError(f"target: expected a script, and there is no file {self.script!r}")
        for argument in self.arguments:
            if not isinstance(argument, str):
                raise TypeError(f"arguments: a script's are texts, got {argument!r}")

    def _check_words(self) -> None:
        """The flags and variables that the user adds."""
        for name in ("arguments", "server_flags"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected a list, got the text {getattr(self, name)!r}")
        for flag in self.server_flags:
            if flag.partition("=")[0] in FLAGS_OF_OURS:
                raise ValueError(f"server_flags: {flag} is not for the user to say here")
        for variable, value in (self.environment or {}).items():
            if not isinstance(value, str):
                raise TypeError(f"environment: expected a text for {variable}, got {value!r}")
            if variable in OUR_SETTINGS:
                raise ValueError(f"environment: {variable} follows from the job's place on Ray")


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}")


def _check_resources(name: str, resources: Mapping[str, float] | None) -> None:
    for resource, amount in (resources or {}).items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not number or not 0 <= amount < float("inf"):
            raise ValueError(f"{name}: expected 0 or more of {resource}, got {amount!r}")
    if resources is not None and not sum({"CPU": 1, **resources}.values()) > 0:
        raise ValueError(f"{name}: expected something above 0, got {dict(resources)}")


# ---- spoken lines ----
#
# The news of a process, until they are fetched.


MOST_KEPT = 20_000  # unfetched lines
MOST_BYTES = 32_768  # of lines in one answer: Ray gives answers of up to 100 KB inline


class LogLines:
    """The news of one process.  Any thread may call it.

    Example::

        lines = LogLines()
        lines.add("loss 0.5")
        lines.fetch(1.0)  # ActorEvents(lines=("loss 0.5",), ...)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._lines = deque[str]()
        self._left_out = 0
        self._endpoint = ""
        self._told_endpoint = False
        self._ended: ProcessEnd | None = None

    def add(self, line: str) -> None:
        """Adds a line of the process."""
        with self._changed:
            if len(self._lines) >= MOST_KEPT:
                self._lines.popleft()
                self._left_out += 1
            self._lines.append(line)
            self._changed.notify_all()

    def ready(self, endpoint: str) -> None:
        """Notes the endpoint at which the server listens."""
        with self._changed:
            self._endpoint = endpoint
            self._changed.notify_all()

    def end(self, ended: ProcessEnd) -> None:
        """Notes the end of the process, after its last line."""
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the process has ended; waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended is not None, seconds)

    def fetch(self, seconds: float) -> ActorEvents:
        """The news that has not been fetched yet; waits until there is some, or the time is over.

        The end of the process is reported once all of its lines are fetched.
        """
        with self._changed:
            self._changed.wait_for(self._is_news, seconds)
            lines, size = list[str](), 0
            while self._lines and size < MOST_BYTES:
                lines.append(self._lines.popleft()[:MOST_BYTES])
                size += len(lines[-1].encode())
            left_out, self._left_out = self._left_out, 0
            self._told_endpoint = bool(self._endpoint)
            ended = None if self._lines else self._ended
            return ActorEvents(tuple(lines), left_out, self._endpoint, ended)

    def _is_news(self) -> bool:
        new_endpoint = bool(self._endpoint) and not self._told_endpoint
        return bool(self._lines) or new_endpoint or self._ended is not None


# ---- variables ----
#
# The environment variables of the processes of a job on Ray.


OUR_VARIABLES = re.compile(r"PSERVER_\w+")
# of a node's own environment: another job's, or another launcher's
DROPPED = (
    "TRAINING_ROLE",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def own_variables(
    request: JobRequest, kind: str, number: int, endpoints: Sequence[str] = ()
) -> dict[str, str]:
    """The variables of a process, besides those of its node.

    Args:
        kind: "server" or "trainer".
        endpoints: of all servers, for a trainer.
    """
    threads = str(max(1, int(request.resources(kind)["CPU"])))
    role = {
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": ",".join(endpoints),
        "TRAINERS": str(request.trainers),
        "TRAINER_ID": str(number),
    }
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PSERVER_JOB": request.name,
        **(request.environment or {}),
        **(role if kind == "trainer" else {}),
    }


def without_other_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """A node's environment without variables that would give a process another role.

    Ray may have been started by a process of another job, or in a shell with settings of
    ``pserver``; the settings that count here are arguments of ``run``.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in DROPPED and not OUR_VARIABLES.match(name)
    }


# ---- role actor ----
#
# One server or trainer, on its node: the class that Ray makes an actor of.


MOST_RESULT = 32_768  # bytes of what a function returns: Ray gives answers of up to 100 KB inline
MOST_TAIL, MOST_TAIL_LINE = 40, 500  # lines, and characters of each


class RoleActor:
    """A process of a job, as the driver sees it.

    It serves one attempt: the driver ends it, and Ray places another one for the next attempt.
    Several of its methods run at once, in threads of Ray's.

    Args:
        kind: "server" or "trainer".
        number: of the process among its kind.
    """

    def __init__(self, kind: str, number: int) -> None:
        self._kind, self.name = kind, f"{kind} {number}"
        self._key = new_key()
        self._spoken = LogLines()
        self._stack = ExitStack()  # what is undone when the process has ended
        self._process: ChildProcess | None = None

    def __repr__(self) -> str:
        """Its name in Ray's own lines."""
        return self.name

    def place(self) -> ActorPlace:
        """Its place."""
        ray = ray_library()
        node = ray.get_runtime_context().get_node_id()
        return ActorPlace(ray.util.get_node_ip_address(), node, public_bytes(self._key))

    def start(self, order: StartRequest) -> None:
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
        self._process = ChildProcess(
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

    def prepare(self, order: StartRequest) -> None:
        """Gives this process the environment of a trainer, before its function arrives: the
        function imports torch, and other modules that read the environment once.
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

    def events(self, seconds: float) -> ActorEvents:
        """The events since the last call; waits until there is one, or the time is over."""
        return self._spoken.fetch(seconds)

    def stop(self, number: int) -> None:
        """Asks the process to end, kills it after a grace, and returns when it is gone.

        A function keeps running: the driver ends the actor, and with it the function.
        """
        process = self._process
        if process is not None and process.status is None:
            process.stop(number)
            if not self._spoken.wait_for_end(KILL_SECONDS):
                process.stop(signal.SIGKILL)
                self._spoken.wait_for_end(KILL_SECONDS)
        self._stack.close()

    # ---- the process ----

    def _prepare(self, order: StartRequest) -> dict[str, str]:
        """Writes the credentials; returns the whole environment of the process."""
        inherited = without_other_jobs(os.environ)
        held = tokens.LockedFiles(tokens.folder(os.environ))
        self._stack.callback(held.remove)
        named = write_credentials(held.directory(), self._kind, order.credentials, self._key)
        if os.path.isdir(order.folder):
            os.chdir(order.folder)
        return {**inherited, **order.variables, **named}

    def _take(self, process: ChildProcess, line: str) -> None:
        self._spoken.add(line)
        if self._kind == "server" and (match := READY.search(line)):
            self._spoken.ready(match[1])

    def _end(self, process: ChildProcess) -> None:
        assert process.status is not None, "it has ended"
        self._spoken.end(
            ProcessEnd(process.status, _shortened(process.tail), process.reported_error)
        )

    # ---- a function in this process ----

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            del lines[:-MOST_TAIL]
            self._spoken.add(line)

        with captured_output(say):
            ended = _called(function, arguments)
        tail = _shortened(lines) if ended.status and not ended.tail else ended.tail
        self._stack.close()
        self._spoken.end(ProcessEnd(ended.status, tail, ended.told, ended.value))


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> ProcessEnd:
    """Calls a function, as a script would have been run.  What it raises is printed."""
    try:
        value = function(*arguments)
        _check_result(value)
        return ProcessEnd(0, value=value)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return ProcessEnd((error.code or 0) & 0xFF)
        print(error.code, file=sys.stderr)
        return ProcessEnd(1)
    except BaseException as error:
        text = traceback.format_exc()
        print(text, end="", file=sys.stderr)
        told = str(error) if isinstance(error, JobFailed | Lost) else ""
        return ProcessEnd(1, _shortened(text.splitlines()), told)


def _check_result(value: Any) -> None:
    """Returns if a result is small enough for Ray.

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


def script_here(order: StartRequest) -> str:
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
