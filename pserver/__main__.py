"""The command line: ``pserver``, or ``python -m pserver``.

Flags and environment are read here and nowhere else.  Exit status 2 for what was typed wrongly, 1
for what went wrong, both with one line on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pserver.config import TRANSPORT_CHOICES, ServerConfig
from pserver.errors import PServerError
from pserver.malloc import share_heap

USAGE, FAILURE = 2, 1
WIDE = 160  # columns of a table that goes to a file
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

EXAMPLES = """examples:
  pserver launch --servers 2 --trainers 2 train.py --epochs 3
      a local cluster; train.py is a trainer's script
  pserver launch --servers a:6174,b:6174 --trainers a:7000,b:7000 --host a train.py
      host a's part of a larger one; the same on b, with --host b
  pserver launch --nccl2 --trainers 2 train.py
      the collective mode: no servers, the trainers average their gradients among themselves
  pserver serve --endpoint 0.0.0.0:6174
      one parameter server, for trainers that are started by other means
  pserver plan train.py --servers 4 --trainers 8
      what that would put where, without starting any of it
  pserver status a:6174,b:6174
      who is up, and what they hold
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> Parser:
    """The whole command line."""
    root = Parser(
        prog="pserver",
        description="Parameter-server training for PyTorch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    _add_serve(
        commands.add_parser("serve", help="run one parameter server", description=serve.__doc__)
    )
    _add_launch(
        commands.add_parser(
            "launch",
            help="run a cluster here, or this host's part of one",
            description=launch.__doc__,
        )
    )
    _add_plan(
        commands.add_parser(
            "plan", help="show the split, bytes and memory of a job", description=plan.__doc__
        )
    )
    status_parser = commands.add_parser(
        "status", help="ask running servers how they are", description=status.__doc__
    )
    status_parser.add_argument("endpoints", metavar="HOST:PORT[,HOST:PORT...]")
    status_parser.add_argument(
        "--variables", action="store_true", help="the bytes of each variable too, in / out"
    )
    status_parser.set_defaults(run=status)
    return root


def _add_serve(sub: argparse.ArgumentParser) -> None:
    """Flags named as the fields of ServerConfig, without defaults: what is not typed stays as the
    file or the class has it.
    """
    sub.set_defaults(run=serve)
    add = sub.add_argument
    hide = argparse.SUPPRESS
    add(
        "--endpoint",
        metavar="HOST:PORT",
        default=hide,
        help="where to listen; port 0 is any free one (default: 127.0.0.1:0)",
    )
    add(
        "--data-port",
        metavar="PORT",
        type=int,
        default=hide,
        help="port of the Arrow Flight streams (default: any free one)",
    )
    add(
        "--transport",
        choices=TRANSPORT_CHOICES,
        default=hide,
        help="the only transport to offer (default: auto, all of them)",
    )
    add(
        "--data-dir",
        metavar="DIR",
        default=hide,
        help="where trainers may save and load (default: nowhere)",
    )
    add(
        "--heartbeat-timeout",
        metavar="SECONDS",
        dest="heartbeat_timeout_seconds",
        type=float,
        default=hide,
        help="a trainer's longest silence",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        dest="start_timeout_seconds",
        type=float,
        default=hide,
        help="how long after the first trainer the last one may join",
    )
    add(
        "--once",
        action="store_true",
        default=hide,
        help="end when the first job has left: 0, or 1 if it failed",
    )
    add("--program", metavar="FILE", default=hide, help="a saved pserver program to start with")
    add(
        "--threads",
        metavar="N",
        type=int,
        default=hide,
        help="torch's threads for updates (default: torch's own choice)",
    )
    add(
        "--config",
        metavar="FILE.toml",
        default=None,
        help="a file with these settings; flags override it",
    )


def _add_launch(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=launch)
    add = sub.add_argument
    add(
        "--nccl2",
        action="store_true",
        help="the collective mode: trainers without servers, NCCL on GPUs, gloo on CPUs",
    )
    add(
        "--devices",
        metavar="0,1,...",
        help="with --nccl2: the GPUs of this host's trainers, one each (default: all)",
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
    add("--transport", choices=TRANSPORT_CHOICES, help="how tensors travel (default: auto)")
    add(
        "--heartbeat-timeout",
        metavar="SECONDS",
        type=float,
        help="the longest silence of a process that is not yet a loss",
    )
    add("--data-dir", metavar="DIR", help="where the servers save and load (default: nowhere)")
    add(
        "--log-dir",
        metavar="DIR",
        default="logs",
        help="where each process's output is filed (default: logs)",
    )
    add("script", metavar="SCRIPT", help="what each trainer runs")
    add(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="given to the script as they are",
    )


def _add_plan(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=plan)
    sub.add_argument("script", metavar="SCRIPT", help="what each trainer would run")
    _add_numbers(sub)
    sub.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="given to the script as they are",
    )


