"""The processes of this host that a launch has started: servers first, then the trainers, which get
the servers' endpoints.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from pserver.launcher.cluster import Cluster, JobTokens, ProcessEnvironments
from pserver.launcher.processes import ChildProcess, Group, Terminal
from pserver.launcher.prometheus_targets import write_targets

READY = re.compile(r"pserver ready at (\S+)")
RELOADED = re.compile(r"\bgoes on from .* are lost here")
JOINED = re.compile(r"\btrainer (\d+) joined over ")
SHOWN = "PSERVER_PANEL"  # tells trainers that there is a panel


@dataclass
class StartedProcesses:
    """Starts the processes of one attempt at a job, and knows them.

    Attributes:
        environments: the variables of each process.
        serve: the command that starts a server.
        attempt: how often the job has been started before.
        checkpoint: where the job saves by itself; "": it does not.
        servers: in the order of their numbers.
        trainers: by number, the one that was started last.
        endpoints: by server, the endpoint that its readiness line names.
        events: what happens, in order: a process (a server that is ready, or a process that has
            ended), a signal's number, or None: something else has changed.  ``put`` is safe
            in a signal handler.
        marks: the folder where trainers without servers leave a mark when they have finished.
    """

    cluster: Cluster
    environments: ProcessEnvironments
    tokens: JobTokens
    group: Group
    terminal: Terminal
    serve: Sequence[str]
    attempt: int
    checkpoint: str = ""
    servers: list[ChildProcess] = field(default_factory=list)
    trainers: dict[int, ChildProcess] = field(default_factory=dict)
    endpoints: dict[ChildProcess, str] = field(default_factory=dict)
    events: SimpleQueue[ChildProcess | int | None] = field(default_factory=SimpleQueue)
    marks: str = ""

    def __post_init__(self) -> None:
        self._roles: dict[int, dict[str, str]] = {}  # by trainer
        self._flags: list[str] = []  # of all servers
        # started again, and not joined yet; servers' threads write, too
        self._away: set[int] = set()
        self._reloading: set[ChildProcess] = set()  # servers that do not serve again yet

    def all(self) -> tuple[ChildProcess, ...]:
        """The processes that have been started, servers first.  Any thread may call it."""
        return (*self.servers, *self.trainers.values())

    def number_of(self, process: ChildProcess) -> int | None:
        """A trainer's number; None for a server."""
        return next((n for n, trainer in self.trainers.items() if trainer is process), None)

    def index_of(self, server: ChildProcess) -> int:
        """The number of a server of this host."""
        numbers = self.cluster.here(self.cluster.servers)
        return numbers[self.servers.index(server)]

    def reloading(self, server: ChildProcess) -> bool:
        """Whether a server was started again, and does not serve yet."""
        return server in self._reloading

    @property
    def asked(self) -> Sequence[str]:
        """The endpoints of all servers of the job, also of those on other hosts."""
        here = [self.endpoints[server] for server in self.servers if server in self.endpoints]
        return here if self.cluster.host is None else self.cluster.servers

    @property
    def write_ahead_log(self) -> str:
        """The file in which server 0 keeps the state that its replacement needs."""
        return str(Path(self.cluster.log_dir) / "server-0.wal")

    # ---- starting ----

    def start_servers(self, keep_failed_seconds: float) -> None:
        """Starts the servers.

        Args:
            keep_failed_seconds: for how long they keep a failed job's values.
        """
        cluster, directory = self.cluster, Path(self.cluster.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        write_targets(cluster, directory)
        for flag, value in (
            ("--transport", cluster.transport),
            ("--heartbeat-timeout", cluster.heartbeat_timeout_seconds),
            ("--start-timeout", cluster.start_timeout_seconds),
            ("--data-dir", cluster.data_dir),
            ("--store", cluster.store),
            ("--straggler-factor", cluster.straggler_factor),
            ("--record-log", cluster.record_log),
            ("--keep-failed", keep_failed_seconds),
            ("--min-trainers", cluster.least_trainers or None),
        ):
            self._flags += [] if value is None else [flag, str(value)]
        if self.checkpoint and cluster.max_restarts:
            Path(self.write_ahead_log).unlink(missing_ok=True)  # of another attempt
            self._flags += ["--await-servers", "--write-ahead-log", self.write_ahead_log]
        for number in cluster.here(cluster.servers):
            place = cluster.servers[number]
            self.servers.append(self._start_server(number, place, self._flags, self.attempt))

    def start_server_again(self, server: ChildProcess, path: str) -> None:
        """Restarts a server that has ended, at its endpoint; its log continues.

        Args:
            path: of the save from which it resumes.
        """
        place, number = self.servers.index(server), self.index_of(server)
        flags = [*self._flags, "--reload", path]
        again = self._start_server(number, self.endpoints.pop(server), flags, 1)
        self.servers[place] = again
        self._reloading.add(again)

    def _start_server(
        self, number: int, endpoint: str, flags: Sequence[str], attempt: int
    ) -> ChildProcess:
        command = [*self.serve, "--once", "--endpoint", endpoint, *flags]
        return self._start("server", number, command, self.tokens.for_servers, attempt)

    def start_trainers(self, shown: bool) -> None:
        """Starts the trainers, when all servers are ready.

        Args:
            shown: there is a panel, which shows the trainers' progress as servers report it.
        """
        cluster = self.cluster
        if cluster.collective:
            roles = self.environments.collective_roles()
        else:
            roles = self.environments.trainer_roles(self.asked)
        timeouts = {
            "PSERVER_HEARTBEAT_TIMEOUT": cluster.heartbeat_timeout_seconds,
            "PSERVER_START_TIMEOUT": cluster.start_timeout_seconds,
            # without servers no trainer can leave in order: the scripts' own handlers have that
            # time
            "PSERVER_GRACE": None if cluster.collective else cluster.grace_seconds,
        }
        given = {name: str(value) for name, value in timeouts.items() if value is not None}
        given |= self.tokens.for_trainers
        if shown and not cluster.collective:
            given |= {SHOWN: "1"}  # without servers the panel cannot learn their progress
        self._roles = {number: role | given for number, role in roles.items()}
        if cluster.collective:
            for number, role in self._roles.items():
                role["PSERVER_FINISHED"] = str(self._mark(number))
        for number in self._roles:
            self._start_trainer(number, self.attempt)

    def _mark(self, number: int) -> Path:
        return Path(self.marks) / f"trainer-{number}"

    def finished(self, *numbers: int) -> bool:
        """Whether these trainers of a job without servers have left the mark that they have
        finished it.
        """
        return all(self._mark(number).exists() for number in numbers)

    def start_again(self, number: int) -> None:
        """Starts a trainer that has ended: the same command, with the same number; its log
        continues.
        """
        self._away.add(number)
        self._start_trainer(number, 1)

    def late(self) -> list[ChildProcess]:
        """The trainers that were started again, and had not joined when all servers had ended."""
        if any(server.status is None for server in self.servers):
            return []
        return [self.trainers[number] for number in sorted(self._away)]

    def away(self, trainer: ChildProcess) -> bool:
        """Whether a trainer was started again, and has not joined."""
        return any(self.trainers[number] is trainer for number in self._away)

    def _start_trainer(self, number: int, attempt: int) -> None:
        command = [sys.executable, self.cluster.script, *self.cluster.arguments]
        role = self._roles[number]
        self.trainers[number] = self._start("trainer", number, command, role, attempt)

    def _start(
        self, kind: str, number: int, command: Sequence[str], role: Mapping[str, str], attempt: int
    ) -> ChildProcess:
        owns = self.terminal.interactive and (kind, number) == ("trainer", 0)
        # to a terminal Python writes whole lines; unbuffered it writes each argument of print() by
        # itself, and another process's line comes in between ("" is as good as unset)
        unbuffered = {"PYTHONUNBUFFERED": "" if owns else "1"}
        return ChildProcess(
            f"{kind} {number}",
            command,
            {**self.environments.of(kind, number), **role, **unbuffered},
            Path(self.cluster.log_dir) / f"{kind}-{number}.log",
            attempt,
            self.group,
            self.terminal,
            owns_terminal=owns,
            line=self._see if kind == "server" else None,
            ended=self.events.put,
        )

    def _see(self, process: ChildProcess, line: str) -> None:
        """Reads a line of a server."""
        if process not in self.endpoints and (match := READY.search(line)):
            self.endpoints[process] = match[1]
            self.events.put(process)
        elif RELOADED.search(line):
            self._reloading.discard(process)
        elif match := JOINED.search(line):
            self._away.discard(int(match[1]))
