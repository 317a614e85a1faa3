"""Starts a cluster on this machine, or this host's part of a larger one, and supervises it.

::

    start servers --ready lines--> start trainers --all ended with 0--> servers end --> status 0
          |                             |                                    |
          `---- a process fails --------+------------------------------------'
                       |
                       `--> wait for reasons --> SIGTERM --> SIGKILL --> report --> its status

With ``--max-restarts`` a job that has failed is started again from the beginning of this picture;
its logs continue in the same files.  Without servers it may then continue with the remaining
trainers; see supervisor.py.

Servers of a local cluster bind port 0 and print the port in their readiness line, so that two
launches never use the same one.  In the collective mode there are no servers, and trainers get
torchrun's variables.  Nothing here knows what a script trains: environment variables tell a trainer
its role.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from pserver.launcher.cluster import Cluster, JobTokens, ProcessEnvironments, set_aside
from pserver.launcher.joining import find_place
from pserver.launcher.panel import Panel
from pserver.launcher.processes import Group, Terminal
from pserver.launcher.started_processes import SHOWN, StartedProcesses
from pserver.launcher.supervisor import Next, RestartPolicy, Supervisor, WebPage

SERVE = (sys.executable, "-m", "pserver", "serve")


def launch(
    cluster: Cluster,
    environment: Mapping[str, str],
    out: TextIO | None = None,
    serve: Sequence[str] = SERVE,
    panel: bool = True,
) -> int:
    """Runs the cluster until the job has ended.  Call it from the main thread: it handles SIGINT,
    SIGTERM and SIGHUP.

    Args:
        cluster: what to start.
        environment: the variables that every process gets besides those of its role.
        out: where the processes' lines go; None: standard output.
        serve: the command that starts a server.
        panel: show the panel below these lines, where ``out`` is a terminal.

    Returns:
        Of the last start of the job:
        0 when every process here has ended with 0; otherwise the status of the process that failed,
        or 128 + the signal that killed it; or 128 + the signal that ended ``launch`` itself.
    """
    # of a trainer that launches: its panel is not this one's
    environment = {name: value for name, value in environment.items() if name != SHOWN}
    width = len(f"trainer {len(cluster.trainers) - 1}")
    terminal = Terminal(out or sys.stdout, width, environment)
    if cluster.host is None:  # otherwise other hosts may write to the same folder
        for line in set_aside(Path(cluster.log_dir), cluster.logs):
            _tell(terminal, line)
    whole = cluster.host is None or cluster.joining
    policy = RestartPolicy(cluster.max_restarts, whole, cluster.least_trainers)
    attempt = 0
    while True:
        status, job = _attempt(cluster, environment, terminal, serve, panel, policy, attempt)
        if job.next is Next.FEWER:
            assert job.cause is not None, "a trainer's place stays empty"
            cluster = cluster.without(job.cause)
            _tell(
                terminal,
                f"the place of trainer {job.cause} stays empty: starts the job again with "
                f"{len(cluster.trainers)} trainers ({policy.counted})",
            )
        elif job.next is Next.WHOLE:
            what = "a trainer" if cluster.joining else "the job"
            _tell(terminal, f"starts {what} again ({policy.counted})")
        else:
            return status
        attempt += 1


def _attempt(
    cluster: Cluster,
    environment: Mapping[str, str],
    terminal: Terminal,
    serve: Sequence[str],
    panel: bool,
    policy: RestartPolicy,
    attempt: int,
) -> tuple[int, Supervisor]:
    """Runs the cluster once; returns the status, and the next action."""
    with ExitStack() as stack:
        tokens = stack.enter_context(JobTokens(cluster, environment))
        if cluster.joining:
            place = find_place(cluster, tokens.operator, environment)
            cluster = replace(cluster, joins=place)
            _tell(terminal, f"joins the job as trainer {place}")
        group = stack.enter_context(Group())
        environments = ProcessEnvironments(cluster, environment)
        given = {**environment, **tokens.for_servers}
        say = partial(_tell, terminal)
        page = stack.enter_context(WebPage(cluster.web, cluster.log_dir, given, group, say))
        saved = environment.get("PSERVER_CHECKPOINT", "")
        marks = stack.enter_context(TemporaryDirectory(prefix="pserver-"))
        started = StartedProcesses(
            cluster, environments, tokens, group, terminal, serve, attempt, saved, marks=marks
        )
        job = Supervisor(started, policy, environment, page, say)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # under nohup a process ignores SIGHUP, and goes on to
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, job.interrupt))
        stack.callback(terminal.restore)
        if panel and terminal.interactive:
            name, token = cluster.script_name, None if cluster.collective else tokens.operator
            job.panel = Panel(name, terminal, group, environment, started.all, token)
            stack.enter_context(job.panel)
        return job.run(), job


def _tell(terminal: Terminal, text: str) -> None:
    """Prints a line for the user; above the panel, where there is one."""
    if terminal.panel:
        terminal.line("launch", text)
    else:
        with suppress(OSError):  # it has no reader, or its disk is full: the job continues
            print(f"pserver launch: {text}", file=sys.stderr, flush=True)