def _add_numbers(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--servers", metavar="N", type=int, help="how many there would be")
    sub.add_argument("--trainers", metavar="N", type=int, help="how many there would be")


def serve(arguments: argparse.Namespace) -> int:
    """Runs one parameter server.

    It prints one line when it is ready, and ends with 0 on SIGTERM or Ctrl-C after draining.
    """
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    settings = _from_environment(os.environ) | (
        _read(arguments.config, names) if arguments.config else {}
    )
    settings |= {name: value for name, value in vars(arguments).items() if name in names}
    config = _checked(lambda: ServerConfig(**settings))
    share_heap()
    # here, because torch takes a second to import, which --help need not
    from pserver.service import server

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    return server.serve(config)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says where neither a flag nor the configuration's file does."""
    found: dict[str, Any] = {}
    if "PSERVER_TRANSPORT" in environ:
        found["transport"] = environ["PSERVER_TRANSPORT"]
    for name, field in (
        ("PSERVER_HEARTBEAT_TIMEOUT", "heartbeat_timeout_seconds"),
        ("PSERVER_START_TIMEOUT", "start_timeout_seconds"),
    ):
        try:
            found |= {field: float(environ[name])} if environ.get(name) else {}
        except ValueError:
            raise _Usage(f"{name}: expected a number of seconds, got {environ[name]!r}") from None
    return found


def launch(arguments: argparse.Namespace) -> int:
    """Starts servers and trainers (or trainers alone), prefixes and files their output, and ends
    with the job's exit status.
    """
    if arguments.nccl2 and arguments.servers is not None:
        raise _Usage("--servers: expected none with --nccl2, where trainers do without")
    if not arguments.nccl2 and (arguments.servers is None or arguments.trainers is None):
        raise _Usage(
            "expected both --servers and --trainers, as numbers or as lists of HOST:PORT; or "
            "--nccl2 with --trainers"
        )
    from pserver.launcher import cluster, launch

    def described() -> cluster.Cluster:
        servers: tuple[str, ...] = ()
        if arguments.nccl2:
            trainers, devices = cluster.trainers_only(
                arguments.trainers, arguments.devices, arguments.host
            )
        else:
            servers, trainers = cluster.sides(arguments.servers, arguments.trainers, arguments.host)
            devices = None if arguments.devices is None else tuple(arguments.devices.split(","))
        return cluster.Cluster(
            arguments.script,
            tuple(arguments.arguments),
            servers,
            trainers,
            arguments.host,
            arguments.transport,
            arguments.heartbeat_timeout,
            arguments.data_dir,
            arguments.log_dir,
            devices,
        )

    return launch.launch(_checked(described), os.environ)


def plan(arguments: argparse.Namespace) -> int:
    """Shows which server would hold what, the bytes of a step and the memory of each server.

    It runs SCRIPT up to where it would join the servers, and starts none.
    """
    from pserver.launcher import plan

    # the numbers may stand behind the script's arguments
    after = Parser(prog="pserver plan", add_help=False, allow_abbrev=False)
    _add_numbers(after)
    numbers, rest = after.parse_known_args(arguments.arguments)
    servers, trainers = (
        getattr(numbers, name) or getattr(arguments, name) for name in ("servers", "trainers")
    )
    if not servers or not trainers or servers < 1 or trainers < 1:
        raise _Usage("expected both --servers and --trainers, as numbers of 1 or more")
    return plan.show(arguments.script, rest, servers, trainers, os.environ)


def status(arguments: argparse.Namespace) -> int:
    """Shows each server's state, what it holds, its trainers, and the bytes that have gone through
    it.
    """
    from rich.console import Console

    from pserver import config
    from pserver.launcher import status

    endpoints = [endpoint.strip() for endpoint in arguments.endpoints.split(",")]
    _checked(lambda: [config.split_endpoint(endpoint) for endpoint in endpoints])
    console = Console()
    return status.show(
        endpoints, console if console.is_terminal else Console(width=WIDE), arguments.variables
    )


class _Usage(Exception):
    """What was typed is wrong."""


def _checked(make: Any) -> Any:
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise _Usage(str(error)) from error


def _read(path: str, names: set[str]) -> dict[str, Any]:
    """The settings in a TOML file; an unknown key is an error."""
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise _Usage(f"--config {path}: {error}") from error
    if unknown := sorted(set(settings) - names):
        raise _Usage(
            f"--config {path}: unknown key {', '.join(unknown)}; expected some of "
            f"{', '.join(sorted(names))}"
        )
    for name, value in settings.items():
        default = getattr(ServerConfig(), name)
        kind = str if default is None else type(default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise _Usage(
                f"--config {path}: {name}: expected a value like {default or 'TEXT'!r}, got "
                f"{value!r}"
            )
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except _Usage as error:
        status, message = USAGE, str(error)
    except (PServerError, OSError, ValueError) as error:
        status, message = FAILURE, f"{error}" or type(error).__name__
    print(f"pserver {arguments.command}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
