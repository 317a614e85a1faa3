"""A server's settings from flags, a TOML file and environment variables, in this order of
precedence.
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pserver.config import ServerConfig, check_factor, check_seconds, refuse_url, split_endpoint
from pserver.security import tokens
from pserver.security.access import Access
from pserver.transport.endpoint import is_here

# ---- beginning flags ----
#
# Flags of ``pserver serve``: when a job's trainers and its other servers are there.


UNSET = argparse.SUPPRESS  # as in flags.py


def add_beginning(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about the start of a job.

    Args:
        sub: the parser of ``serve``.
    """
    add = sub.add_argument
    add(
        "--start-timeout",
        metavar="SECONDS",
        dest="start_timeout_seconds",
        type=float,
        default=UNSET,
        help="how long after the first trainer the last one may join (default: 300)",
    )
    add(
        "--await-servers",
        action="store_true",
        default=UNSET,
        help="a job of an async mode waits for a server that is lost, and is started again",
    )
    add(
        "--reload",
        metavar="PATH",
        default=UNSET,
        help="a lost server's save, with which this one takes its place in the running job",
    )
    add(
        "--write-ahead-log",
        metavar="FILE",
        default=UNSET,
        help="where server 0 writes what a process that replaces it has to know (--await-servers)",
    )
    add(
        "--min-trainers",
        metavar="N",
        type=int,
        default=UNSET,
        help="the number of trainers with which a job begins; others join later (default: all)",
    )


# ---- checkpoint flags ----
#
# The flags of a job that saves by itself, and goes on from there when it is started again.


