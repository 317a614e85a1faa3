"""The flags of ``pserver`` and its commands, and their help texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from pserver import __version__
from pserver.command_line import exit_statuses
from pserver.command_line.beginning_flags import add_beginning
from pserver.command_line.key_flags import KEYS_HELP, add_keys, add_protection
from pserver.command_line.launch_flags import add_launching
from pserver.command_line.manifest_flags import add_manifest
from pserver.command_line.plan_flags import add_planning
from pserver.command_line.replay_flags import add_replaying
from pserver.command_line.texts import (
    DRAIN,
    ENDPOINTS,
    EXAMPLES,
    KEYS,
    LAUNCH,
    MANIFEST,
    PLAN,
    REPLAY,
    REPLAYS,
    RESET,
    SAVE,
    SERVE,
    STATUS,
    WEB,
)
from pserver.command_line.web_flags import add_web
from pserver.config import CHECKSUM_CHOICES, TRANSPORT_CHOICES

USAGE = 2  # the exit status for a mistake in what was typed


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line.

    Attributes:
        commands: the parsers of the commands, by name.
    """

    commands: Mapping[str, Parser] = MappingProxyType({})

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but the command's own parser reports what it does not know."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(found, "command", ""), self)
            command.error(f"unrecognized arguments: {' '.join(unknown)}{command.meant(unknown)}")
        return found

    def meant(self, unknown: Sequence[str]) -> str:
        """What to say of the flags that are near to those that nobody knows."""
        flags = list(self.flags())
        near: dict[str, None] = {}
        for word in (each.partition("=")[0] for each in unknown if each.startswith("--")):
            longer = [flag for flag in flags if flag.startswith(word)]
            near |= dict.fromkeys(longer or get_close_matches(word, flags, 1))
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if near := get_close_matches(f"{value}", map(str, action.choices or ()), 1):
                error.message += f"; did you mean {near[0]}?"
            raise

    def flags(self) -> Iterator[str]:
        """Its own, and those of its commands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    yield from each.flags()

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
    root.add_argument("--version", action="version", version=f"pserver {__version__}")
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    serve = commands.add_parser("serve", help="run one parameter server", description=SERVE)
    _add_listening(serve)
    _add_serving(serve)
    launch = commands.add_parser(
        "launch", help="run a cluster here, or this host's part of one", description=LAUNCH
    )
    add_launching(launch)
    _add_script(launch, "what each trainer runs")
    plan = commands.add_parser(
        "plan", help="show a job's split, bytes, memory and predicted step", description=PLAN
    )
    add_planning(plan)
    _add_script(plan, "what each trainer would run")
    manifest = commands.add_parser(
        "manifest", help="write a job for Kubernetes, Compose or Slurm", description=MANIFEST
    )
    add_manifest(manifest)
    _add_script(manifest, "what each trainer runs")
    status = commands.add_parser(
        "status", help="ask running servers for their state", description=STATUS
    )
    _add_asking(status)
    web = commands.add_parser("web", help="serve a page that shows a job", description=WEB)
    add_web(web)
    save = commands.add_parser("save", help="write what a job holds to a file", description=SAVE)
    _add_saving(save)
    add_replaying(commands.add_parser("replay", help=REPLAYS, description=REPLAY))
    reset = commands.add_parser("reset", help="drop what a failed job has left", description=RESET)
    reset.add_argument("endpoints", metavar=ENDPOINTS, help="all servers of the job")
    drain = commands.add_parser("drain", help="end servers", description=DRAIN)
    drain.add_argument("endpoints", metavar=ENDPOINTS, help="the servers to end")
    keys = commands.add_parser("keys", help="make and manage a cluster's keys", description=KEYS)
    add_keys(keys)
    for each in (status, save, reset, drain):
        each.add_argument("--keys", metavar="DIR", help=KEYS_HELP)
    for name, each in commands.choices.items():
        each.epilog = exit_statuses.said(name)
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
        help="CRC32C of the frames over TCP and gRPC (default: auto, on but under TLS, and for "
        "trainers of this host over TCP); with on, shared memory is not offered",
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
    add_beginning(sub)


def _add_asking(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("endpoints", metavar=ENDPOINTS, help="the servers to ask")
    add("--variables", action="store_true", help="the bytes of each variable too, in / out")
    add(
        "--ready",
        action="store_true",
        help="only whether each takes trainers, for probes of containers: 0 if all do, otherwise 1",
    )
    add("--json", action="store_true", help="one line of JSON for programs, numbers as numbers")
    add(
        "--watch",
        nargs="?",
        const="2",
        metavar="SECONDS",
        help="show it again every so many seconds (2), until Ctrl-C",
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
    _add_files(sub)
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
    _add_metrics(sub)
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


def _add_files(sub: argparse.ArgumentParser) -> None:
    """Where a server keeps files."""
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
        help="the prefix below which trainers may save and load, in place of --data-dir: "
        "s3://bucket/jobs, or a whole path",
    )
    add(
        "--record-log",
        metavar="DIR",
        default=UNSET,
        help="where to keep all that the server applies, for `pserver replay` (default: nowhere)",
    )


def _add_metrics(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--metrics",
        metavar="PORT|HOST:PORT",
        default=UNSET,
        help="where Prometheus reads metrics; a port alone is on the endpoint's host, 0 is any "
        "free one (default: nowhere)",
    )
    add("--job", metavar="NAME", default=UNSET, help="names the job in metrics")
    add("--log-json", action="store_true", help="log lines as JSON, with the labels of metrics")


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
    add(
        "--straggler-factor",
        metavar="F",
        type=float,
        default=UNSET,
        help="name a trainer as slow that computes more than F times as long as the others; 0: "
        "none (default: 3)",
    )


def _add_script(sub: argparse.ArgumentParser, use: str) -> None:
    sub.add_argument("script", metavar="SCRIPT", help=use)
    sub.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="given to the script as they are",
    )
