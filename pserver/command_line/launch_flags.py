"""The flags of ``pserver launch``."""

from __future__ import annotations

import argparse

from pserver.command_line.checkpoint_flags import add_checkpoints, add_restarts
from pserver.command_line.key_flags import add_collective_protection, add_protection
from pserver.command_line.web_flags import add_web_of_launch
from pserver.config import TRANSPORT_CHOICES


def add_launching(sub: argparse.ArgumentParser) -> None:
    """Adds which processes to start, and the settings that they share."""
    _add_processes(sub)
    _add_settings(sub)


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
    """What becomes of trainers that are taken away, or slow."""
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
    """What a job lets others see."""
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
