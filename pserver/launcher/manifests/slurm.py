"""A batch script for Slurm: a step of servers, a step of trainers when these are ready, and a log
for each process.

Without keys all processes are on one host, and have a secret of the job's own.  With keys, or where
no one else reaches the network, they are on as many hosts as Slurm chooses; and where trainers have
GPUs besides, the job has two parts (a heterogeneous job), so that servers take no host with GPUs.

The script is assignments, made here, and ``batch_script.sh``.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from pserver.launcher.manifests.description import ClusterDescription, bytes_of

BODY = Path(__file__).with_name("batch_script.sh")
WARN_SECONDS = 60  # before the time is up


def slurm(cluster: ClusterDescription, folder: Path) -> str:
    """The script.

    Args:
        folder: where it will be; it makes no difference: paths begin where the job is submitted.
    """
    lines = ["#!/bin/bash", *_comment(cluster), *_options(cluster), "", *_assignments(cluster)]
    return "\n".join(lines) + "\n" + BODY.read_text(encoding="utf-8")


def _several_hosts(cluster: ClusterDescription) -> bool:
    return bool(cluster.keys) or cluster.insecure


def _comment(cluster: ClusterDescription) -> list[str]:
    lines = [
        f"# Servers: {cluster.servers}, trainers: {cluster.trainers}, on Slurm; written by "
        "`pserver manifest`.",
        "# Submit it from a folder that all hosts share, with python and pserver on the PATH:",
        "#",
        "#   sbatch --time=1:00:00 THIS_FILE",
        "#",
        "# Flags of sbatch win over those below.  Logs are in logs/JOB.",
        "# shellcheck disable=SC2016,SC2317 # arguments stay as typed; srun calls serve and train",
    ]
    if cluster.keys:
        lines.append(
            "# The keys: pserver keys init DIR --hosts HOSTS, with all hosts of the partition."
        )
    elif cluster.insecure:
        lines.append("# No keys: what travels between the hosts is not encrypted.")
    return lines


def _options(cluster: ClusterDescription) -> list[str]:
    """The job's requests to Slurm."""
    options = [
        f"--job-name={cluster.job}",
        f"--signal=B:TERM@{WARN_SECONDS}",
        "--output=%x-%j.out",
    ]
    each = [f"--cpus-per-task={cluster.cpus or 1}"]
    if cluster.memory:
        mebibytes = bytes_of("--memory", cluster.memory) / 2**20 / int(cluster.cpus or 1)
        each.append(f"--mem-per-cpu={math.ceil(mebibytes)}M")
    if cluster.gpus and _several_hosts(cluster):
        gpus = [f"--gpus-per-task={cluster.gpus}"]
        options += [f"--ntasks={cluster.servers}", *each, "hetjob"]
        options += [f"--ntasks={cluster.trainers}", *each, *gpus]
    else:
        options += [f"--ntasks={cluster.servers + cluster.trainers}", *each]
        if cluster.gpus:
            options.append(f"--gpus={cluster.trainers * cluster.gpus}")
    if not _several_hosts(cluster):
        options.append("--nodes=1")
    return [f"#SBATCH {option}" for option in options]


def _assignments(cluster: ClusterDescription) -> list[str]:
    """The variables that the rest of the script reads."""
    memory = [] if cluster.memory else ["--mem=0"]  # steps share what the job has
    gpus = ["--gres=none"] if cluster.gpus and not _several_hosts(cluster) else []
    per_task = [f"--gpus-per-task={cluster.gpus}"] if cluster.gpus else []
    return [
        f"servers={cluster.servers}",
        f"trainers={cluster.trainers}",
        f"script=({shlex.join(['python', cluster.script, *cluster.arguments])})",
        f"keys={shlex.quote(cluster.keys)} # a folder with one of each host",
        f"export PSERVER_INSECURE={'1' if cluster.insecure else ''}",
        f"data_dir={shlex.quote(cluster.data_dir)}",
        f"metrics={cluster.metrics} # the port of server 0's, or 0: none",
        f"cpus={cluster.cpus or 1}",
        f"restarts={cluster.restarts or 0} # of all processes, when one has failed",
        *(
            f"export {name}={shlex.quote(value)}"
            for name, value in cluster.checkpoint_variables.items()
        ),
        f"start_timeout={math.ceil(cluster.start_timeout_seconds)} # seconds",
        f"server_options=({shlex.join(memory + gpus)})",
        f"trainer_options=({shlex.join(memory + per_task)})",
    ]
