"""The cluster that ``launch`` starts: all of it on this machine, or this host's part of a larger
one, with servers or without.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from pserver.config import (
    MOST_JOB_NAME,
    TRANSPORT_CHOICES,
    check_factor,
    check_job_name,
    check_seconds,
    check_store,
    refuse_url,
    split_endpoint,
)
from pserver.launcher.script import check_script
from pserver.security import tokens
from pserver.security.tokens import Role, Secret

# ---- checkpoint variables ----
#
# The variables by which trainers learn that their job saves by itself, and where.


def variables_of(path: str | None, every: float | None, keep: int | None) -> dict[str, str]:
    """The values of ``--checkpoint``, ``--every`` and ``--keep``, as trainers read them.

    Args:
        path: of the folder, or its URL; None: the job does not save by itself.
        every: seconds between two checkpoints; None: the trainers' own choice.
        keep: how many of the newest stay; None: likewise.

    Returns:
        Values by name; none without a path.

    Raises:
        ValueError: a number is out of range, or has no effect.
    """
    if path is None:
        for flag, value in (("--every", every), ("--keep", keep)):
            if value is not None:
                raise ValueError(f"{flag}: has no effect without --checkpoint")
        return {}
    said = {"PSERVER_CHECKPOINT": path}
    if every is not None:
        check_seconds("--every", every)
        said["PSERVER_CHECKPOINT_EVERY"] = repr(every)
    if keep is not None:
        if keep < 1:
            raise ValueError(f"--keep: expected 1 or more, got {keep}")
        said["PSERVER_CHECKPOINT_KEEP"] = str(keep)
    return said


# ---- earlier logs ----
#
# Logs that an earlier job has left in a folder, of processes that this job does not have.


LOG_NAME = re.compile(r"(server|trainer)-(0|[1-9][0-9]*)\.log")
ASIDE = ".old"  # a page shows the files *.log


def set_aside(folder: Path, written: Collection[str]) -> list[str]:
    """Renames an earlier job's logs, so that they are not mistaken for this job's; removes nothing.

    Args:
        folder: of the logs; it need not be there.
        written: the names of the files that this job writes.

    Returns:
        A line for each.
    """
    if not folder.is_dir():
        return []
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name in written or not LOG_NAME.fullmatch(path.name) or not path.is_file():
            continue
        names = (f"{path.name}{ASIDE}{number or ''}" for number in count())
        free = next(folder / name for name in names if not (folder / name).exists())
        path.rename(free)
        lines.append(f"{path} is of an earlier job: it is {free.name} now")
    return lines


# ---- cluster ----


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes of a cluster, and the settings that they share.

    Attributes:
        script, arguments: what each trainer runs, with this Python.
        servers: HOST:PORT of every server of the cluster; port 0 where all run here; none in the
            collective mode.
        trainers: HOST:PORT of every trainer, used as its name only; "" where all run here.  In the
            collective mode the first one is the address of the rendezvous.
        host: the host whose processes are started; None: all of them.
        transport, heartbeat_timeout_seconds, start_timeout_seconds: for servers and trainers, as
            ``pserver serve`` has them; None: their own choice.
        data_dir: the servers' directory for files; None: they keep none.
        store: the URL of a prefix, in place of that directory; None: there is none.
        metrics: the port of server 0's metrics; the other servers have those behind it, then the
            trainers.  None: no process has metrics.
        job: names the job in metrics; "": as the script is named.
        web: the port of a page that shows the job; 0: any free one; None: there is none.
        max_restarts: how often the cluster, or a trainer alone, is started again when a process has
            failed.
        grace_seconds: for how long a trainer that gets SIGTERM may continue its step, to leave in
            order, or its script's own handler with what it does; 0: it ends at once.
        least_trainers: the number of trainers with which the job begins, and may continue; 0: all.
            With servers so many are started, on the host of the first one, and ``trainers`` are as
            many places as there may be.
        joins: the place of the one trainer that this host starts, in a job that is under way; None:
            it is not such a host, or has no place yet.
        straggler_factor: as ``pserver serve`` has it; None: its own choice.
        record_log: where servers record the job's log; None: nowhere.
        log_dir: the directory of ``server-0.log``, ``trainer-0.log``, ..., which are overwritten;
            for other logs there see :func:`set_aside`.
        devices: the GPUs of this host's trainers, one each; None: all that there are.

    Raises:
        ValueError: there is no such script, or a setting is wrong or has no effect.
    """

    script: str
    arguments: tuple[str, ...]
    servers: tuple[str, ...]
    trainers: tuple[str, ...]
    host: str | None = None
    transport: str | None = None
    heartbeat_timeout_seconds: float | None = None
    data_dir: str | None = None
    log_dir: str = "logs"
    devices: tuple[str, ...] | None = None
    start_timeout_seconds: float | None = None
    store: str | None = None
    metrics: int | None = None
    job: str = ""
    web: int | None = None
    max_restarts: int = 0
    least_trainers: int = 0
    grace_seconds: float | None = None
    joins: int | None = None
    straggler_factor: float | None = None
    record_log: str | None = None

    @property
    def collective(self) -> bool:
        """Whether the trainers have no servers."""
        return not self.servers

    def __post_init__(self) -> None:
        check_script(self.script)
        refuse_url("--log-dir", self.log_dir)
        for name, path in (("--data-dir", self.data_dir), ("--record-log", self.record_log)):
            if path is not None:
                refuse_url(name, path)
        if self.store is not None:
            check_store("--store", self.store)
        if self.transport not in (None, *TRANSPORT_CHOICES):
            raise ValueError(
                f"--transport: expected one of {', '.join(TRANSPORT_CHOICES)}, got "
                f"{self.transport!r}"
            )
        for name, seconds in (
            ("--heartbeat-timeout", self.heartbeat_timeout_seconds),
            ("--start-timeout", self.start_timeout_seconds),
        ):
            if seconds is not None:
                check_seconds(name, seconds)
        if self.grace_seconds is not None:
            check_seconds("--grace", self.grace_seconds, zero=True)
        if self.straggler_factor is not None:
            check_factor("--straggler-factor", self.straggler_factor)
        known = bool(self.here(self.servers)) or self.joining or bool(self.trainers_here)
        if self.host is not None and not known:
            raise ValueError(
                f"--host: {self.host!r} has no process in --servers {self.servers} --trainers "
                f"{self.trainers}"
            )
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts: expected 0 or more, got {self.max_restarts}")
        if self.max_restarts and self.host is not None and self.collective:
            raise ValueError(
                "--max-restarts: expected without --host where there are no servers, as one host's "
                "launch cannot start the others' processes again: let torchrun, Kubernetes, Slurm "
                "or Ray do that"
            )
        self._check_collective()
        self._check_metrics()

    def _check_collective(self) -> None:
        if not self.collective:
            if self.devices is not None:
                raise ValueError(
                    "--devices: belongs to the collective mode; expected --nccl2 with it"
                )
            return
        given = (
            ("--transport", self.transport),
            ("--data-dir", self.data_dir),
            ("--store", self.store),
            ("--web", self.web),
            ("--straggler-factor", self.straggler_factor),
            ("--record-log", self.record_log),
        )
        for name, value in given:
            if value is not None:
                raise ValueError(f"{name}: has no effect with --nccl2, where there are no servers")
        here = len(self.trainers_here)
        if self.devices is not None and (
            len(set(self.devices)) < len(self.devices) or len(self.devices) != here
        ):
            raise ValueError(
                f"--devices: expected {here} different ones, one for each trainer here, got "
                f"{','.join(self.devices) or 'none'}"
            )

    def _check_metrics(self) -> None:
        check_job_name("--job", self.job)
        processes = len(self.servers) + len(self.trainers)
        if self.metrics is None:
            return
        if self.collective:
            raise ValueError("--metrics: has no effect with --nccl2, where there are no servers")
        if not 1 <= self.metrics <= 65536 - processes:
            raise ValueError(
                f"--metrics: expected a port of 1 to {65536 - processes}, as {processes} processes "
                f"have one each, got {self.metrics}"
            )

    @property
    def script_name(self) -> str:
        """The default name of the job."""
        return Path(self.script).stem[:MOST_JOB_NAME]

    def metrics_at(self, kind: str, number: int) -> str:
        """HOST:PORT of the metrics of a process; "" where there are none.

        Args:
            kind: "server" or "trainer".
        """
        if self.metrics is None:
            return ""
        port = self.metrics + number + (len(self.servers) if kind == "trainer" else 0)
        return f"{self.host or '127.0.0.1'}:{port}"

    def metrics_targets(self) -> list[dict[str, object]]:
        """The processes of this host, as Prometheus reads them from a file (file_sd_configs)."""
        kinds = (("server", self.here(self.servers)), ("trainer", self.trainers_here))
        return [
            {
                "targets": [self.metrics_at(kind, number) for number in numbers],
                "labels": {"role": kind},
            }
            for kind, numbers in kinds
            if numbers
        ]

    @property
    def joining(self) -> bool:
        """Whether this host has no server, and brings one more trainer to a job that is under
        way.
        """
        fewer = bool(self.least_trainers) and not self.collective
        return fewer and self.host is not None and not self.here(self.servers)

    @property
    def trainers_here(self) -> list[int]:
        """The numbers of the trainers that are started on this host."""
        if self.joining:
            return [] if self.joins is None else [self.joins]
        if not self.least_trainers or self.collective:
            return self.here(self.trainers)
        return list(range(self.least_trainers)) if 0 in self.here(self.servers) else []

    @property
    def logs(self) -> list[str]:
        """The names of the files with the output of this host's processes."""
        kinds = (("server", self.here(self.servers)), ("trainer", self.trainers_here))
        return [f"{kind}-{number}.log" for kind, numbers in kinds for number in numbers]

    def without(self, trainer: int) -> Cluster:
        """The same cluster without the place of one trainer, nor its GPU where GPUs are named; the
        later trainers have the number before theirs.
        """

        def others(places: Sequence[str]) -> tuple[str, ...]:
            return (*places[:trainer], *places[trainer + 1 :])

        devices = None if self.devices is None else others(self.devices)
        return replace(self, trainers=others(self.trainers), devices=devices)

    def here(self, endpoints: Sequence[str]) -> list[int]:
        """The numbers of those servers, or trainers, that run on this host."""
        return [
            number
            for number, endpoint in enumerate(endpoints)
            if self.host is None or split_endpoint(endpoint)[0] == self.host.strip("[]")
        ]


