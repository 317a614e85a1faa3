"""The settings of a process from its environment: role, rank, connection."""

from __future__ import annotations

import enum
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pserver import config
from pserver.security.access import OPEN, Access
from transpiler.files import bounded_json

# ---- values ----
#
# Values of environment variables.


def number_of(environ: Mapping[str, str], name: str, default: str = "") -> int:
    """A variable's whole number; the default's where it is not set.

    Raises:
        ValueError: the text is no whole number.
    """
    text = environ.get(name, "") or default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected a whole number, got {text!r}") from None


def seconds_of(environ: Mapping[str, str], name: str, default: float, zero: bool = False) -> float:
    """A variable's number of seconds.

    Args:
        zero: whether it may be 0.

    Raises:
        ValueError: the text is no number, or out of range.
    """
    text = environ.get(name, "")
    return config.check_seconds(name, text, zero) if text else default


# ---- other libraries' variables ----


def variable(name: str) -> str | None:
    """A variable of this process's environment; None where it is not set."""
    return os.environ.get(name)


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable of this process's environment; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


# ---- connection ----
#
# The settings of a trainer's connections, from the variables of its environment.


log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings of a trainer's connections to servers and to other trainers.

    Attributes:
        heartbeat_timeout_seconds: without a heartbeat, after which a trainer is declared dead, and
            a server until it announces its own timeout on joining.
        start_timeout_seconds: until servers must be up and installed, and all trainers at their
            rendezvous.
        transport: "auto", or the one transport to use.
        plan_only: print the plan and exit, instead of joining servers; ``pserver plan`` sets it.
        probe: the file for the results of ``pserver plan``: with ``plan_only`` the loads of the
            plan, otherwise the costs of some steps, after which the process ends; "": none.
        probe_seconds: of such steps.
        probe_trainers: that the servers of a probe wait for.
        probe_end: on the system's monotonic clock, the time by which the file must exist; 0: any
            time.
        token_file: the file with this process's key; "": it has none.
        keys: the folder of this host's keys, for TLS to the servers; "": without.
        insecure: servers may be beyond this host without keys.
        insecure_collective: trainers may be on several hosts, although their traffic is not
            encrypted.
        metrics: PORT, on loopback, or HOST:PORT of this trainer's metrics; "": none.
        job: the job's name in metrics; "": the first digits of its plan's fingerprint.
        log_json: log lines are JSON.
        trace: the file, or its URL, of a trace of some steps; "": none.
        trace_steps: of that trace.
        tensorboard: the folder for TensorBoard's files; "": none.
        panel: ``launch`` shows the job's progress, so that no trainer has to.
        checkpoint: the folder, or its URL, of automatic checkpoints, from which the job also
            resumes; "": none.
        checkpoint_every_seconds: between two such checkpoints.
        checkpoint_keep: the number of them that are kept.
        grace_seconds: after SIGTERM, until this trainer must have ended its step and left; 0: it
            ends at once, and the job with it.
        finished: the file that a trainer without servers makes when it has finished its job, so
            that ``launch`` need not take its end for the job's; "": none.
    """

    heartbeat_timeout_seconds: float = config.HEARTBEAT_TIMEOUT_SECONDS
    start_timeout_seconds: float = config.START_TIMEOUT_SECONDS
    transport: str = "auto"
    plan_only: bool = False
    probe: str = ""
    probe_seconds: float = 6.0
    probe_trainers: int = 1
    probe_end: float = 0.0
    token_file: str = ""
    keys: str = ""
    insecure: bool = False
    insecure_collective: bool = False
    metrics: str = ""
    job: str = ""
    log_json: bool = False
    trace: str = ""
    trace_steps: int = 3
    tensorboard: str = ""
    panel: bool = False
    checkpoint: str = ""
    checkpoint_every_seconds: float = 600.0
    checkpoint_keep: int = 3
    grace_seconds: float = 0.0
    finished: str = ""

    def __post_init__(self) -> None:
        if self.transport not in config.TRANSPORT_CHOICES:
            raise ValueError(
                f"PSERVER_TRANSPORT: expected one of {', '.join(config.TRANSPORT_CHOICES)}, "
                f"got {self.transport!r}"
            )
        if self.metrics:
            config.metrics_place(
                "PSERVER_METRICS", self.metrics, LOOPBACK, self.keys, self.insecure
            )
        config.check_job_name("PSERVER_JOB", self.job)
        if self.trace_steps < 1:
            raise ValueError(f"PSERVER_TRACE_STEPS: expected 1 or more, got {self.trace_steps}")
        config.refuse_url("PSERVER_TENSORBOARD", self.tensorboard)
        if self.checkpoint_keep < 1:
            raise ValueError(
                f"PSERVER_CHECKPOINT_KEEP: expected 1 or more, got {self.checkpoint_keep}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Connection:
        """Reads the variables whose names begin with PSERVER_, each optional.

        Raises:
            ValueError: one of them has a wrong value; the message names it.
        """
        environ = os.environ if environ is None else environ
        return cls(
            seconds_of(environ, "PSERVER_HEARTBEAT_TIMEOUT", config.HEARTBEAT_TIMEOUT_SECONDS),
            seconds_of(environ, "PSERVER_START_TIMEOUT", config.START_TIMEOUT_SECONDS),
            environ.get("PSERVER_TRANSPORT", "auto"),
            environ.get("PSERVER_PLAN_ONLY", "") == "1",
            environ.get("PSERVER_PROBE", ""),
            seconds_of(environ, "PSERVER_PROBE_SECONDS", 6.0),
            number_of(environ, "PSERVER_PROBE_TRAINERS", "1"),
            seconds_of(environ, "PSERVER_PROBE_END", 0.0),
            environ.get("PSERVER_TOKEN_FILE", ""),
            environ.get("PSERVER_KEYS", ""),
            environ.get("PSERVER_INSECURE", "") == "1",
            environ.get("PSERVER_INSECURE_COLLECTIVE", "") == "1",
            environ.get("PSERVER_METRICS", ""),
            environ.get("PSERVER_JOB", ""),
            environ.get("PSERVER_LOG_JSON", "") == "1",
            environ.get("PSERVER_TRACE", ""),
            number_of(environ, "PSERVER_TRACE_STEPS", "3"),
            environ.get("PSERVER_TENSORBOARD", ""),
            environ.get("PSERVER_PANEL", "") == "1",
            environ.get("PSERVER_CHECKPOINT", ""),
            seconds_of(environ, "PSERVER_CHECKPOINT_EVERY", 600.0),
            number_of(environ, "PSERVER_CHECKPOINT_KEEP", "3"),
            seconds_of(environ, "PSERVER_GRACE", 0.0, zero=True),
            environ.get("PSERVER_FINISHED", ""),
        )

    @classmethod
    def set_environment(cls, texts: Mapping[str, str]) -> None:
        """Sets variables of this process's environment, for later connections.

        Raises:
            ValueError: one is wrong; none is set.
        """
        cls.from_environment({**os.environ, **texts})
        os.environ.update(texts)

    def check_no_grace(self, why: str) -> None:
        """Checks that there is no grace period.

        Args:
            why: the reason why a trainer cannot leave this job before its end, as the end of a
                sentence.

        Raises:
            ValueError: there is one.
        """
        if self.grace_seconds:
            raise ValueError(f"PSERVER_GRACE: expected 0 {why}, got {self.grace_seconds:g}")

    def check_collective(self, host: str) -> None:
        """Checks that trainers may meet at this host.

        Raises:
            ValueError: it is beyond loopback, and the user has not declared the network as
                private.
        """
        if not (self.insecure_collective or config.is_loopback(host)):
            raise ValueError(
                f"the trainers meet at {host}, beyond this host, and their traffic is not "
                "encrypted: on a network without other users (a private one, a VPN) set "
                "PSERVER_INSECURE_COLLECTIVE=1 for every trainer, or `launch --insecure-collective`"
            )

    def server_config(self, endpoint: str) -> config.ServerConfig:
        """The settings of a server in a script whose role is PSERVER: for one job.

        Args:
            endpoint: HOST:PORT, this server's own.

        Raises:
            ValueError: a setting is wrong.
        """
        return config.ServerConfig(
            endpoint=endpoint,
            transport=self.transport,
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
            start_timeout_seconds=self.start_timeout_seconds,
            once=True,
            token_file=self.token_file or None,
            keys=self.keys or None,
            insecure=self.insecure,
            metrics=self.metrics or None,
            job=self.job,
        )

    def access_to(self, endpoints: Sequence[str]) -> Access:
        """The trainer's credentials for servers, and its checks of them.

        Args:
            endpoints: HOST:PORT of each server.

        Raises:
            ValueError: the token file or the keys cannot be read; or a server is beyond this host,
                and there are neither keys nor PSERVER_INSECURE.
        """
        if self.plan_only:
            return OPEN  # connects to no server: the endpoints are made up
        if config.check_protected("PSERVER_ENDPOINTS", endpoints, self.keys, self.insecure):
            _warn_of_clear_text(tuple(endpoints))
        return Access.of(self.token_file, self.keys, "trainer")


@cache
def _warn_of_clear_text(endpoints: tuple[str, ...]) -> None:
    """Warns, once."""
    log.warning(
        "PSERVER_INSECURE: the traffic with %s is not encrypted: anyone on the network can change "
        "models",
        ", ".join(endpoints),
    )


# ---- world ----
#
# The rank of a process among trainers without servers, by torchrun's variables.


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """A process's rank among the trainers of a collective job: torchrun's variables.

    Attributes:
        rank, size: this trainer's rank, and the number of trainers.
        local_rank: its rank on its host, which picks its GPU.
        address, port: of the store of the trainers' rendezvous; "" in a world of one that no other
            process knows of.
        served: torchrun's agent, or ``spawn``, serves the store; otherwise rank 0 does.
        attempt: the number of restarts by torchrun.
        all_here: every trainer is on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    served: bool = False
    attempt: int = 0
    all_here: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"WORLD_SIZE: expected 1 or more, got {self.size}")
        for name, number in (("RANK", self.rank), ("LOCAL_RANK", self.local_rank)):
            if not 0 <= number < self.size:
                raise ValueError(f"{name}: expected 0 to {self.size - 1}, got {number}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"MASTER_PORT: expected 0 to 65535, got {self.port}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: a world of one without
        them, otherwise all five.

        Raises:
            ValueError: one of them is missing, or has a wrong value; the message names it.
        """
        environ = os.environ if environ is None else environ
        if not is_collective(environ):
            return cls()
        missing = [name for name in TORCHRUN if not environ.get(name)]
        if missing:
            given = ", ".join(name for name in TORCHRUN if name not in missing)
            raise ValueError(
                f"{', '.join(missing)}: not set, and a trainer of a collective job ({given} set) "
                f"needs {'it' if len(missing) == 1 else 'them'}; to train alone, unset {given}"
            )
        rank, size, local_rank, port = (
            number_of(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = number_of(environ, "TORCHELASTIC_RESTART_COUNT", "0")
        all_here = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        return cls(rank, size, local_rank, environ["MASTER_ADDR"], port, served, attempt, all_here)

    def enter(self) -> None:
        """Makes this process that trainer: sets the variables of its environment."""
        if self.address == "127.0.0.1" and sys.platform == "linux":
            # the host's own name need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(
            {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(self.local_rank),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(self.served),
                "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            }
        )


def is_collective(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment makes this process one of torchrun's: some of its variables are set.
    All must be: see :meth:`World.from_environment`.
    """
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in TORCHRUN)


