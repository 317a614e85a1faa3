"""The cluster that ``launch`` starts: all of it on this machine, or this host's part of a larger
one, with servers or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        grace_seconds: for how long a trainer that gets SIGTERM may go on with its step, to leave in
            order, or its script's own handler with what it does; 0: it ends at once.
        least_trainers: with how many trainers the job begins, and may go on; 0: with all.  With
            servers so many are started, on the host of the first one, and ``trainers`` are as many
            places as there may be.
        joins: the place of the one trainer that this host starts, in a job that is under way; None:
            it is not such a host, or has no place yet.
        straggler_factor: as ``pserver serve`` has it; None: its own choice.
        record_log: where servers record the job's log; None: nowhere.
        log_dir: the directory of ``server-0.log``, ``trainer-0.log``, ..., which are overwritten;
            see earlier_logs.py.
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
        if not Path(self.script).is_file():
            raise ValueError(f"expected a script to run, and there is no file {self.script!r}")
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
        """What the job is called where nobody names it."""
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
    places then, which hosts come to take.

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
    """What ``--trainers MIN:MAX`` says, and any other form of it.

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