def elastic_endpoints(
    servers: str, most_trainers: str, host: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endpoints that ``--servers``, ``--trainers MIN:MAX`` and ``--host`` ask for: trainers are
    places then, which hosts take later.

    Args:
        servers: a list of HOST:PORT.
        most_trainers: MAX.

    Raises:
        ValueError: not an endpoint, or one endpoint twice.
    """
    if servers.lstrip("-").isdecimal():
        raise ValueError("--servers: expected a list of HOST:PORT with --host HOST, got a number")
    return _endpoints("--servers", servers), ("",) * int(most_trainers)


def cluster_endpoints(
    servers: str, trainers: str, host: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endpoints that ``--servers`` and ``--trainers`` ask for.

    Args:
        servers, trainers: both a number (a local cluster), or both a list of HOST:PORT.
        host: ``--host``, which belongs to the lists.

    Returns:
        The servers' endpoints, and the trainers'.

    Raises:
        ValueError: a number below 1, not an endpoint, one endpoint twice, or the two forms mixed.
    """
    counted = [text.lstrip("-").isdecimal() for text in (servers, trainers)]
    if all(counted) and host is None:
        for name, count in (("--servers", servers), ("--trainers", trainers)):
            if int(count) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {count}")
        return ("127.0.0.1:0",) * int(servers), ("",) * int(trainers)
    if any(counted) or host is None:
        raise ValueError(
            "expected two numbers (--servers 2 --trainers 2), or two lists of HOST:PORT together "
            f"with --host HOST, got --servers {servers} --trainers {trainers}"
            + (f" --host {host}" if host is not None else " without --host")
        )
    return _endpoints("--servers", servers), _endpoints("--trainers", trainers)


def collective_endpoints(
    trainers: str | None, devices: str | None, host: str | None
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The endpoints and devices that ``--trainers`` and ``--devices`` ask for in the collective
    mode.

    Args:
        trainers: a number, or a list of HOST:PORT; None: one for each device.
        devices: the GPUs of this host's trainers.
        host: ``--host``, which belongs to a list.

    Raises:
        ValueError: neither is given; a number below 1, not an endpoint, one endpoint twice, or
            endpoints without a host.
    """
    given = (
        None
        if devices is None
        else tuple(item.strip() for item in devices.split(",") if item.strip())
    )
    if trainers is None:
        trainers = str(len(given or ()))
        if given is None or host is not None:
            raise ValueError("expected --trainers, as a number or as a list of HOST:PORT")
    if trainers.lstrip("-").isdecimal():
        if host is not None or int(trainers) < 1:
            raise ValueError(
                "--trainers: expected 1 or more, or with --host a list of HOST:PORT, got "
                f"{trainers}"
            )
        return ("",) * int(trainers), given
    if host is None:
        raise ValueError("--trainers: expected --host HOST with a list of HOST:PORT")
    return _endpoints("--trainers", trainers), given


def least_and_most(trainers: str) -> tuple[int, str]:
    """The value of ``--trainers``: MIN:MAX, or any other form.

    Returns:
        MIN, and MAX as a number to read; otherwise 0, and what was given.

    Raises:
        ValueError: MIN is below 1, or above MAX.

    Example:
        >>> least_and_most("1:8"), least_and_most("8"), least_and_most("a:6174,b:6174")
        ((1, '8'), (0, '8'), (0, 'a:6174,b:6174'))
    """
    least, colon, most = trainers.partition(":")
    if not colon or not least.lstrip("-").isdecimal() or not most.lstrip("-").isdecimal():
        return 0, trainers
    if not 1 <= int(least) <= int(most):
        raise ValueError(f"--trainers: expected MIN:MAX with 1 <= MIN <= MAX, got {trainers}")
    return int(least), most


def visible_devices(devices: Sequence[str], gpus: int, visible: str | None) -> tuple[str, ...]:
    """The GPUs that ``--devices`` asks for, as ``CUDA_VISIBLE_DEVICES`` names them.

    Args:
        devices: numbers among the GPUs that this process sees.
        gpus: how many it sees.
        visible: this process's own ``CUDA_VISIBLE_DEVICES``; None or "": all GPUs.

    Raises:
        ValueError: there is no such GPU.
    """
    wrong = [device for device in devices if not device.isdecimal() or int(device) >= gpus]
    if wrong:
        there = f"0 to {gpus - 1}" if gpus > 1 else "0" if gpus else "none"
        raise ValueError(
            f"--devices: expected numbers of GPUs that this process sees ({there}), got "
            f"{', '.join(wrong)}" + ("" if gpus else "; without GPUs leave --devices out")
        )
    names = [name.strip() for name in visible.split(",")] if visible else []
    return tuple(names[int(device)] if names else str(int(device)) for device in devices)


def _endpoints(name: str, text: str) -> tuple[str, ...]:
    found = tuple(item.strip() for item in text.split(","))
    for endpoint in found:
        if split_endpoint(endpoint)[1] == 0:
            raise ValueError(f"{name}: expected ports that other hosts can know, got {endpoint}")
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: expected each endpoint once, got {text}")
    return found


# ---- free port ----
#
# A port of this machine that a process can be told to listen on.


# below the ports that a kernel gives to a process that asks for any, so that it gives none of these
PORTS = range(20000, 32000)
# A process does not give a port twice, and two processes begin at different ones, whatever either
# has told `random` to begin with.
_turns = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_port() -> int:
    """A port of this machine on which trainer 0 can listen: unused now, and outside of the range
    from which the kernel picks ports for other processes.

    Raises:
        OSError: none was found.
    """
    for _ in range(100):
        port = PORTS[next(_turns) % len(PORTS)]
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(
        f"expected a free port of {PORTS.start} to {PORTS.stop - 1} on 127.0.0.1, found none in "
        "100 tries"
    )


# ---- environments ----
#
# The environment variables of the processes of a launch: they tell a script its role.


SERVER_ROLE_VARIABLES = (
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


class ProcessEnvironments:
    """The environment of each process of this host.

    Args:
        cluster: what is started.
        inherits: the variables that every process gets besides its own.
    """

    def __init__(self, cluster: Cluster, inherits: Mapping[str, str]) -> None:
        self._cluster, self._inherits = cluster, inherits

    def of(self, kind: str, number: int) -> dict[str, str]:
        """The variables of a process, without those of its role.

        Args:
            kind: "server" or "trainer".
        """
        return {**self._inherited(), **self._threads(), **self._labels(kind, number)}

    def trainer_roles(self, endpoints: Sequence[str]) -> dict[int, dict[str, str]]:
        """By trainer of this host, the variables of its role where there are servers.

        Args:
            endpoints: of all servers.
        """
        cluster = self._cluster
        local, fewer = cluster.host is None, bool(cluster.least_trainers)
        return {
            number: {
                "TRAINING_ROLE": "TRAINER",
                "PSERVER_ENDPOINTS": ",".join(endpoints),
                "TRAINERS": str(len(cluster.trainers)),
                "TRAINER_ID": str(number),
                **({} if local or fewer else {"CURRENT_ENDPOINT": cluster.trainers[number]}),
                **({} if cluster.transport is None else {"PSERVER_TRANSPORT": cluster.transport}),
            }
            for number in cluster.trainers_here
        }

    def collective_roles(self) -> dict[int, dict[str, str]]:
        """By trainer, torchrun's variables.

        Trainers of one host see the same GPUs and take theirs by LOCAL_RANK.
        """
        cluster = self._cluster
        local = cluster.host is None
        host, port = ("127.0.0.1", free_port()) if local else split_endpoint(cluster.trainers[0])
        here = cluster.trainers_here
        shared = {
            "TRAINING_ROLE": "TRAINER",
            **{"WORLD_SIZE": str(len(cluster.trainers)), "LOCAL_WORLD_SIZE": str(len(here))},
            **{"MASTER_ADDR": host, "MASTER_PORT": str(port)},
            **(
                {}
                if cluster.devices is None
                else {"CUDA_VISIBLE_DEVICES": ",".join(cluster.devices)}
            ),
        }
        if local and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in self._inherits:
            # this host's name need not resolve to an address of this host
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        return {
            number: {**shared, "RANK": str(number), "LOCAL_RANK": str(index)}
            for index, number in enumerate(here)
        }

    def _inherited(self) -> Mapping[str, str]:
        """The variables that every process inherits: in the collective mode without those of the
        other role.
        """
        if not self._cluster.collective:
            return self._inherits
        return {
            name: value
            for name, value in self._inherits.items()
            if name not in SERVER_ROLE_VARIABLES
        }

    def _threads(self) -> dict[str, str]:
        """The number of threads of a process: its share of the cores, or the user's setting."""
        if "OMP_NUM_THREADS" in self._inherits:
            return {}
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        servers = self._cluster.here(self._cluster.servers)
        processes = len(servers) + len(self._cluster.trainers_here)
        count = str(max(1, cores // processes))
        return {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": self._inherits.get("MKL_NUM_THREADS", count),
        }

    def _labels(self, kind: str, number: int) -> dict[str, str]:
        """The job's name, and where a process serves its metrics, if it does."""
        cluster = self._cluster
        if cluster.collective:
            return {}
        name = cluster.job or self._inherits.get("PSERVER_JOB", "") or cluster.script_name
        place = cluster.metrics_at(kind, number)
        return {"PSERVER_JOB": name, **({"PSERVER_METRICS": place} if place else {})}


# ---- job tokens ----
#
# The token files of one launch: for its servers, for its trainers, and for the commands of the same
# user.


VARIABLE = "PSERVER_TOKEN_FILE"


class JobTokens:
    """Makes the files, and removes them at the end; a context manager.

    A local job always has a new secret.  The parts of a larger one must have the same, which the
    user gives to each host's ``launch`` in ``PSERVER_TOKEN_FILE``; without it there is none.

    Args:
        cluster: what is launched.
        environ: the variables of ``launch``.

    Attributes:
        operator: the file for servers and for ``launch`` itself; "" where the job has no secret.
        trainer: the file for trainers; likewise.

    Raises:
        ValueError: the file that the user gives holds no secret.
        OSError: there is no private place for files.
    """

    def __init__(self, cluster: Cluster, environ: Mapping[str, str]) -> None:
        self.operator = self.trainer = ""
        self._environ = environ
        self._held: tokens.LockedFiles | None = None
        self._own: Path | None = None  # the directory of this job
        if cluster.collective:
            return
        local = cluster.host is None
        given = "" if local else environ.get(VARIABLE, "")
        if not (local or given):
            return
        secret = Secret.make() if local else tokens.read(given)
        if secret.role is Role.TRAINER:
            if cluster.here(cluster.servers):
                raise ValueError(
                    f"{VARIABLE}: servers of this host need the operator's token file, got a "
                    "trainer's"
                )
            self.operator = self.trainer = given
            return
        self._held = tokens.LockedFiles(tokens.folder(environ))
        self._own = self._held.directory()
        self.trainer = self._write("trainer.token", secret.of(Role.TRAINER))
        self.operator = given or self._write("operator.token", secret)

    def _write(self, name: str, secret: Secret) -> str:
        assert self._own is not None, "the directory of this job"
        tokens.write(self._own / name, secret)
        return str(self._own / name)

    def publish(self, endpoints: Iterable[str]) -> None:
        """Publishes the operator's file, so that this user's commands find it by a server's port.

        Args:
            endpoints: of the servers of a local job.
        """
        if self._held is None:
            return
        secret = tokens.read(self.operator)
        for endpoint in endpoints:
            self._held.file(tokens.name_of(split_endpoint(endpoint)[1]), secret)

    @staticmethod
    def _variables(path: str) -> dict[str, str]:
        return {VARIABLE: path} if path else {}

    @property
    def for_servers(self) -> dict[str, str]:
        """The variables of servers, and of the helpers that ``launch`` runs."""
        return self._variables(self.operator)

    @property
    def for_trainers(self) -> dict[str, str]:
        """The variables of trainers."""
        return self._variables(self.trainer)

    def __enter__(self) -> JobTokens:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.remove()