# ---- other launchers ----
#
# The number of processes by other launchers' variables, where this one trains alone.
#
# Nothing here reads such a variable for a process's rank in a job: another launcher knows nothing
# of servers, and a rank too many would go unnoticed.  But where it has started several processes,
# and this process is about to train alone, then each of them does, and every one trains a model of
# its own: a warning says so.


# by launcher: the variables that have a number of processes; the first that is set counts
NUMBERS_OF_LAUNCHERS = {
    "Paddle's": ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINERS"),
    "Open MPI's": ("OMPI_COMM_WORLD_SIZE",),
    "MPICH's": ("PMI_SIZE",),
    "MVAPICH's": ("MV2_COMM_WORLD_SIZE",),
    "Horovod's": ("HOROVOD_SIZE",),
    # of a step, which may be smaller than the allocation that it is in
    "Slurm's": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "LSF's": ("JSM_NAMESPACE_SIZE",),
    "MXNet's": ("DMLC_NUM_WORKER",),
}
WORLD = ("WORLD_SIZE",)  # where a script gives its role itself, or a plain program runs
PADDLE_ENDPOINTS = ("PADDLE_TRAINER_ENDPOINTS",)  # comma-separated
TF_CLUSTER = ("TF_CONFIG",)  # TensorFlow's, as JSON
HOW_TO_START = (
    "start them by `pserver launch` or torchrun, or set the variables of docs/environment.md"
)

