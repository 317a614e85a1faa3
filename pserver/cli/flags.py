"""The flags of ``pserver`` and its commands, and their help texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from pserver import __version__
from pserver.cli import settings
from pserver.cli.settings import (
    CHECK,
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
    add_beginning,
    add_checkpoints,
    add_restarts,
)
from pserver.config import CHECKSUM_CHOICES, TRANSPORT_CHOICES

# ---- key flags ----
#
# The flags of ``pserver keys``, and those of other commands that have to do with keys.


DAYS = 365
KEYS_HELP = (
    "this host's folder of keys, for TLS on every port; needed beyond this host (PSERVER_KEYS)"
)
INSECURE_HELP = (
    "endpoints beyond this host without keys, on a network that nobody else reaches "
    "(PSERVER_INSECURE=1)"
)


def add_keys(sub: argparse.ArgumentParser) -> None:
    """Adds the acts of ``pserver keys``; the namespace's ``act`` names one of them."""
    acts = sub.add_subparsers(dest="act", required=True, metavar="ACT", parser_class=type(sub))
    init = acts.add_parser("init", help="an authority, and keys for hosts")
    _folder(init)
    _hosts(init, "names or addresses, as endpoints have them", required=True)
    _days(init)
    enrol = acts.add_parser("enrol", help="a one-time code for a new host; waits until it is used")
    _folder(enrol)
    enrol.add_argument("--host", metavar="HOST", required=True, help="the new host")
    _roles(enrol, "of its keys (default: server,trainer)")
    enrol.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where to wait, as the new host can reach it (default: this host's name, any port)",
    )
    enrol.add_argument(
        "--minutes", metavar="N", type=float, default=15.0, help="the code is valid (default: 15)"
    )
    redeem = acts.add_parser("redeem", help="on the new host: asks for the code, gets keys")
    redeem.add_argument("directory", metavar="DIR", help="where this host's keys are written")
    renew = acts.add_parser("renew", help="new certificates for the existing keys")
    _folder(renew)
    _hosts(renew, "whose (default: all, and the operator's)", required=False)
    _days(renew)
    revoke = acts.add_parser("revoke", help="revokes a host's keys")
    _folder(revoke)
    revoke.add_argument("--host", metavar="HOST", required=True, help="whose, or operator")
    _roles(revoke, "which of its keys (default: all)")
    show = acts.add_parser("show", help="the certificates of a folder, and when they expire")
    show.add_argument("directory", metavar="DIR", help="the operator's folder, or a host's")


def add_protection(sub: argparse.ArgumentParser, default: Any = None) -> None:
    """Adds ``--keys`` and ``--insecure``.

    Args:
        default: of both, where they are not typed.
    """
    sub.add_argument("--keys", metavar="DIR", default=default, help=KEYS_HELP)
    sub.add_argument("--insecure", action="store_true", default=default, help=INSECURE_HELP)


def add_collective_protection(sub: argparse.ArgumentParser) -> None:
    """Adds ``--insecure-collective``."""
    sub.add_argument(
        "--insecure-collective",
        action="store_true",
        help="trainers of several hosts may exchange tensors among themselves, which is not "
        "encrypted (PSERVER_INSECURE_COLLECTIVE=1)",
    )


def _folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("directory", metavar="DIR", help="the operator's folder of keys")


def _hosts(sub: argparse.ArgumentParser, use: str, required: bool) -> None:
    sub.add_argument("--hosts", metavar="A,B,...", required=required, default="", help=use)


def _roles(sub: argparse.ArgumentParser, use: str) -> None:
    sub.add_argument("--roles", metavar="ROLE,...", default="", help=use)


def _days(sub: argparse.ArgumentParser) -> None:
    text = f"until the certificates expire (default: {DAYS})"
    sub.add_argument("--days", metavar="N", type=int, default=DAYS, help=text)


# ---- web flags ----
#
# The flags of ``pserver web``, and ``--web`` of ``pserver launch``.


MOST_PORT = 65535