def add_checkpoints(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about automatic checkpoints."""
    add = sub.add_argument
    add(
        "--checkpoint",
        metavar="DIR|URL",
        default="",
        help="the folder where the job saves automatically, and from whose newest checkpoint it "
        "resumes (default: nowhere)",
    )
    add(
        "--every",
        metavar="SECONDS",
        type=float,
        help="between two checkpoints (default: 600)",
    )
    add(
        "--keep",
        metavar="K",
        type=int,
        help="how many of the newest checkpoints stay (default: 3)",
    )


def add_restarts(sub: argparse.ArgumentParser) -> None:
    """Adds the flag that limits how often ``launch`` restarts processes."""
    sub.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often processes are started again when one has failed: that trainer alone where "
        "the others go on, otherwise the whole job (default: 0)",
    )


# ---- exit statuses ----
#
# How each command, and each process of a job, says by its exit status what has become of it: the
# table of docs/errors.md, and the end of each command's help.


USAGE = "wrong usage"


@dataclass(frozen=True, slots=True)
class ExitStatuses:
    """The meanings of one process's exit statuses.

    Attributes:
        of: "pserver serve --once", "a trainer's script".
        zero, one: what 0 and 1 mean.
        two: what 2 means; "": nothing of its own.
        otherwise: which others there are, and when.
    """

    of: str
    zero: str
    one: str
    two: str = USAGE
    otherwise: str = ""


EVERY = (
    ExitStatuses(
        "pserver serve",
        "stopped by SIGTERM or SIGINT and drained, also where that ended a job",
        "could not start",
    ),
    ExitStatuses(
        "pserver serve --once",
        "the job has succeeded",
        "could not start, or the job failed",
        otherwise="128 + the signal that came before the job was done (143, 130)",
    ),
    ExitStatuses(
        "a trainer's script",
        "it ended, after `finish()`",
        "it raised, or ended without `finish()`, also where it has caught the job's failure",
        two="",
        otherwise="143: SIGTERM; what it gave to `sys.exit`",
    ),
    ExitStatuses(
        "a script whose role is PSERVER",
        "the job has succeeded, and the script ended",
        "the job failed (`fleet.run_server()`, `Executor.run` raise)",
        two="",
        otherwise="128 + the signal that came before the job was done",
    ),
    ExitStatuses(
        "pserver launch",
        "every process ended with 0",
        "a server did not get ready",
        otherwise="the status of the process that failed; 128 + the signal that ended it, or "
        "`launch`",
    ),
    ExitStatuses(
        "pserver plan",
        "the plan was printed, also without a prediction",
        "the script failed, or came to no plan; with `--search`, a probe failed",
        otherwise="the script's own status",
    ),
    ExitStatuses(
        "pserver check",
        "no script has anything to change",
        "a script has",
        two="a script cannot be read, or is no Python 3; or wrong usage",
    ),
    ExitStatuses("pserver manifest", "the file was written", "a disk error"),
    ExitStatuses(
        "pserver status",
        "every server answered, none has failed, and none waits for an unreachable one",
        "otherwise",
    ),
    ExitStatuses("pserver status --ready", "every server takes trainers", "otherwise"),
    ExitStatuses("pserver web", "stopped by SIGTERM or SIGINT", "could not start"),
    ExitStatuses(
        "pserver save",
        "the checkpoint was written",
        "a server does not answer, holds nothing or has another job; or a disk error",
    ),
    ExitStatuses(
        "pserver replay",
        "all that was asked for is applied; a log that ends early is said",
        "log and checkpoint do not belong together, or one is damaged; something is at `--to`; or "
        "a disk error",
    ),
    ExitStatuses(
        "pserver reset",
        "every server is empty",
        "a server does not answer, or has a running job",
    ),
    ExitStatuses("pserver drain", "every server drains", "a server does not answer, or refuses"),
    ExitStatuses("pserver keys", "the act is done", "it is not"),
)


def exit_status_help(command: str) -> str:
    """The sentence about exit statuses in a command's help; backticks are the page's.

    Example:
        >>> print(exit_status_help("drain"))
        exit status: 0: every server drains; 1: a server does not answer, or refuses; 2: wrong usage
    """
    rows = []
    for each in EVERY:
        if not each.of.startswith(f"pserver {command}"):
            continue
        statuses = {"0": each.zero, "1": each.one, "2": each.two, "otherwise": each.otherwise}
        meanings = (f"{status}: {meaning}" for status, meaning in statuses.items() if meaning)
        flag = each.of.partition(" --")[2]
        rows.append((f"with --{flag}: " if flag else "") + "; ".join(meanings))
    return "exit status: " + ". ".join(rows).replace("`", "")


# ---- operator access ----
#
# The key with which a command asks a server: the one that the user names, or the one that ``pserver
# launch`` of the same user has left.


TOKEN_FILE_VARIABLE, KEYS_VARIABLE = "PSERVER_TOKEN_FILE", "PSERVER_KEYS"
ROLES = ("operator", "trainer")  # the first one with a key counts


def access_of(endpoint: str, environ: Mapping[str, str], keys: str | None = None) -> Access:
    """The access to the server of an endpoint.

    Args:
        endpoint: HOST:PORT.
        environ: the process's environment variables.
        keys: ``--keys``; None: what PSERVER_KEYS says.

    Raises:
        ValueError: the token file, or the folder of keys, cannot be read, or holds no key.
    """
    keys = keys or environ.get(KEYS_VARIABLE)
    if (named := environ.get(TOKEN_FILE_VARIABLE)) is not None:  # an empty one: without a key
        return Access.of(named, keys, *ROLES)
    host, port = split_endpoint(endpoint)
    left = tokens.published(port, environ)
    token = str(left) if left is not None and is_here(host) else None
    return Access.of(token, keys, *ROLES)


# ---- texts ----
#
# What ``pserver --help`` says of each command.


EXAMPLES = """examples:
  pserver launch --servers 2 --trainers 2 train.py --epochs 3
      a local cluster; train.py is a trainer's script
  pserver launch --servers a:6174,b:6174 --trainers a:7000,b:7000 --host a train.py
      host a's part of a larger one; the same on b, with --host b
  pserver launch --nccl2 --trainers 2 train.py
      the collective mode: no servers, the trainers average their gradients among themselves
  pserver serve --endpoint 0.0.0.0:6174 --keys keys/a
      one parameter server, for trainers that are started by other means
  pserver plan train.py --servers 4 --trainers 8
      what that would put where, without starting any of it
  pserver check train.py
      what of PaddlePaddle a script uses, and what to write for it
  pserver manifest --kind slurm --servers 2 --trainers 4 train.py
      the same job as a file for Slurm, or for Kubernetes or docker compose
  pserver status a:6174,b:6174
      which servers are up, and what they hold
  pserver web a:6174,b:6174 --port 8090
      one page that shows the job, and answers an operator's questions
  pserver save a:6174,b:6174 rescued
      what a running or a failed job holds, as a checkpoint for fleet.load
  pserver replay log --from saved/step-000120 --to again
      applies a log that --record-log has recorded to a checkpoint of its job
  pserver reset a:6174,b:6174
      drops what a failed job has left, so that any job may begin
  pserver drain a:6174,b:6174
      ends servers, as SIGTERM does
  pserver keys init keys --hosts a,b
      keys for hosts a and b: copy keys/a and keys/b there, and name them with --keys
"""
SERVE = """Runs one parameter server.  It prints one line when it is ready, and ends with 0 on
SIGTERM or Ctrl-C after draining."""
LAUNCH = """Starts servers and trainers (or trainers alone), prefixes their output and files it, and
ends with the job's exit status."""
PLAN = """Shows which server would hold what, the bytes of a step and the memory of each server.
Then it runs some steps of SCRIPT with servers on this machine, for at most 90 s in all (twice that
with --search), and predicts the step of the whole job and what limits it."""
CHECK = """Reads scripts, and lists what of PaddlePaddle each line uses, and what to write for
it; and which files beside a script hide a package of ours.  It runs nothing."""
MANIFEST = """Writes a job as the file that another system starts it by: a JobSet of Kubernetes, a
file for docker compose, or a batch script for Slurm.  It starts nothing, and writes no secret."""
STATUS = """Shows each server's state, what it holds, its trainers, and the bytes that have passed
through it."""


WEB = """Serves one page that shows a running job: its processes, the parts of a step's time, loss
and throughput, tables, logs.  It prints an address with a token, which readers need, and ends with
0 on SIGTERM or Ctrl-C."""
SAVE = """Writes what the servers of a running or a failed job hold (parameters, buffers, tables,
optimizer state, step) as a checkpoint that fleet.load reads, on any number of servers.  A running
job waits meanwhile, between two of its steps.  The servers do not know everything: fleet.load says
what it has not found, a scheduler's state for one."""
REPLAY = """Applies a log that the servers of a job have recorded (--record-log) to a checkpoint of
that job, or to what the job began with, and gives what the servers held, to the bit: parameters,
optimizer states and rows.  It says what it has applied, and with --to writes a checkpoint that
fleet.load reads.  It starts no server."""
REPLAYS = "apply a recorded log to a checkpoint"
RESET = """Drops what a failed job has left on these servers, so that any job may begin.  A server
whose job runs is left alone: end its trainers first."""
DRAIN = """Ends servers, as SIGTERM does: each takes no new step, tells its trainers why, sends what
it has begun to send, and ends.  A job that runs there fails; save it first."""
KEYS = """Makes the keys with which the processes of a cluster know each other, and manages them.
The folder stays with the operator; each host gets a copy of its own part."""
ENDPOINTS = "HOST:PORT[,HOST:PORT...]"


# ---- settings ----


NAMES = frozenset(field.name for field in dataclasses.fields(ServerConfig))
VARIABLES = {
    "PSERVER_TRANSPORT": "transport",
    "PSERVER_HEARTBEAT_TIMEOUT": "heartbeat_timeout_seconds",
    "PSERVER_START_TIMEOUT": "start_timeout_seconds",
    "PSERVER_CONNECTIONS": "connections",
    "PSERVER_CHECKSUM": "checksum",
    "PSERVER_TOKEN_FILE": "token_file",
    "PSERVER_KEYS": "keys",
    "PSERVER_INSECURE": "insecure",
    "PSERVER_METRICS": "metrics",
    "PSERVER_JOB": "job",
    "PSERVER_STRAGGLER_FACTOR": "straggler_factor",
    "PSERVER_RECORD_LOG": "record_log",
}

KINDS: dict[str, type] = {"keep_failed_seconds": float}  # of settings whose default is None

T = TypeVar("T")


class UsageError(Exception):
    """A mistake in what was typed; the text is for the user."""


def checked(make: Callable[[], T]) -> T:
    """Calls ``make``; a ValueError or TypeError of it is the user's mistake.

    Raises:
        UsageError: ``make`` raised one of the two.
    """
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def server_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ServerConfig:
    """The settings of ``pserver serve``.

    Args:
        arguments: what the parser made of the flags.
        environ: the process's environment variables.

    Raises:
        UsageError: a setting is unknown or wrong.
    """
    settings = _from_environment(environ)
    file = _from_file(arguments.config) if arguments.config else {}
    flags = {name: value for name, value in vars(arguments).items() if name in NAMES}
    written = {
        **{name: variable for variable, name in VARIABLES.items()},
        **{name: f"--config {arguments.config}: {name}" for name in file},
        **{name: flag_of(name) for name in flags},
    }
    try:
        return ServerConfig(**(settings | file | flags))
    except (ValueError, TypeError) as error:
        name, _, rest = str(error).partition(": ")
        raise UsageError(f"{written.get(name, name)}: {rest}") from error


def flag_of(name: str) -> str:
    """The flag of a setting: "--heartbeat-timeout"."""
    return "--" + name.removesuffix("_seconds").replace("_", "-")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, name in VARIABLES.items():
        if text := environ.get(variable):
            found[name] = text
            if name.endswith("_seconds"):
                found[name] = checked(partial(check_seconds, variable, text))
            elif name == "straggler_factor":
                found[name] = checked(partial(check_factor, variable, text))
            elif name == "insecure":
                found[name] = text == "1"
            elif name == "connections" and text.isdecimal():
                found[name] = int(text)
    return found


def _from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file; an unknown key is an error."""
    try:
        refuse_url("a file", path)
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except RecursionError as error:
        raise UsageError(f"--config {path}: expected TOML that is nested less deep") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if unknown := sorted(set(settings) - NAMES):
        raise UsageError(
            f"--config {path}: unknown key {', '.join(unknown)}; expected some of "
            f"{', '.join(sorted(NAMES))}"
        )
    for name, value in settings.items():
        default = getattr(ServerConfig(), name)
        kind = KINDS.get(name, str if default is None else type(default))
        if name == "metrics" and type(value) is int:
            settings[name] = str(value)
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            like = default or ("TEXT" if kind is str else kind())
            raise UsageError(
                f"--config {path}: {name}: expected a value like {like!r}, got {value!r}"
            )
    return settings