_other_launchers_told = False  # since the last job has ended


def several_processes(environ: Mapping[str, str]) -> Iterator[str]:
    """The variables that announce several processes, each as NAME=VALUE.

    Beside a job's own role only torchrun's counts: the launcher of ``pserver launch``, once a host,
    may have another number.
    """
    own = bool(environ.get("TRAINING_ROLE"))
    for names in (WORLD,) if own else (*NUMBERS_OF_LAUNCHERS.values(), WORLD):
        name = next((each for each in names if environ.get(each)), "")
        if _number_of(environ.get(name, "")) > 1:
            yield f"{name}={environ[name]}"
    for name in () if own else PADDLE_ENDPOINTS:
        if len(environ.get(name, "").split(",")) > 1:
            yield f"{name}={environ[name]}"
    for name in () if own else TF_CLUSTER:
        if (workers := _tf_workers(environ.get(name, ""))) > 1:
            yield f"{name} with {workers} workers"


def _number_of(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0


def _tf_workers(text: str) -> int:
    """The workers of a TF_CONFIG; 0 where it is none."""
    try:
        cluster = bounded_json.loads(text)["cluster"]
        return sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def is_ours(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment has this process's role: by the variables of a job with servers, or
    torchrun's.
    """
    environ = os.environ if environ is None else environ
    return bool(environ.get("TRAINING_ROLE")) or is_collective(environ)


def said_of_other_launchers(way_out: str = HOW_TO_START) -> str:
    """The end of a sentence about training alone, where another launcher has started several
    processes; otherwise "".
    """
    found = ", ".join(several_processes(os.environ))
    return f", although there are several by {found}: {way_out}" if found else ""


def warn_of_other_launchers(what: str, way_out: str = HOW_TO_START) -> None:
    """Warns that this process trains alone, once for each job, where another launcher has started
    several.

    Args:
        what: the beginning of the sentence: what trains alone.
        way_out: the advice to make them train together.
    """
    global _other_launchers_told
    several_said = "" if _other_launchers_told else said_of_other_launchers(way_out)
    if several_said:
        _other_launchers_told = True
        log.warning("%s: training alone, in this process only%s", what, several_said)


def other_launchers_told() -> None:
    """Suppresses the warning: another message has it."""
    global _other_launchers_told
    _other_launchers_told = True


def forget_other_launchers() -> None:
    """Makes the next job warn anew, after one has ended."""
    global _other_launchers_told
    _other_launchers_told = False


# ---- role ----
#
# The role of this process in its job, from the environment or from the script.


class Role(enum.Enum):
    """The role of a process in a job."""

    TRAINER = "TRAINER"
    PSERVER = "PSERVER"
    SINGLE = "SINGLE"  # trains alone: no cluster variables are set
    # a trainer among trainers, without servers: torchrun's variables are set
    COLLECTIVE = "COLLECTIVE"

    WORKER = TRAINER  # the documentation's other names
    SERVER = PSERVER


@dataclass(frozen=True, slots=True)
class RoleMaker:
    """A process's role and number in its job.

    Attributes:
        server_endpoints: HOST:PORT of each server's control endpoint, by server index.
        current_endpoint: this server's own; "" on a trainer.
    """

    role: Role
    trainer_id: int = 0
    trainers: int = 1
    server_endpoints: tuple[str, ...] = ()
    current_endpoint: str = ""

    def __post_init__(self) -> None:
        if self.role in (Role.SINGLE, Role.COLLECTIVE):
            return
        if not self.server_endpoints:
            raise ValueError("PSERVER_ENDPOINTS: expected at least one HOST:PORT, got none")
        for endpoint in self.server_endpoints:
            try:
                config.split_endpoint(endpoint)
            except ValueError as error:
                raise ValueError(f"PSERVER_ENDPOINTS: {error}") from None
        if len(set(self.server_endpoints)) < len(self.server_endpoints):
            raise ValueError(
                "PSERVER_ENDPOINTS: expected each endpoint once, got "
                f"{','.join(self.server_endpoints)}"
            )
        if self.trainers < 1:
            raise ValueError(f"TRAINERS: expected 1 or more, got {self.trainers}")
        if self.role is Role.TRAINER and not 0 <= self.trainer_id < self.trainers:
            raise ValueError(
                f"TRAINER_ID: expected 0 to {self.trainers - 1}, got {self.trainer_id}"
            )
        if self.role is Role.PSERVER and self.current_endpoint not in self.server_endpoints:
            known = ", ".join(self.server_endpoints)
            raise ValueError(
                f"CURRENT_ENDPOINT: expected one of PSERVER_ENDPOINTS ({known}), got "
                f"{self.current_endpoint!r}"
            )

    @property
    def server_index(self) -> int:
        """This server's place in the list of endpoints."""
        return self.server_endpoints.index(self.current_endpoint)


class CloudRoleMaker:
    """The role that the environment describes, as a :class:`RoleMaker`.  docs/environment.md has
    the variables.

    Without the variables of a job with servers and without torchrun's the process trains alone;
    with torchrun's and without servers it is a trainer of a collective job.

    Raises:
        ValueError: some variables of a job are set and others are missing, or one has a wrong
            value; the message names it.
    """

    def __new__(cls, environ: Mapping[str, str] | None = None) -> RoleMaker:  # type: ignore[misc]  # reads as a class in scripts
        return from_environment(os.environ if environ is None else environ)


class UserDefinedRoleMaker:
    """A role that the script itself decides, as a :class:`RoleMaker`.

    Example::

        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=2, server_endpoints=["127.0.0.1:6174"]))

    Args:
        current_id: of the trainer, or the server's place in ``server_endpoints``.
        role: ``Role.TRAINER`` (also ``Role.WORKER``) or ``Role.PSERVER`` (also ``Role.SERVER``).
        worker_num: trainers of the job.
        server_endpoints: HOST:PORT of each server.

    Raises:
        TypeError: an argument has another type.
        ValueError: a number is out of range, an endpoint is not HOST:PORT.
    """

    def __new__(  # type: ignore[misc]  # reads as a class in scripts
        cls,
        current_id: int = 0,
        role: Role = Role.TRAINER,
        worker_num: int = 1,
        server_endpoints: Sequence[str] = (),
    ) -> RoleMaker:
        if role not in (Role.TRAINER, Role.PSERVER):
            raise TypeError(f"role: expected Role.TRAINER or Role.PSERVER, got {role!r}")
        for name, number in (("current_id", current_id), ("worker_num", worker_num)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name}: expected a whole number, got {number!r}")
        if isinstance(server_endpoints, str) or not all(
            isinstance(endpoint, str) for endpoint in server_endpoints
        ):
            raise TypeError(
                f"server_endpoints: expected a list of HOST:PORT, got {server_endpoints!r}"
            )
        endpoints = tuple(server_endpoints)
        if role is Role.PSERVER:
            if not 0 <= current_id < len(endpoints):
                raise ValueError(
                    f"current_id: expected 0 to {len(endpoints) - 1} for a server, got {current_id}"
                )
            return RoleMaker(
                role,
                trainers=worker_num,
                server_endpoints=endpoints,
                current_endpoint=endpoints[current_id],
            )
        return RoleMaker(
            role, trainer_id=current_id, trainers=worker_num, server_endpoints=endpoints
        )


# by the word of TRAINING_ROLE
_ROLES = {name: Role[name] for name in ("TRAINER", "WORKER", "PSERVER", "SERVER")}
_OF_A_JOB = ("PSERVER_ENDPOINTS", "TRAINERS", "TRAINER_ID", "CURRENT_ENDPOINT")


def from_environment(environ: Mapping[str, str]) -> RoleMaker:
    """See :class:`CloudRoleMaker`."""
    word = environ.get("TRAINING_ROLE")
    if word not in (None, *_ROLES):
        raise ValueError(
            f"TRAINING_ROLE: expected TRAINER (also WORKER) or PSERVER (also SERVER), got {word!r}"
        )
    role = _ROLES.get(word or "")
    without_servers = role is None or (
        role is Role.TRAINER and not environ.get("PSERVER_ENDPOINTS")
    )
    if without_servers and is_collective(environ):
        world = World.from_environment(environ)
        return RoleMaker(Role.COLLECTIVE, trainer_id=world.rank, trainers=world.size)
    if role is None:
        stray = [name for name in _OF_A_JOB if environ.get(name)]
        if stray:
            raise ValueError(
                f"TRAINING_ROLE is not set, but {', '.join(stray)}: a process of a job with "
                "servers needs it, and one that trains alone has none of them"
            )
        return RoleMaker(Role.SINGLE)
    here = _required(environ, "CURRENT_ENDPOINT").strip() if role is Role.PSERVER else ""
    return RoleMaker(
        role=role,
        trainer_id=_integer(environ, "TRAINER_ID") if role is Role.TRAINER else 0,
        trainers=_integer(environ, "TRAINERS"),
        server_endpoints=tuple(
            part.strip()
            for part in _required(environ, "PSERVER_ENDPOINTS").split(",")
            if part.strip()
        ),
        current_endpoint=here,
    )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ValueError(
            f"{name} is not set: a process with TRAINING_ROLE={environ['TRAINING_ROLE']} needs it"
        )
    return value


def _integer(environ: Mapping[str, str], name: str) -> int:
    _required(environ, name)
    return number_of(environ, name)


# ---- variables ----
#
# Every environment variable that the system reads: the tables of docs/environment.md.
#
# A test compares them with the names in the sources.


USUAL = Connection()
REQUIRED, OPTIONAL, NOT_READ = "required", "optional", ""


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One variable, or some that go together.

    Attributes:
        names: of them.
        trainer: whether a trainer of a job needs it, or reads it.
        server: whether a server does.
        meaning: its meaning, and the default.
    """

    names: tuple[str, ...]
    trainer: str
    server: str
    meaning: str


WITH_SERVERS = (
    EnvironmentVariable(
        ("TRAINING_ROLE",),
        REQUIRED,
        REQUIRED,
        "`TRAINER` (also `WORKER`) or `PSERVER` (also `SERVER`); without it and the four below a "
        "process trains alone, and says so",
    ),
    EnvironmentVariable(
        ("PSERVER_ENDPOINTS",),
        REQUIRED,
        REQUIRED,
        "HOST:PORT of every server, comma-separated, the same in all processes",
    ),
    EnvironmentVariable(("TRAINERS",), REQUIRED, REQUIRED, "their number"),
    EnvironmentVariable(("TRAINER_ID",), REQUIRED, NOT_READ, "0 to TRAINERS - 1"),
    EnvironmentVariable(("CURRENT_ENDPOINT",), NOT_READ, REQUIRED, "this server's own"),
    EnvironmentVariable(
        ("PSERVER_TRANSPORT",),
        OPTIONAL,
        OPTIONAL,
        f"one of {', '.join(f'`{each}`' for each in config.TRANSPORT_CHOICES)}; "
        f"`{USUAL.transport}` unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_HEARTBEAT_TIMEOUT",),
        OPTIONAL,
        OPTIONAL,
        "seconds without a heartbeat after which a process is declared dead; "
        f"{config.HEARTBEAT_TIMEOUT_SECONDS:g} unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_START_TIMEOUT",),
        OPTIONAL,
        OPTIONAL,
        f"seconds to wait for the others to come up; {config.START_TIMEOUT_SECONDS:g} unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_TOKEN_FILE",),
        OPTIONAL,
        OPTIONAL,
        "the file with the job's key, a trainer's or an operator's; also for `pserver status`, "
        "`save` and `reset`",
    ),
    EnvironmentVariable(
        ("PSERVER_KEYS",),
        OPTIONAL,
        OPTIONAL,
        "the folder of this host's keys: TLS on every port; needed where an endpoint is beyond "
        "loopback; also for `launch`, `status`, `web`, `save` and `reset`",
    ),
    EnvironmentVariable(
        ("PSERVER_INSECURE",),
        OPTIONAL,
        OPTIONAL,
        "`1`: endpoints beyond loopback without keys, on a network that nobody else reaches",
    ),
    EnvironmentVariable(
        ("PSERVER_INSECURE_COLLECTIVE",),
        OPTIONAL,
        NOT_READ,
        "`1`: trainers of several hosts may exchange tensors among themselves (rendezvous, gloo, "
        "NCCL), which is not encrypted; also in jobs without servers",
    ),
    EnvironmentVariable(
        ("PSERVER_METRICS",),
        OPTIONAL,
        OPTIONAL,
        "where Prometheus reads metrics: PORT (on 127.0.0.1, or a server's own host) or HOST:PORT; "
        "`launch --metrics` gives each process its own",
    ),
    EnvironmentVariable(
        ("PSERVER_JOB",),
        OPTIONAL,
        OPTIONAL,
        "names the job in metrics; unless set the first digits of its plan's fingerprint do",
    ),
    EnvironmentVariable(
        ("PSERVER_LOG_JSON",),
        OPTIONAL,
        OPTIONAL,
        "`1`: log lines as JSON; `launch --log-json` sets it",
    ),
    EnvironmentVariable(
        ("PSERVER_TRACE",),
        OPTIONAL,
        NOT_READ,
        "the file, or its URL, of a trace of some steps; the same on every trainer; "
        "`launch --trace` sets it",
    ),
    EnvironmentVariable(
        ("PSERVER_TRACE_STEPS",),
        OPTIONAL,
        NOT_READ,
        f"the number of steps; {USUAL.trace_steps} unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_CHECKPOINT",),
        OPTIONAL,
        NOT_READ,
        "the folder, or its URL, of automatic checkpoints, from which the job also resumes; the "
        "same on every trainer; also in jobs without servers; `launch --checkpoint` sets it",
    ),
    EnvironmentVariable(
        ("PSERVER_CHECKPOINT_EVERY",),
        OPTIONAL,
        NOT_READ,
        f"seconds between two such checkpoints; {USUAL.checkpoint_every_seconds:g} unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_CHECKPOINT_KEEP",),
        OPTIONAL,
        NOT_READ,
        f"the number of them that are kept; {USUAL.checkpoint_keep} unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_TENSORBOARD",),
        OPTIONAL,
        NOT_READ,
        "the folder for TensorBoard's files; also in jobs without servers; "
        "`launch --tensorboard` sets it",
    ),
    EnvironmentVariable(
        ("PSERVER_STRAGGLER_FACTOR",),
        NOT_READ,
        OPTIONAL,
        "as `--straggler-factor` of `pserver serve`: from how many times the others' time on a "
        "trainer is named as slow; 3 unless set, 0: none",
    ),
    EnvironmentVariable(
        ("PSERVER_RECORD_LOG",),
        NOT_READ,
        OPTIONAL,
        "as `--record-log` of `pserver serve`: the directory where it keeps all that it applies, "
        "for `pserver replay`; nowhere unless set",
    ),
    EnvironmentVariable(
        ("PSERVER_GRACE",),
        OPTIONAL,
        NOT_READ,
        "seconds that a trainer may take, after SIGTERM, to end its step and leave the others, "
        "which continue; 0, none, unless set; `launch --grace` sets it",
    ),
    EnvironmentVariable(
        ("PSERVER_CONNECTIONS", "PSERVER_CHECKSUM"),
        NOT_READ,
        OPTIONAL,
        "as `--connections` and `--checksum` of `pserver serve`, which reads them, also under "
        "`launch`; a script whose role is PSERVER does not",
    ),
)
WITHOUT_SERVERS = (
    EnvironmentVariable(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        REQUIRED,
        NOT_READ,
        "torchrun's: where some are set and others are not, a process does not train alone, but "
        "raises and names those",
    ),
    EnvironmentVariable(
        ("LOCAL_WORLD_SIZE",),
        OPTIONAL,
        NOT_READ,
        "the number of trainers on this host; `launch` sets it, as torchrun does",
    ),
    EnvironmentVariable(
        ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
        OPTIONAL,
        NOT_READ,
        "torchrun's: whether its agent keeps the store, and how often it has started the job again",
    ),
    EnvironmentVariable(
        ("GLOO_SOCKET_IFNAME",),
        OPTIONAL,
        NOT_READ,
        "gloo's network interface; unless set `lo` where all trainers are on this host",
    ),
)
OTHER_LAUNCHERS = (
    *(
        EnvironmentVariable(names, OPTIONAL, NOT_READ, f"{whose} number of processes")
        for whose, names in NUMBERS_OF_LAUNCHERS.items()
    ),
    EnvironmentVariable(
        PADDLE_ENDPOINTS, OPTIONAL, NOT_READ, "Paddle's trainers, one endpoint for each"
    ),
    EnvironmentVariable(TF_CLUSTER, OPTIONAL, NOT_READ, "TensorFlow's cluster, as JSON"),
)
INTERNAL = (
    EnvironmentVariable(
        ("PSERVER_PLAN_ONLY",), OPTIONAL, NOT_READ, "`1`: `pserver plan` asks for the plan"
    ),
    EnvironmentVariable(
        (
            *("PSERVER_PROBE", "PSERVER_PROBE_SECONDS", "PSERVER_PROBE_TRAINERS"),
            "PSERVER_PROBE_END",
        ),
        OPTIONAL,
        NOT_READ,
        "`pserver plan` asks for some steps: the file for their costs, for how long, of how many "
        "trainers, until when",
    ),
    EnvironmentVariable(
        ("PSERVER_PANEL",),
        OPTIONAL,
        NOT_READ,
        "`1`: the panel of `pserver launch` shows the job's progress, so that no trainer has to",
    ),
    EnvironmentVariable(
        ("PSERVER_FINISHED",),
        OPTIONAL,
        NOT_READ,
        "the file that a trainer of a job without servers makes when it has finished, for "
        "`pserver launch`",
    ),
)
