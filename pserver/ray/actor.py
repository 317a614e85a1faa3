"""One server or trainer on its node: the three classes that Ray makes actors of, and their orders.

::

    ServerActor    pserver serve, a child process
    ScriptActor    a trainer's script, a child process
    FunctionActor  a trainer's function, in the actor's own process

What they print goes to the actor's standard output, which Ray shows and keeps.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pserver.errors import JobFailed, Lost
from pserver.extras import extra
from pserver.launcher.launch import SERVE
from pserver.launcher.processes import ChildProcess, Group, Terminal, killer
from pserver.launcher.started_processes import READY
from pserver.security import tokens
from pserver.security.certificates import (
    Authority,
    PrivateKey,
    certificate_bytes,
    key_bytes,
    new_key,
)
from pserver.security.key_folder import write_private
from pserver.security.keys import AUTHORITY_FILE, REVOKED
from pserver.security.tokens import Role, Secret
from pserver.timeouts import KILL_SECONDS


def ray_library() -> Any:
    """The package ``ray``.

    Raises:
        ImportError: it cannot be imported; the message says how to install it.
    """
    with extra("ray", "pserver.ray.run needs Ray"):
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    return ray


# ---- orders ----
#
# What an actor gets and gives, besides a function.


@dataclass(frozen=True)
class ActorPlace:
    """The place of an actor: the address of its node, as other nodes reach it, and the public half
    of the key that the actor has made for its process, as PEM.
    """

    address: str
    public_key: bytes


@dataclass(frozen=True)
class StartRequest:
    """The start of a server or trainer.

    Attributes:
        variables: its environment besides the node's.
        credentials: see :meth:`JobKeys.credentials`.
        arguments: of ``pserver serve``, or of the script.
        folder: the driver's working directory, for a trainer.
        script: the path of the trainer's script as the driver knows it; "": there is none.
    """

    variables: dict[str, str]
    credentials: dict[str, bytes] = field(repr=False)
    arguments: tuple[str, ...] = ()
    folder: str = ""
    script: str = ""


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process.

    Attributes:
        name: "server 0", "trainer 0".
        node: the address of its node; "": it never had one.
        status: its exit status, or 128 + the signal that killed it; None: it was lost with its
            actor.
        tail: its last lines, from its last traceback on, where there is one; of a function the
            traceback of its exception.
        told: its line about the error by which another process has ended it, "": there is none;
            Ray's words about an actor that is lost.
        value: returned by a function.
    """

    name: str
    node: str
    status: int | None
    tail: tuple[str, ...] = ()
    told: str = ""
    value: Any = None

    def __str__(self) -> str:
        """One sentence, without the last lines."""
        where = f"{self.name} on node {self.node}" if self.node else self.name
        if self.status is None:
            return f"{where} was lost: {self.told}"
        signalled = killer(self.status)
        by = f" (killed by {signalled.name})" if signalled else ""
        said = f", reported by others: {self.told}" if self.told else ""
        return f"{where} failed with status {self.status}{by}{said}"


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

    def credentials(self, kind: str, place: ActorPlace) -> dict[str, bytes]:
        """The files of a process, by path, besides its private key: its token, and keys, if the job
        has some.

        Args:
            kind: "server" or "trainer".
        """
        role = Role.OPERATOR if kind == "server" else Role.TRAINER
        token = {f"{kind}.token": self._secret.of(role).text.encode()}
        if self._authority is None:
            return token
        key = serialization.load_pem_public_key(place.public_key)
        assert isinstance(key, ec.EllipticCurvePublicKey), "as the actor makes it"
        signed = self._authority.issue(key, kind, (place.address,), self._now)
        return token | {
            f"keys/{kind}.pem": certificate_bytes(signed),
            f"keys/{AUTHORITY_FILE}": certificate_bytes(self._authority.certificate),
            f"keys/{REVOKED}": self._authority.revocations((), self._now),
        }


