"""The settings of a parameter server, as one frozen dataclass, and the form of an endpoint.

Flags and environment variables are read in ``__main__`` (and a trainer's role in
``trainer/environment``), nowhere else.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pserver.limits import (
    HELLO_SECONDS,
    MOST_OPEN,
    MOST_PROGRAM_MB,
    MOST_TRAINERS,
    Limits,
    machine_bytes,
)

HEARTBEAT_TIMEOUT_SECONDS = 20.0
START_TIMEOUT_SECONDS = 300.0
MOST_SECONDS = 1e6  # of any timeout: what every clock and every wait can count to
KEEP_FAILED_SECONDS = 600.0
PREFERRED_TRANSPORTS = ("shm", "tcp", "grpc")  # in this order; the registry has what they do
TRANSPORT_CHOICES = ("auto", *PREFERRED_TRANSPORTS)
CHECKSUM_CHOICES = ("auto", "on", "off")
MOST_CONNECTIONS = 64
STRAGGLER_FACTOR = 3.0
MOST_JOB_NAME = 100
PROTOCOL = 3  # of the wire; a peer with another one is refused
# settings that are paths of this host
LOCAL = ("data_dir", "program", "token_file", "keys", "record_log", "write_ahead_log")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of one parameter server.

    Example::

        config = ServerConfig(endpoint="127.0.0.1:0", transport="grpc")

    Attributes:
        endpoint: HOST:PORT of the control service; port 0 is any free one.
        data_port: port of the tensors over plain TCP; 0 is any free one.  The reply to Join tells
            it to trainers.
        connections: that each stream of tensors over TCP has, 1 to 64.  More than one pays where a
            link is faster than what one connection gets of it, and costs that many descriptors.
        checksum: of the frames over TCP and gRPC: "on", "off", or "auto": on, but under TLS, and
            for trainers of this host over TCP.  A changed bit is then noticed, and the request is
            sent again.  Shared memory has none, so with "on" it is not offered.
        transport: "auto" offers every transport, and each trainer's preference decides; any other
            name is the only transport offered.
        data_dir: the directory for the files of Save and Load, and for rows on disk, on this
            machine.  Without it and without a store both calls are refused.
        store: the URL of a prefix for the files of Save and Load, in place of ``data_dir``; or the
            whole path of a directory that trainers reach, too.
        heartbeat_timeout_seconds: seconds without a heartbeat after which a trainer is declared
            lost.  A larger number tolerates longer pauses of a whole process (a suspended virtual
            machine), and the others wait that much longer for a trainer that is dead.
        start_timeout_seconds: how long after the first trainer the last one may join.
        min_trainers: the number of trainers with which a job begins; others join later, and the job
            is over when no live trainer is left. 0: all of its plan.
        once: the server ends when its first job has ended, with exit status 0, or 1 if it failed.
        keep_failed_seconds: how long the values of a failed job are kept from jobs with another
            fingerprint; None: 600, or with ``once`` 0.  With ``once`` and a number above 0 the
            process keeps running for so long after a failure.
        program: a file that ``Program.save`` wrote: the server installs it when it starts and does
            not wait for trainer 0.
        threads: torch's threads for updates; 0 leaves torch's own choice.
        max_trainers: that a job may have.  Each wait for all of them looks at each.
        max_connections: that may be open on each port.  Each of a tensor stream has a thread or
            two.
        max_memory: GB for the parameters, optimizer states and rows of a job here; 0: what
            this machine has.
        max_program: MB of a program's message; the one of Join has a 16th.  A message takes up to
            forty times its size when it is read.
        hello_timeout_seconds: how long a peer may take to identify itself, on any port.  A larger
            number lets strangers keep connections for longer.
        token_file: the operator's token file of the job: every caller proves that it has its key,
            or a trainer's.  None: open to everyone who reaches it.
        keys: the folder with the server's key, of ``pserver keys``: every port but shared memory
            speaks TLS, with a certificate of both ends.
        insecure: the endpoint may be beyond loopback without keys.
        metrics: PORT, on the endpoint's host, or HOST:PORT, where Prometheus reads metrics; port 0
            is any free one.  None: nowhere.
        job: names the job in metrics; "": the first digits of its plan's fingerprint do.
        record_log: the directory where the server keeps all that it applies, for
            ``pserver replay``; None: nowhere.
        straggler_factor: a trainer whose own part of a step takes more than so many times the
            median of the others' is named as slow; 0: none is.
        await_servers: a job of an async mode waits for a server that is lost, up to the start-up
            timeout: the launcher starts another one in its place, with ``reload``.
        reload: the directory, or URL, of a lost server's save: this server takes its place in the
            running job.
        write_ahead_log: the file to which server 0 writes its own state of a job that waits for
            lost servers, and which a replacement reads.  None: server 0 does not come back.

    Raises:
        ValueError: a setting is out of its range, or has no effect.
    """

    endpoint: str = "127.0.0.1:0"
    data_port: int = 0
    connections: int = 1
    checksum: str = "auto"
    transport: str = "auto"
    data_dir: str | None = None
    store: str | None = None
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    min_trainers: int = 0
    once: bool = False
    keep_failed_seconds: float | None = None
    program: str | None = None
    threads: int = 0
    max_trainers: int = MOST_TRAINERS
    max_connections: int = MOST_OPEN
    max_memory: float = 0.0
    max_program: int = MOST_PROGRAM_MB
    hello_timeout_seconds: float = HELLO_SECONDS
    keys: str | None = None
    insecure: bool = False
    token_file: str | None = None
    metrics: str | None = None
    job: str = ""
    straggler_factor: float = STRAGGLER_FACTOR
    record_log: str | None = None
    await_servers: bool = False
    reload: str | None = None
    write_ahead_log: str | None = None

    def __post_init__(self) -> None:
        try:
            split_endpoint(self.endpoint)
        except ValueError as error:
            raise ValueError(f"endpoint: {error}") from None
        if not 0 <= self.data_port <= 65535:
            raise ValueError(f"data_port: expected 0 to 65535, got {self.data_port}")
        if self.transport not in TRANSPORT_CHOICES:
            raise ValueError(
                f"transport: expected one of {', '.join(TRANSPORT_CHOICES)}, got {self.transport!r}"
            )
        for name in (
            "heartbeat_timeout_seconds",
            "start_timeout_seconds",
            "hello_timeout_seconds",
        ):
            check_seconds(name, getattr(self, name))
        if self.keep_failed_seconds is not None and not self.keep_failed_seconds >= 0:
            raise ValueError(
                "keep_failed_seconds: expected a number of seconds of 0 or more, got "
                f"{self.keep_failed_seconds}"
            )
        self._check_tcp()
        self._check_limits()
        if not isinstance(self.once, bool):
            raise TypeError(f"once: expected True or False, got {self.once!r}")
        for name in LOCAL:
            if getattr(self, name) is not None:
                refuse_url(name, getattr(self, name))
        if self.store is not None:
            check_store("store", self.store)
        if self.min_trainers < 0:
            raise ValueError(f"min_trainers: expected 0 or more, got {self.min_trainers}")
        if self.threads < 0:
            raise ValueError(f"threads: expected 0 or more, got {self.threads}")
        for name in ("insecure", "await_servers"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.reload is not None and self.program is not None:
            raise ValueError("reload: expected this or a program to start with, got both")
        if self.write_ahead_log is not None and not self.await_servers:
            raise ValueError("write_ahead_log: it has no effect without await_servers")
        check_protected("endpoint", [self.endpoint], self.keys, self.insecure)
        if self.metrics is not None:
            host, _ = split_endpoint(self.endpoint)
            metrics_place("metrics", self.metrics, host, self.keys, self.insecure)
        check_job_name("job", self.job)
        check_factor("straggler_factor", self.straggler_factor)

    def _check_tcp(self) -> None:
        """The settings of tensors over TCP."""
        whole = isinstance(self.connections, int) and not isinstance(self.connections, bool)
        if not whole or not 1 <= self.connections <= MOST_CONNECTIONS:
            raise ValueError(
                f"connections: expected 1 to {MOST_CONNECTIONS}, got {self.connections!r}"
            )
        if self.checksum not in CHECKSUM_CHOICES:
            raise ValueError(
                f"checksum: expected one of {', '.join(CHECKSUM_CHOICES)}, got {self.checksum!r}"
            )
        if self.transport in ("auto", "tcp"):
            return
        of_tcp = (("data_port", 0), ("connections", 1))
        for name, unless in of_tcp if self.transport == "grpc" else (*of_tcp, ("checksum", "auto")):
            if (value := getattr(self, name)) != unless:
                raise ValueError(f"{name}: {value} has no effect with transport {self.transport!r}")

    def _check_limits(self) -> None:
        for name, most in (
            ("max_trainers", 65536),
            ("max_connections", 65536),
            ("max_program", MOST_PROGRAM_MB),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value <= most:
                raise ValueError(f"{name}: expected 1 to {most}, got {value!r}")
        if not 0 <= self.max_memory < math.inf:
            raise ValueError(f"max_memory: expected GB of 0 or more, got {self.max_memory!r}")

    @property
    def limits(self) -> Limits:
        """The limits on what the server takes from its peers."""
        return Limits(
            trainers=self.max_trainers,
            connections=self.max_connections,
            hello_seconds=self.hello_timeout_seconds,
            memory_bytes=int(self.max_memory * 1e9) or machine_bytes(),
            program_bytes=self.max_program * 2**20,
            manifest_bytes=self.max_program * 2**16,
        )

    @property
    def kept_failed_seconds(self) -> float:
        """The seconds that apply, where ``keep_failed_seconds`` may be None."""
        if self.keep_failed_seconds is None:
            return 0.0 if self.once else KEEP_FAILED_SECONDS
        return self.keep_failed_seconds


def check_seconds(name: str, value: Any, zero: bool = False) -> float:
    """Checks a timeout.

    Args:
        name: what the user has written it with: a flag, a variable, a field.
        value: a number, or a text that holds one.
        zero: it may be 0.

    Raises:
        ValueError: it is no number, not above 0, or no finite one.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not (0 < seconds <= MOST_SECONDS or (zero and seconds == 0)):
        least = "from 0 on" if zero else "above 0"
        raise ValueError(
            f"{name}: expected a number of seconds {least} and up to {MOST_SECONDS:.0f}, got "
            f"{value!r}"
        )
    return seconds


def check_factor(name: str, value: Any) -> float:
    """Checks a straggler factor: how many times as long as others a trainer may compute.

    Args:
        name: what the user has written it with: a flag, a variable, a field.
        value: a number, or a text that holds one.

    Raises:
        ValueError: it is neither 0 nor above 1.
    """
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if isinstance(value, bool) or not (factor == 0 or 1 < factor < math.inf):
        raise ValueError(f"{name}: expected a number above 1, or 0 for none, got {value!r}")
    return factor


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``"HOST:PORT"`` as (host, port).

    Raises:
        ValueError: it is not HOST:PORT with a port of 0 to 65535.
    """
    host, separator, port = endpoint.strip().rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"expected an endpoint HOST:PORT with a port of 0 to 65535, got {endpoint!r}"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address; of names only "localhost" counts as one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_protected(name: str, endpoints: Iterable[str], keys: str | None, insecure: bool) -> bool:
    """Whether a process may use these endpoints: on this host always, beyond it with keys, or where
    the user has declared that no one else reaches the network.

    Returns:
        Whether it is only the last that allows it.

    Raises:
        ValueError: none of them holds; or keys and ``insecure`` are both given.
    """
    if keys and insecure:
        raise ValueError("insecure: expected this or keys, got both")
    beyond = [each for each in endpoints if not is_loopback(split_endpoint(each)[0])]
    if beyond and not (keys or insecure):
        raise ValueError(
            f"{name}: {beyond[0]} is beyond this host: expected keys (--keys DIR or PSERVER_KEYS; "
            "`pserver keys init` makes them), or --insecure (PSERVER_INSECURE=1) where nobody else "
            "reaches the network"
        )
    return bool(beyond) and insecure


def metrics_place(
    name: str, text: str, host: str, keys: str | None, insecure: bool
) -> tuple[str, int]:
    """The host and port at which a process serves its metrics.

    Args:
        name: what the user has written it with.
        text: "PORT" or "HOST:PORT".
        host: for a port alone.

    Raises:
        ValueError: it is neither, or is beyond this host without protection.
    """
    endpoint = text if ":" in text else f"{host}:{text}"
    try:
        found = split_endpoint(endpoint)
    except ValueError:
        raise ValueError(
            f"{name}: expected PORT or HOST:PORT, with a port of 0 to 65535, got {text!r}"
        ) from None
    check_protected(name, [endpoint], keys, insecure)
    return found


def check_job_name(name: str, job: str) -> None:
    """Returns if a text may name a job.

    Raises:
        ValueError: it is too long, or has characters that do not print.
    """
    if len(job) > MOST_JOB_NAME or not job.isprintable():
        raise ValueError(
            f"{name}: expected up to {MOST_JOB_NAME} characters that print, got {job!r}"
        )


def check_store(name: str, url: str) -> None:
    """Returns if a URL is one of a store's prefix, or a whole path: of a directory that others
    reach, too.

    Raises:
        ValueError: it is another path, a chain of several URLs, or leads out of itself.
    """
    if url.startswith("/") and ".." not in url.split("/"):
        return
    shown = re.sub(r"://[^/@\s]*@", "://***@", url)
    if "::" in url:
        raise ValueError(f"{name}: expected one URL, got the chain {shown!r}")
    if not re.match(r"[A-Za-z][A-Za-z0-9+.\-]+://[^/]", url) or ".." in url.split("/"):
        raise ValueError(
            f"{name}: expected a URL like s3://bucket/jobs, or a whole path, got {shown!r}"
        )
    if re.match(r"(file|local)://", url):
        raise ValueError(f"{name}: expected a URL of a store, got {shown!r}: use --data-dir")


def refuse_url(name: str, path: str) -> None:
    """Returns if a path is a local one.

    ``transpiler.files.files`` says the same; importing it brings torch, and ``pserver --help``
    answers at once.

    Raises:
        ValueError: it is a URL.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.\-]+:/", path):
        shown = re.sub(r"://[^/@\s]*@", "://***@", path)
        raise ValueError(f"{name}: expected a path on this machine, got the URL {shown!r}")
