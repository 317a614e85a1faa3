"""Every environment variable that the system reads: the tables of docs/environment.md.

A test holds them against the names that stand in the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from pserver import config
from trainer.environment import other_launchers
from trainer.environment.connection import Connection

USUAL = Connection()
REQUIRED, OPTIONAL, NOT_READ = "required", "optional", ""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, or some that go together.

    Attributes:
        names: of them.
        trainer: whether a trainer of a job needs it, or reads it.
        server: whether a server does.
        meaning: what it says, and what holds where it is not set.
    """

    names: tuple[str, ...]
    trainer: str
    server: str
    meaning: str


WITH_SERVERS = (
    Variable(
        ("TRAINING_ROLE",),
        REQUIRED,
        REQUIRED,
        "`TRAINER` (also `WORKER`) or `PSERVER` (also `SERVER`); without it and the four below a "
        "process trains alone, and says so",
    ),
    Variable(
        ("PSERVER_ENDPOINTS",),
        REQUIRED,
        REQUIRED,
        "HOST:PORT of every server, comma-separated, the same in all processes",
    ),
    Variable(("TRAINERS",), REQUIRED, REQUIRED, "their number"),
    Variable(("TRAINER_ID",), REQUIRED, NOT_READ, "0 to TRAINERS - 1"),
    Variable(("CURRENT_ENDPOINT",), NOT_READ, REQUIRED, "this server's own"),
    Variable(
        ("PSERVER_TRANSPORT",),
        OPTIONAL,
        OPTIONAL,
        f"one of {', '.join(f'`{each}`' for each in config.TRANSPORT_CHOICES)}; "
        f"`{USUAL.transport}` unless set",
    ),
    Variable(
        ("PSERVER_HEARTBEAT_TIMEOUT",),
        OPTIONAL,
        OPTIONAL,
        "seconds without a heartbeat after which a process is declared dead; "
        f"{config.HEARTBEAT_TIMEOUT_SECONDS:g} unless set",
    ),
    Variable(
        ("PSERVER_START_TIMEOUT",),
        OPTIONAL,
        OPTIONAL,
        f"seconds to wait for the others to come up; {config.START_TIMEOUT_SECONDS:g} unless set",
    ),
    Variable(
        ("PSERVER_TOKEN_FILE",),
        OPTIONAL,
        OPTIONAL,
        "the file with the job's key, a trainer's or an operator's; also for `pserver status`, "
        "`save` and `reset`",
    ),
    Variable(
        ("PSERVER_KEYS",),
        OPTIONAL,
        OPTIONAL,
        "the folder of this host's keys: TLS on every port; needed where an endpoint is beyond "
        "loopback; also for `launch`, `status`, `web`, `save` and `reset`",
    ),
    Variable(
        ("PSERVER_INSECURE",),
        OPTIONAL,
        OPTIONAL,
        "`1`: endpoints beyond loopback without keys, on a network that nobody else reaches",
    ),
    Variable(
        ("PSERVER_INSECURE_COLLECTIVE",),
        OPTIONAL,
        NOT_READ,
        "`1`: trainers of several hosts may exchange tensors among themselves (rendezvous, gloo, "
        "NCCL), which is not encrypted; also in jobs without servers",
    ),
    Variable(
        ("PSERVER_METRICS",),
        OPTIONAL,
        OPTIONAL,
        "where Prometheus reads metrics: PORT (on 127.0.0.1, or a server's own host) or HOST:PORT; "
        "`launch --metrics` gives each process its own",
    ),
    Variable(
        ("PSERVER_JOB",),
        OPTIONAL,
        OPTIONAL,
        "names the job in metrics; unless set the first digits of its plan's fingerprint do",
    ),
    Variable(
        ("PSERVER_LOG_JSON",),
        OPTIONAL,
        OPTIONAL,
        "`1`: log lines as JSON; `launch --log-json` sets it",
    ),
    Variable(
        ("PSERVER_TRACE",),
        OPTIONAL,
        NOT_READ,
        "the file, or its URL, of a trace of some steps; the same on every trainer; "
        "`launch --trace` sets it",
    ),
    Variable(
        ("PSERVER_TRACE_STEPS",),
        OPTIONAL,
        NOT_READ,
        f"how many steps; {USUAL.trace_steps} unless set",
    ),
    Variable(
        ("PSERVER_CHECKPOINT",),
        OPTIONAL,
        NOT_READ,
        "the folder, or its URL, where the job saves by itself, and from where it goes on; the "
        "same on every trainer; also in jobs without servers; `launch --checkpoint` sets it",
    ),
    Variable(
        ("PSERVER_CHECKPOINT_EVERY",),
        OPTIONAL,
        NOT_READ,
        f"seconds between two such checkpoints; {USUAL.checkpoint_every_seconds:g} unless set",
    ),
    Variable(
        ("PSERVER_CHECKPOINT_KEEP",),
        OPTIONAL,
        NOT_READ,
        f"how many of them stay; {USUAL.checkpoint_keep} unless set",
    ),
    Variable(
        ("PSERVER_TENSORBOARD",),
        OPTIONAL,
        NOT_READ,
        "the folder for TensorBoard's files; also in jobs without servers; "
        "`launch --tensorboard` sets it",
    ),
    Variable(
        ("PSERVER_STRAGGLER_FACTOR",),
        NOT_READ,
        OPTIONAL,
        "as `--straggler-factor` of `pserver serve`: from how many times the others' time on a "
        "trainer is named as slow; 3 unless set, 0: none",
    ),
    Variable(
        ("PSERVER_RECORD_LOG",),
        NOT_READ,
        OPTIONAL,
        "as `--record-log` of `pserver serve`: the directory where it keeps all that it applies, "
        "for `pserver replay`; nowhere unless set",
    ),
    Variable(
        ("PSERVER_GRACE",),
        OPTIONAL,
        NOT_READ,
        "seconds that a trainer may take, after SIGTERM, to end its step and leave the others, "
        "which go on; 0, none, unless set; `launch --grace` sets it",
    ),
    Variable(
        ("PSERVER_CONNECTIONS", "PSERVER_CHECKSUM"),
        NOT_READ,
        OPTIONAL,
        "as `--connections` and `--checksum` of `pserver serve`, which reads them, also under "
        "`launch`; a script whose role is PSERVER does not",
    ),
)
WITHOUT_SERVERS = (
    Variable(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        REQUIRED,
        NOT_READ,
        "torchrun's: where some are set and others are not, a process does not train alone, but "
        "raises and names those",
    ),
    Variable(
        ("LOCAL_WORLD_SIZE",),
        OPTIONAL,
        NOT_READ,
        "how many trainers this host has; `launch` sets it, as torchrun does",
    ),
    Variable(
        ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
        OPTIONAL,
        NOT_READ,
        "torchrun's: whether its agent keeps the store, and how often it has started the job again",
    ),
    Variable(
        ("GLOO_SOCKET_IFNAME",),
        OPTIONAL,
        NOT_READ,
        "gloo's network interface; unless set `lo` where all trainers are on this host",
    ),
)
OTHER_LAUNCHERS = (
    *(
        Variable(names, OPTIONAL, NOT_READ, f"{whose} number of processes")
        for whose, names in other_launchers.NUMBERS.items()
    ),
    Variable(
        other_launchers.ENDPOINTS, OPTIONAL, NOT_READ, "Paddle's trainers, one endpoint for each"
    ),
    Variable(other_launchers.CLUSTER, OPTIONAL, NOT_READ, "TensorFlow's cluster, as JSON"),
)
INTERNAL = (
    Variable(("PSERVER_PLAN_ONLY",), OPTIONAL, NOT_READ, "`1`: `pserver plan` asks for the plan"),
    Variable(
        ("PSERVER_PROBE", "PSERVER_PROBE_SECONDS", "PSERVER_PROBE_END"),
        OPTIONAL,
        NOT_READ,
        "`pserver plan` asks for some steps: the file for what they take, for how long, until when",
    ),
    Variable(
        ("PSERVER_PANEL",),
        OPTIONAL,
        NOT_READ,
        "`1`: the panel of `pserver launch` shows how the job goes, so that no trainer need",
    ),
    Variable(
        ("PSERVER_FINISHED",),
        OPTIONAL,
        NOT_READ,
        "the file that a trainer of a job without servers makes when it has finished, for "
        "`pserver launch`",
    ),
)