def public_bytes(key: PrivateKey) -> bytes:
    """The public half of a key, as PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def write_credentials(
    folder: Path, kind: str, credentials: Mapping[str, bytes], key: PrivateKey
) -> dict[str, str]:
    """Writes a process's credentials into files that only this user can read.

    Args:
        folder: the process's own.

    Returns:
        The variables that name them.
    """
    for name, content in credentials.items():
        write_private(folder / name, content)
    variables = {"PSERVER_TOKEN_FILE": str(folder / f"{kind}.token")}
    if len(credentials) > 1:
        write_private(folder / f"keys/{kind}.key", key_bytes(key))
        variables[KEYS] = str(folder / "keys")
    return variables


# ---- a node ----
#
# The environment variables of a node, and its copy of the script.


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


def script_here(order: StartRequest) -> str:
    """The script's path on this node: the driver's, or the same from the working directory.

    Raises:
        FileNotFoundError: there is none.
    """
    near = os.path.relpath(order.script, order.folder)
    for path in (order.script, os.path.abspath(near)):
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(
        f"expected the script {order.script} on this node, or {near} in {os.getcwd()}, found "
        "neither: put it where all nodes see it, or give Ray its folder as working_dir"
    )


# ---- actors ----


class RoleActor:
    """A server or trainer of one attempt at a job, as the driver sees it.

    Several of its methods run at once, in threads of Ray's.

    Args:
        number: of the process among its kind.

    Attributes:
        kind: "server" or "trainer".
    """

    kind = ""

    def __init__(self, number: int) -> None:
        self._name, self._address = f"{self.kind} {number}", ""
        self._key = new_key()
        self._stack = ExitStack()  # undone when the process has ended

    def __repr__(self) -> str:
        """Its name, which Ray shows before each of its lines."""
        return self._name

    def place(self) -> ActorPlace:
        """Its place."""
        self._address = ray_library().util.get_node_ip_address()
        return ActorPlace(self._address, public_bytes(self._key))

    def stop(self) -> None:
        """Ends a child process, and returns when it is gone."""

    def _prepare(self, order: StartRequest) -> dict[str, str]:
        """Writes the credentials; returns the whole environment of the process."""
        inherited = without_other_jobs(os.environ)
        held = tokens.LockedFiles(tokens.folder(os.environ))
        self._stack.callback(held.remove)
        named = write_credentials(held.directory(), self.kind, order.credentials, self._key)
        if os.path.isdir(order.folder):
            os.chdir(order.folder)
        return {**inherited, **order.variables, **named}

    def _ended(
        self, status: int, tail: Sequence[str], told: str = "", value: Any = None
    ) -> ProcessEnd:
        return ProcessEnd(self._name, self._address, status, tuple(tail), told, value)


class ProcessActor(RoleActor):
    """An actor with a child process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._process: ChildProcess | None = None
        self._endpoint = ""
        self._ready, self._over = threading.Event(), threading.Event()

    def wait(self) -> ProcessEnd:
        """The end of the process; returns when it has ended."""
        self._over.wait()
        process = self._process
        assert process is not None and process.status is not None, "it has ended"
        return self._ended(process.status, process.tail, process.reported_error)

    def stop(self) -> None:
        """Ends the process by SIGTERM, or by SIGKILL after a grace; returns when it is gone."""
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._process.stop(number)
                if self._over.wait(KILL_SECONDS):
                    break
        self._stack.close()

    def _begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = ChildProcess(
            self._name,
            command,
            environment,
            Path(os.devnull),  # Ray has a file of the actor's lines
            0,
            self._stack.enter_context(Group()),
            Terminal(self._stack.enter_context(open(os.devnull, "w", encoding="utf-8")), 0),
            line=self._take,
            ended=self._end,
        )

    def _take(self, process: ChildProcess, line: str) -> None:
        if not self._endpoint and (match := READY.search(line)):
            self._endpoint = match[1]
            self._ready.set()
        os.write(1, f"{line}\n".encode())

    def _end(self, process: ChildProcess) -> None:
        self._over.set()
        self._ready.set()


class ServerActor(ProcessActor):
    """An actor with a server."""

    kind = "server"

    def start(self, order: StartRequest) -> str:
        """Starts the server; returns its endpoint when it is ready.

        Raises:
            RuntimeError: it has ended before.
        """
        self._begin([*SERVE, "--once", *order.arguments], self._prepare(order))
        self._ready.wait()
        if not self._endpoint:
            raise RuntimeError(f"expected {self._name} to be ready, and it has ended")
        return self._endpoint


class ScriptActor(ProcessActor):
    """An actor with a trainer that runs a script."""

    kind = "trainer"

    def start(self, order: StartRequest) -> str:
        """Starts the script; returns "".

        Raises:
            FileNotFoundError: this node has no such script.
        """
        environment = self._prepare(order)  # in the folder from which the script may be found
        self._begin([sys.executable, script_here(order), *order.arguments], environment)
        return ""


class FunctionActor(RoleActor):
    """An actor that is a trainer, and calls a function.

    The driver kills the actor, and with it the function.
    """

    kind = "trainer"

    def start(self, order: StartRequest) -> str:
        """Gives this process the environment of a trainer; returns "".

        The function comes later: it brings torch, and other modules that read the environment once.
        """
        environment = self._prepare(order)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        return ""

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> ProcessEnd:
        """Calls the function; its end is that of a script, and its exception is printed."""
        with self._stack:
            try:
                return self._ended(0, (), value=function(*arguments))
            except SystemExit as error:  # Ray would end the actor
                if error.code is None or isinstance(error.code, int):
                    return self._ended((error.code or 0) & 0xFF, ())
                print(error.code, file=sys.stderr)
                return self._ended(1, (str(error.code),))
            except BaseException as error:
                text = traceback.format_exc()
                print(text, end="", file=sys.stderr)
                told = str(error) if isinstance(error, JobFailed | Lost) else ""
                return self._ended(1, text.splitlines(), told)
