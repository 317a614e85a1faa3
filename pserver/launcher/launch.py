"""Starts a cluster on this machine, or this host's part of a larger one, and supervises it.

::

    start servers --ready lines--> start trainers --all ended with 0--> servers end --> status 0
          |                             |                                    |
          `---- a process fails --------+------------------------------------'
                       |
                       `--> wait for reasons --> SIGTERM --> SIGKILL --> report --> its status

With ``--max-restarts`` a job that has failed is started again from the beginning of this picture;
its logs go on in the same files.

After a failure the other processes first have time to end by themselves, because one of them may
know the reason better.  The report begins with the cause: a process that was killed, that is
suspended, or that failed without being told of another's end, with its traceback.  Of each process
that was told there is one line.

Servers of a local cluster bind port 0 and print the port in their readiness line, so that two
launches never use the same one.  In the collective mode there are no servers, and trainers get
torchrun's variables.  Nothing here knows what a script trains: environment variables tell a trainer
its role.
"""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from pserver.launcher.cluster import Cluster
from pserver.launcher.environments import ProcessEnvironments
from pserver.launcher.job_tokens import JobTokens
from pserver.launcher.panel import Panel
from pserver.launcher.process import Group, Process
from pserver.launcher.prometheus_targets import write_targets
from pserver.launcher.report import by_cause, sentences
from pserver.launcher.rescue import KEEP_SECONDS, rescue
from pserver.launcher.terminal import Terminal
from pserver.launcher.web_page import WebPage

SERVE = (sys.executable, "-m", "pserver", "serve")
LAST_WORD = (sys.executable, "-m", "pserver.launcher.last_word")
TELL_SECONDS = 10.0  # for other hosts' servers to be told
SHOWN = "PSERVER_PANEL"  # tells trainers that there is a panel
READY = re.compile(r"pserver ready at (\S+)")
READY_SECONDS = 120.0  # imports and compiled tables, from a cold disk
REASON_SECONDS = 2.0  # after a failure: for the other processes to end and say why
LEAVE_SECONDS = 3.0  # for servers to end after their trainers
GRACE_SECONDS = 8.0  # between SIGTERM and SIGKILL: servers drain for 5 s
NOTICE_SECONDS = 10.0  # then a line says that servers wait for other hosts' trainers


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
    for attempt in range(cluster.max_restarts + 1):
        status, again = _attempt(cluster, environment, terminal, serve, panel, attempt)
        if not again or attempt == cluster.max_restarts:
            break
        _tell(terminal, f"starts the job again (restart {attempt + 1} of {cluster.max_restarts})")
    return status


def _attempt(
    cluster: Cluster,
    environment: Mapping[str, str],
    terminal: Terminal,
    serve: Sequence[str],
    panel: bool,
    attempt: int,
) -> tuple[int, bool]:
    """Runs the cluster once; gives the status, and whether it may be started again: a process has
    failed, and nobody has asked ``launch`` to end, also while it failed.
    """
    with ExitStack() as stack:
        tokens = stack.enter_context(JobTokens(cluster, environment))
        group = stack.enter_context(Group())
        environments = ProcessEnvironments(cluster, environment)
        given = {**environment, **tokens.for_servers}
        say = partial(_tell, terminal)
        page = stack.enter_context(WebPage(cluster.web, cluster.log_dir, given, group, say))
        job = _Supervisor(
            cluster, environment, environments, tokens, group, terminal, serve, page, attempt
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # under nohup a process ignores SIGHUP, and goes on to
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, job.interrupt))
        stack.callback(terminal.restore)
        if panel and terminal.interactive:
            name, token = cluster.script_name, None if cluster.collective else tokens.operator
            job.panel = Panel(name, terminal, group, environment, job.processes_here, token)
            stack.enter_context(job.panel)
        status = job.run()
        return status, job.failed and not job.interrupted


