"""The flags of ``pserver manifest``."""

from __future__ import annotations

import argparse

from pserver.command_line.checkpoint_flags import add_checkpoints

KINDS = ("jobset", "compose", "slurm")


def add_manifest(sub: argparse.ArgumentParser) -> None:
    """Adds which file to write, and what it says; names are those of ClusterDescription."""
    add = sub.add_argument
    add("--kind", choices=KINDS, required=True, help="Kubernetes, docker compose, or Slurm")
    add("--servers", metavar="N", type=int, required=True, help="how many")
    add("--trainers", metavar="N", type=int, required=True, help="how many")
    add("--output", metavar="FILE", help="where to write it (default: to standard output)")
    add("--name", metavar="NAME", default="", help="of the job (default: the script's name)")
    _add_processes(sub)
    _add_protection(sub)


def _add_processes(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--image", metavar="IMAGE", default="", help="of the containers (default: pserver)")
    add(
        "--in-image",
        action="store_true",
        help="SCRIPT is a file of the image; otherwise it is one here, and comes along",
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
