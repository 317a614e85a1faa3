"""The flags of ``pserver`` and its commands, and their help texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from pserver.command_line.key_flags import (
    KEYS_HELP,
    add_collective_protection,
    add_keys,
    add_protection,
)
from pserver.command_line.texts import (
    DRAIN,
    ENDPOINTS,
    EXAMPLES,
    KEYS,
    LAUNCH,
    PLAN,
    RESET,
    SAVE,
    SERVE,
    STATUS,
)
from pserver.config import CHECKSUM_CHOICES, TRANSPORT_CHOICES

USAGE = 2  # the exit status for a mistake in what was typed


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line.

    Attributes:
        commands: the parsers of the commands, by name.
    """

    commands: Mapping[str, Parser] = MappingProxyType({})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but the command's own parser reports what it does not know."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(found, "command", ""), self)
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Ends the process with status ``USAGE``."""
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> Parser:
    """The parser of the whole command line; the namespace's ``command`` names the command."""
    root = Parser(
        prog="pserver",
        description="Parameter-server training for PyTorch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    serve = commands.add_parser("serve", help="run one parameter server", description=SERVE)
    _add_listening(serve)
    _add_serving(serve)
    launch = commands.add_parser(
        "launch", help="run a cluster here, or this host's part of one", description=LAUNCH
    )
    _add_processes(launch)
    _add_settings(launch)
    _add_script(launch, "what each trainer runs")
    plan = commands.add_parser(
        "plan", help="show the split, bytes and memory of a job", description=PLAN
    )
    add_numbers(plan)
    _add_script(plan, "what each trainer would run")
    status = commands.add_parser(
        "status", help="ask running servers for their state", description=STATUS
    )
    status.add_argument("endpoints", metavar=ENDPOINTS)
    status.add_argument(
        "--variables", action="store_true", help="the bytes of each variable too, in / out"
    )
    status.add_argument(
        "--ready",
        action="store_true",
        help="only whether each takes trainers, for probes of containers: 0 if all do, otherwise 1",
    )
    save = commands.add_parser("save", help="write what a job holds to a file", description=SAVE)
    _add_saving(save)
    reset = commands.add_parser("reset", help="drop what a failed job has left", description=RESET)
    reset.add_argument("endpoints", metavar=ENDPOINTS)
    drain = commands.add_parser("drain", help="end servers", description=DRAIN)
    drain.add_argument("endpoints", metavar=ENDPOINTS)
    keys = commands.add_parser("keys", help="make and manage a cluster's keys", description=KEYS)
    add_keys(keys)
    for each in (status, save, reset, drain):
        each.add_argument("--keys", metavar="DIR", help=KEYS_HELP)
    root.commands = commands.choices
    return root


# The flags of ``serve`` have the names of ServerConfig's fields and no defaults: what is not typed
# stays as the configuration file, the environment or the class has it.
UNSET = argparse.SUPPRESS


def _add_listening(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--endpoint",
        metavar="HOST:PORT",
        default=UNSET,
        help="where to listen; port 0 is any free one (default: 127.0.0.1:0)",
    )
    add(
        "--data-port",
        metavar="PORT",
        type=int,
        default=UNSET,
        help="port of the tensors over plain TCP (default: any free one)",
    )
    add(
        "--connections",
        metavar="N",
        type=int,
        default=UNSET,
        help="TCP connections of each stream of tensors (default: 1)",
    )
    add(
        "--checksum",
        choices=CHECKSUM_CHOICES,
        default=UNSET,
        help="CRC32C of the frames over TCP (default: auto, on but for trainers of this host)",
    )
    add(
        "--transport",
        choices=TRANSPORT_CHOICES,
        default=UNSET,
        help="the only transport to offer (default: auto, all of them)",
    )
    add(
        "--heartbeat-timeout",
        metavar="SECONDS",
        dest="heartbeat_timeout_seconds",
        type=float,
        default=UNSET,
        help="how long a trainer may send no heartbeat before it is declared lost (default: 20)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        dest="start_timeout_seconds",
        type=float,
        default=UNSET,
        help="how long after the first trainer the last one may join (default: 300)",
    )


def _add_saving(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("endpoints", metavar=ENDPOINTS, help="all servers of the job, in any order")
    add("path", metavar="PATH", help="the checkpoint's directory, or its URL")
    add(
        "--programs",
        action="store_true",
        help="a file for each server instead, with which `pserver serve --program` goes on",
    )


def _add_serving(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--data-dir",
        metavar="DIR",
        default=UNSET,
        help="where trainers may save and load (default: nowhere)",
    )
    add(
        "--store",
        metavar="URL",
        default=UNSET,
        help="the prefix below which trainers may save and load, in place of --data-dir",
    )
    add(
        "--once",
        action="store_true",
        default=UNSET,
        help="end when the first job has ended: 0 only if every trainer has finished",
    )
    add(
        "--keep-failed",
        metavar="SECONDS",
        dest="keep_failed_seconds",
        type=float,
        default=UNSET,
        help="how long a failed job's values are kept from other jobs, for `pserver save` "
        "(default: 600; with --once 0)",
    )
    add_protection(sub, UNSET)
    add("--program", metavar="FILE", default=UNSET, help="a saved pserver program to start with")
    add(
        "--threads",
        metavar="N",
        type=int,
        default=UNSET,
        help="torch's threads for updates (default: torch's own choice)",
    )
    _add_limits(sub)
    add(
        "--config",
        metavar="FILE.toml",
        default=None,
        help="a file with these settings; flags override it",
    )


def _add_limits(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--max-trainers",
        metavar="N",
        type=int,
        default=UNSET,
        help="that a job may have (default: 1024)",
    )
    add(
        "--max-connections",
        metavar="N",
        type=int,
        default=UNSET,
        help="that may be open on each port (default: 4096)",
    )
    add(
        "--max-memory",
        metavar="GB",
        type=float,
        default=UNSET,
        help="for parameters, optimizer states and rows (default: what the machine has)",
    )
    add(
        "--max-program",
        metavar="MB",
        type=int,
        default=UNSET,
        help="of a program's message, up to 64; Join's has a 16th (default: 64)",
    )
    add(
        "--hello-timeout",
        metavar="SECONDS",
        dest="hello_timeout_seconds",
        type=float,
        default=UNSET,
        help="how long a peer may take to say who it is, on any port (default: 10)",
    )


def _add_processes(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--nccl2",
        action="store_true",
        help="the collective mode: trainers without servers, NCCL on GPUs, gloo on CPUs",
    )
    add(
        "--devices",
        metavar="0,1,...",
        help="with --nccl2: the GPUs of this host's trainers, one each, of those that this process "
        "sees (default: all)",
    )
    add(
        "--servers",
        metavar="N|HOST:PORT,...",
        help="how many to start here; or all servers of the cluster",
    )
    add(
        "--trainers",
        metavar="N|HOST:PORT,...",
        help="how many to start here; or all trainers of the cluster",
    )
    add("--host", metavar="HOST", help="with lists of endpoints: which of them are this host's")


def _add_settings(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--transport", choices=TRANSPORT_CHOICES, help="how tensors travel (default: auto)")
    add(
        "--heartbeat-timeout",
        metavar="SECONDS",
        type=float,
        help="how long a process may send no heartbeat before it is declared lost (default: 20)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        type=float,
        help="how long the processes wait for one another to come up (default: 300)",
    )
    add("--data-dir", metavar="DIR", help="where the servers save and load (default: nowhere)")
    add("--store", metavar="URL", help="the prefix below which they do, in place of --data-dir")
    add_protection(sub)
    add_collective_protection(sub)
    add(
        "--log-dir",
        metavar="DIR",
        default="logs",
        help="where each process's output is filed (default: logs)",
    )


def add_numbers(sub: argparse.ArgumentParser) -> None:
    """Adds ``--servers`` and ``--trainers`` of ``plan``."""
    sub.add_argument("--servers", metavar="N", type=int, help="how many there would be")
    sub.add_argument("--trainers", metavar="N", type=int, help="how many there would be")


def _add_script(sub: argparse.ArgumentParser, use: str) -> None:
    sub.add_argument("script", metavar="SCRIPT", help=use)
    sub.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="given to the script as they are",
    )