class _Interrupted(Exception):
    """A signal has asked ``launch`` to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Failed(Exception):
    """A process ended with another status than 0, or a server did not get ready."""


@dataclass
class _Supervisor:
    """The processes of one launch, and the events that they and signals cause.

    One thread runs it.  Processes' threads and the signal handler only put events into ``events``.

    Attributes:
        environments: the variables of each process.
        page: with --web, the process that shows the job.
        attempt: how often the job has been started before.
        failed: a process has failed.
        interrupted: a signal has asked ``launch`` to end.
        panel: on a terminal.
        endpoints: by server, the endpoint that its readiness line names.
        ended: the processes that have ended, in this order.
        suspended: those that neither ran nor ended when another failed.
        events: what happens, in order: a process (a server that is ready, or a process that has
            ended) or a signal's number.  ``put`` is safe in a signal handler.
    """

    cluster: Cluster
    environment: Mapping[str, str]
    environments: ProcessEnvironments
    tokens: JobTokens
    group: Group
    terminal: Terminal
    serve: Sequence[str]
    page: WebPage
    attempt: int
    failed: bool = False
    interrupted: bool = False
    servers: list[Process] = field(default_factory=list)
    trainers: list[Process] = field(default_factory=list)
    endpoints: dict[Process, str] = field(default_factory=dict)
    ended: list[Process] = field(default_factory=list)
    suspended: list[Process] = field(default_factory=list)
    events: queue.SimpleQueue[Process | int] = field(default_factory=queue.SimpleQueue)
    panel: Panel | None = None

    def run(self) -> int:
        try:
            self._start_servers()
            self._start_trainers()
            self._wait_for_trainers()
            self._end_panel()
            self._wait_for_servers()
            return 0
        except _Failed as failure:
            self.failed = True
            self._end_panel()
            if self.cluster.host is not None:  # a local cluster ends as a whole
                self._tell_servers(lambda trainer: trainer.failed)
            self._wait_for_reasons(str(failure))
            self.suspended = [each for each in self._processes() if each.suspended]
            for process in self.suspended:
                process.stop(signal.SIGKILL)  # no other signal reaches it
            self._rescue()
            self._stop(signal.SIGTERM)
            return self._report()
        except _Interrupted as interrupted:
            self._say(f"{interrupted}: passed on; a second signal kills")
            self._stop(interrupted.number)
            return 128 + interrupted.number

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.interrupted = True
        self.events.put(number)

    # ---- starting ----

    def _start_servers(self) -> None:
        directory = Path(self.cluster.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        write_targets(self.cluster, directory)
        for number in self.cluster.here(self.cluster.servers):
            command = [*self.serve, "--once", "--endpoint", self.cluster.servers[number]]
            for flag, value in (
                ("--transport", self.cluster.transport),
                ("--heartbeat-timeout", self.cluster.heartbeat_timeout_seconds),
                ("--start-timeout", self.cluster.start_timeout_seconds),
                ("--data-dir", self.cluster.data_dir),
                ("--store", self.cluster.store),
                ("--keep-failed", KEEP_SECONDS if self._rescues else 0),
            ):
                command += [] if value is None else [flag, str(value)]
            self.servers.append(self._start("server", number, command, self.tokens.for_servers))
        if not self._until(lambda: len(self.endpoints) == len(self.servers), READY_SECONDS):
            late = ", ".join(
                process.name for process in self.servers if process not in self.endpoints
            )
            raise _Failed(
                f"{late}: expected a readiness line within {READY_SECONDS:.0f} s, got none"
            )
        self.tokens.publish(self.endpoints.values())
        local = self.cluster.host is None
        here = [self.endpoints[server] for server in self.servers]
        self.page.begin(here if local else self.cluster.servers)

    def _start_trainers(self) -> None:
        cluster = self.cluster
        endpoints = [self.endpoints[server] for server in self.servers]
        if cluster.collective:
            roles = self.environments.collective_roles()
        else:
            here = cluster.host is None
            roles = self.environments.trainer_roles(endpoints if here else cluster.servers)
        timeouts = {
            "PSERVER_HEARTBEAT_TIMEOUT": cluster.heartbeat_timeout_seconds,
            "PSERVER_START_TIMEOUT": cluster.start_timeout_seconds,
        }
        given = {name: str(value) for name, value in timeouts.items() if value is not None}
        given |= self.tokens.for_trainers
        if self.panel is not None and not cluster.collective:
            given |= {SHOWN: "1"}  # without servers nobody tells the panel how far they are
        for number, role in roles.items():
            command = [sys.executable, cluster.script, *cluster.arguments]
            self.trainers.append(self._start("trainer", number, command, role | given))
        if self.panel is not None:
            asked = endpoints if cluster.host is None else cluster.servers
            self.panel.watch(asked)

    def _start(
        self, kind: str, number: int, command: Sequence[str], role: Mapping[str, str]
    ) -> Process:
        owns = self.terminal.interactive and (kind, number) == ("trainer", 0)
        # to a terminal Python writes whole lines; unbuffered it writes each argument of print() by
        # itself, and another process's line comes in between ("" is as good as unset)
        unbuffered = {"PYTHONUNBUFFERED": "" if owns else "1"}
        return Process(
            f"{kind} {number}",
            command,
            {**self.environments.of(kind, number), **role, **unbuffered},
            Path(self.cluster.log_dir) / f"{kind}-{number}.log",
            self.attempt,
            self.group,
            self.terminal,
            owns_terminal=owns,
            line=self._see_ready if kind == "server" else None,
            ended=self.events.put,
        )

    def _see_ready(self, process: Process, line: str) -> None:
        if process not in self.endpoints and (match := READY.search(line)):
            self.endpoints[process] = match[1]
            self.events.put(process)

    # ---- watching ----

    def _until(
        self, condition: Callable[[], bool], seconds: float | None, *, failures: bool = True
    ) -> bool:
        """Takes events until the condition holds (True) or the time is over (False).

        Raises:
            _Failed: a process has failed (unless ``failures`` is False).
            _Interrupted: a signal came.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while not condition():
            try:
                event = self.events.get(
                    timeout=None if end is None else max(0.0, end - time.monotonic())
                )
            except queue.Empty:
                return False
            if isinstance(event, int):
                raise _Interrupted(event)
            if event.status is not None and event not in self.ended:
                self.ended.append(event)
            if failures and event.failed:
                raise _Failed
        return True

    def _over(self, processes: Sequence[Process], least: int) -> bool:
        """Whether so many of them have ended; one that has failed has raised."""
        return sum(process in self.ended for process in processes) >= least

    def _wait_for_trainers(self) -> None:
        """Tells the servers of trainers that have ended while others go on: they would wait until
        the start timeout for one that ended well and had not joined.
        """
        told, ended = 0, partial(self._over, self.trainers)
        while not ended(len(self.trainers)):
            self._until(partial(ended, told + 1), None)
            if not self._until(partial(ended, len(self.trainers)), LEAVE_SECONDS):
                told = sum(trainer in self.ended for trainer in self.trainers)
                self._tell_servers(lambda trainer: trainer.status is not None)

    def _wait_for_servers(self) -> None:
        """A local cluster's servers end now; those of a larger one go on for other hosts'
        trainers.
        """
        left = partial(self._over, self.servers, len(self.servers))
        if self.cluster.host is None:
            if not self._until(left, LEAVE_SECONDS):
                self._stop(signal.SIGTERM)
        elif not self._until(left, NOTICE_SECONDS):
            self._say(
                "the trainers here have ended; the servers here wait for those of other hosts"
            )
            self._until(left, None)

    # ---- ending ----

    def _tell_servers(self, which: Callable[[Process], bool]) -> None:
        """The servers learn that trainers have ended here; it counts for those that never
        joined.
        """
        here = dict(zip(self.trainers, self.cluster.here(self.cluster.trainers), strict=False))
        words = [
            f"{number}=its process ended with status {trainer.status}"
            for trainer, number in here.items()
            if which(trainer)
        ]
        local = self.cluster.host is None
        endpoints = list(self.endpoints.values()) if local else self.cluster.servers
        if endpoints and words:
            with suppress(subprocess.TimeoutExpired):
                keys = self.environment.get("PSERVER_KEYS", "")
                command = [*LAST_WORD, self.tokens.operator, keys, ",".join(endpoints), *words]
                # local servers may have ended with their job, while a trainer still evaluates
                quiet = subprocess.DEVNULL if local else None
                subprocess.run(command, timeout=TELL_SECONDS, check=False, stderr=quiet)

    @property
    def _rescues(self) -> bool:
        """Whether a failed job's values are saved: all its servers are here, and have a place."""
        return self.cluster.data_dir is not None and self.cluster.host is None

    def _rescue(self) -> None:
        """Saves what the servers of a failed job hold, if all of them are still there."""
        if self._rescues and self.trainers and all(each.status is None for each in self.servers):
            environ = {**self.environment, **self.tokens.for_servers}
            self._say(rescue(list(self.endpoints.values()), str(self.cluster.data_dir), environ))

    def _wait_for_reasons(self, message: str) -> None:
        """Gives the other processes time to end by themselves: one of them may know the reason
        better.

        Args:
            message: the reason, if it is known; "" where a process has failed.
        """
        if message:
            self._say(message)
            return
        with suppress(_Interrupted):
            self._until(self._all_ended, REASON_SECONDS, failures=False)

    def _report(self) -> int:
        """Says of every process that failed why; returns the status of the first one's."""
        failed = by_cause(self.ended, self.servers)
        killed = [each for each in self._processes() if each.killed and each not in self.suspended]
        for line in sentences(failed, self.suspended, killed, GRACE_SECONDS):
            self._say(line)
        return failed[0].status or 1 if failed else 1

    def processes_here(self) -> tuple[Process, ...]:
        """Those that have been started, servers first.  Any thread may call it."""
        return (*self.servers, *self.trainers)

    def _end_panel(self) -> None:
        """From here on ``launch`` itself has something to say, or nothing moves any more."""
        if self.panel is not None:
            self.panel.close()

    def _processes(self) -> tuple[Process, ...]:
        return (*self.trainers, *self.servers)

    def _all_ended(self) -> bool:
        return all(process.status is not None for process in self._processes())

    def _stop(self, number: int) -> None:
        """Asks all processes to end; kills the rest after a grace, or when the user asks again."""
        for process in self._processes():
            process.stop(number)
        with suppress(_Interrupted):
            if self._until(self._all_ended, GRACE_SECONDS, failures=False):
                return
        for process in self._processes():
            process.stop(signal.SIGKILL)
        self._until(self._all_ended, GRACE_SECONDS, failures=False)

    def _say(self, text: str) -> None:
        self._end_panel()
        _tell(self.terminal, text)


def _tell(terminal: Terminal, text: str) -> None:
    """Says something to whoever has started the job; above the panel, where there is one."""
    if terminal.panel:
        terminal.line("launch", text)
    else:
        print(f"pserver launch: {text}", file=sys.stderr, flush=True)