def add_web(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of ``pserver web``."""
    add = sub.add_argument
    add("endpoints", metavar=ENDPOINTS, help="all servers of the job")
    add("--port", metavar="PORT", type=port, default=0, help="of the page (default: any free one)")
    add(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="where the page is served (default: 127.0.0.1, for this host alone)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="the folder whose files *.log the page shows (default: none)",
    )
    add(
        "--save-dir",
        metavar="DIR",
        default="saved",
        help="the folder, or URL, below which the page's Save writes checkpoints (default: saved)",
    )
    add("--read-only", action="store_true", help="the page offers neither Save nor Drain")
    add_protection(sub)


def add_web_of_launch(sub: argparse.ArgumentParser) -> None:
    """Adds ``--web``."""
    sub.add_argument(
        "--web",
        nargs="?",
        const=0,
        metavar="PORT",
        type=_port_of_launch,
        help="serve a page that shows the job, on this host, at this port (or any free one)",
    )


def _port_of_launch(text: str) -> int:
    """The port of ``--web``, for which SCRIPT is taken where it follows."""
    try:
        return port(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; right before SCRIPT write --web=0") from None


def port(text: str) -> int:
    """A port as the user types it.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if text.isascii() and text.isdigit() and int(text) <= MOST_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected a port of 0 to {MOST_PORT}, got {text!r} (0 is any free one)"
    )


# ---- launch flags ----
#
# The flags of ``pserver launch``.


def add_launching(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about the processes to start, and the settings that they share."""
    _add_launched_processes(sub)
    _add_settings(sub)


def _add_launched_processes(sub: argparse.ArgumentParser) -> None:
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
        metavar="N|MIN:MAX|HOST:PORT,...",
        help="how many to start here; or all trainers of the cluster; MIN:MAX: MIN are started, "
        "and up to MAX join, each by the same command on another host; with --nccl2 MAX are "
        "started, and when one has died MIN or more go on",
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
    _add_fates(sub)
    add(
        "--record-log",
        metavar="DIR",
        help="where the servers keep all that they apply, for `pserver replay` (default: nowhere)",
    )
    add("--data-dir", metavar="DIR", help="where the servers save and load (default: nowhere)")
    add(
        "--store",
        metavar="URL",
        help="the prefix below which they do, in place of --data-dir (default: "
        "that of --checkpoint)",
    )
    add_checkpoints(sub)
    add_restarts(sub)
    add_protection(sub)
    add_collective_protection(sub)
    add(
        "--metrics",
        metavar="PORT",
        type=int,
        help="where Prometheus reads metrics: server N at PORT + N, trainer N at the port behind "
        "those of all servers + N (default: nowhere)",
    )
    add_web_of_launch(sub)
    _add_shown(sub)


def _add_fates(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about trainers that are taken away, or slow."""
    add = sub.add_argument
    add(
        "--grace",
        metavar="SECONDS",
        type=float,
        help="how long a trainer that gets SIGTERM may take to end its step and leave, or a "
        "handler of the script's own to do what it does; the others go on without it (default: 0, "
        "the job ends)",
    )
    add(
        "--straggler-factor",
        metavar="F",
        type=float,
        help="name a trainer as slow that computes more than F times as long as the others; 0: "
        "none (default: 3)",
    )


def _add_shown(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about metrics, pages and logs."""
    add = sub.add_argument
    add("--job", metavar="NAME", help="names the job in metrics (default: the script's name)")
    add("--log-json", action="store_true", help="log lines of all processes as JSON")
    add(
        "--trace",
        metavar="FILE",
        help="writes what all processes do in a few steps, after the first two, for "
        "ui.perfetto.dev (default: nowhere)",
    )
    add("--trace-steps", metavar="N", type=int, help="how many steps that are (default: 3)")
    add(
        "--log-dir",
        metavar="DIR",
        default="logs",
        help="where each process's output is filed (default: logs)",
    )
    add(
        "--tensorboard",
        metavar="DIR",
        help="where each trainer writes the values of fleet.report, for TensorBoard",
    )
    add(
        "--no-panel",
        action="store_true",
        help="on a terminal: only the lines of the processes, and trainer 0's own display",
    )


# ---- manifest flags ----
#
# The flags of ``pserver manifest``.


KINDS = ("jobset", "compose", "slurm")


def add_manifest(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about the manifest's file and content; the names are those of
    ClusterDescription.
    """
    add = sub.add_argument
    add("--kind", choices=KINDS, required=True, help="Kubernetes, docker compose, or Slurm")
    add("--servers", metavar="N", type=int, required=True, help="how many")
    add("--trainers", metavar="N", type=int, required=True, help="how many")
    add("--output", metavar="FILE", help="where to write it (default: to standard output)")
    add("--name", metavar="NAME", default="", help="of the job (default: the script's name)")
    _add_manifest_processes(sub)
    _add_protection(sub)


def _add_manifest_processes(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--image", metavar="IMAGE", default="", help="of the containers (default: pserver)")
    add(
        "--in-image",
        action="store_true",
        help="SCRIPT is a file of the image; otherwise it is a local file, and is included",
    )
    add("--cpus", metavar="N", default="", help="of each process: 2, or 500m for half of one")
    add("--memory", metavar="SIZE", default="", help="of each process: 4Gi")
    add("--gpus", metavar="N", type=int, default=0, help="of each trainer (default: none)")
    add(
        "--data-dir",
        metavar="DIR",
        default="",
        help="for checkpoints, and for rows on disk: in containers a volume, which the image has "
        "/data for; for Slurm a folder that all hosts share (default: none)",
    )
    add("--storage", metavar="SIZE", default="", help="jobset: of that volume (default: 10Gi)")
    add("--storage-class", metavar="NAME", default="", help="jobset: its class")
    add(
        "--metrics",
        metavar="PORT",
        type=int,
        default=0,
        help="where Prometheus reads metrics: in each container; for Slurm as `launch` has it "
        "(default: nowhere)",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        dest="start_timeout_seconds",
        type=float,
        default=300.0,
        help="how long the processes wait for one another to come up (default: 300)",
    )
    add(
        "--restarts",
        metavar="N",
        type=int,
        help="after a failure: jobset: how often each pod is replaced (default: 3); slurm: how "
        "often all processes are started again (default: 0)",
    )
    add_checkpoints(sub)


def _add_protection(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "--keys",
        metavar="DIR",
        default="",
        help="the folder of `pserver keys init`; only its name is written (default: ./keys for "
        "compose; for Slurm one host, with a secret of the job's own; jobset has secrets)",
    )
    add("--insecure", action="store_true", help="no keys, on a network that nobody else reaches")


# ---- plan flags ----
#
# The flags of ``pserver plan``.


HOSTS = ("one", "each")


def add_planning(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about the planned job and its prediction."""
    add = sub.add_argument
    add("--servers", metavar="N", type=int, help="how many there would be")
    add("--trainers", metavar="N", type=int, help="how many there would be")
    add("--no-probe", action="store_true", help="show the split only, and run no step")
    add(
        "--window",
        metavar="SECONDS",
        type=float,
        help="of the steps that the probe measures (default: 6)",
    )
    add("--link", metavar="RATE", help="of each process's link, as 200Mbit or 10Gbit")
    add("--latency", metavar="TIME", help="of a link, one way, as 200us or 0.2ms")
    add(
        "--hosts",
        choices=HOSTS,
        help="'one': all processes share the cores of this machine; 'each': each has a machine "
        "like it (default: each with --link, otherwise one)",
    )
    add(
        "--search",
        action="store_true",
        help="compare update modes and numbers of servers, up to --servers, the best on top",
    )
    add("--memory", metavar="SIZE", help="with --search: that each server may have, as 8Gi")
    add(
        "--write",
        action="store_true",
        help="with --search: write the winner to SCRIPT's .plan.json, for strategy.auto_search",
    )
    add(
        "--figures",
        metavar="FILE",
        help="keep what the probe measures there; where the file is, predict from it, without a "
        "probe",
    )


# ---- replay flags ----
#
# The flags of ``pserver replay``.


def add_replaying(sub: argparse.ArgumentParser) -> None:
    """Adds the flags about the log, the starting point and the output."""
    add = sub.add_argument
    add("log", metavar="LOG", help="the directory that --record-log named")
    add(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="the checkpoint to begin with, of the recorded job (default: the log's beginning)",
    )
    add("--to", metavar="PATH", help="where to write the result, a checkpoint")
    add("--overwrite", action="store_true", help="write it even if something is there already")
    add(
        "--until",
        metavar="RECORD",
        type=int,
        help="the last record of the job's log that is applied (default: all)",
    )


# ---- flags ----


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
        """As argparse's, but the command's own parser reports unknown arguments."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(found, "command", ""), self)
            command.error(f"unrecognized arguments: {' '.join(unknown)}{command.meant(unknown)}")
        return found

    def meant(self, unknown: Sequence[str]) -> str:
        """A hint: the flags that are near to unknown ones."""
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
        """Its own flags, and those of its commands."""
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
    check = commands.add_parser(
        "check",
        help="list what of PaddlePaddle a script uses, and what to write",
        description=CHECK,
    )
    check.add_argument("scripts", metavar="SCRIPT", nargs="+", help="the files to read")
    check.add_argument("--json", action="store_true", help="one line of JSON for each script")
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
        each.epilog = settings.exit_status_help(name)
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
        help="checksums of the frames over TCP and gRPC (default: auto, on but under TLS, and for "
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
        help="a file for each server instead, from which `pserver serve --program` resumes",
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
    """Adds the flags about a server's files."""
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
        help="how long a peer may take to identify itself, on any port (default: 10)",
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
