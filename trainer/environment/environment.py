"""How a trainer talks to servers and to other trainers, by the variables of its environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pserver import config
from pserver.security.access import OPEN, Access
from trainer.environment.values import number_of, seconds_of

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Connection:
    """How a trainer talks to servers and to other trainers.

    Attributes:
        heartbeat_timeout_seconds: without a heartbeat, after which a trainer is declared dead, and
            a server until it tells its own timeout on joining.
        start_timeout_seconds: until servers must be up and installed, and all trainers at their
            rendezvous.
        transport: "auto", or the one transport to use.
        plan_only: print the plan and end, instead of joining servers: what ``pserver plan`` asks of
            a script.
        probe: the file for what ``pserver plan`` wants to know: with ``plan_only`` the loads of the
            plan, otherwise what some steps take, after which the process ends; "": nothing.
        probe_seconds: of such steps.
        probe_end: on the system's monotonic clock, by when the file is there; 0: any time.
        token_file: the file with this process's key; "": it has none.
        keys: the folder of this host's keys, for TLS to the servers; "": without.
        insecure: servers may be beyond this host without keys.
        insecure_collective: trainers may be on several hosts, although what they send one another
            is not encrypted.
        metrics: PORT, on loopback, or HOST:PORT of this trainer's metrics; "": it shows none.
        job: names the job in metrics; "": the first digits of its plan's fingerprint do.
        log_json: log lines are JSON.
        trace: the file, or its URL, of a trace of some steps; "": there is none.
        trace_steps: of that trace.
        tensorboard: the folder for TensorBoard's files; "": none.
        panel: ``launch`` shows how the job goes, so that no trainer need.
        checkpoint: the folder, or its URL, where the job saves by itself, and from where it goes
            on; "": it does not.
        checkpoint_every_seconds: between two such checkpoints.
        checkpoint_keep: how many of them stay.
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
        """What the variables say whose names begin with PSERVER_, each optional.

        Raises:
            ValueError: one of them holds something else than it should; the message names it.
        """
        environ = os.environ if environ is None else environ
        return cls(
            seconds_of(environ, "PSERVER_HEARTBEAT_TIMEOUT", config.HEARTBEAT_TIMEOUT_SECONDS),
            seconds_of(environ, "PSERVER_START_TIMEOUT", config.START_TIMEOUT_SECONDS),
            environ.get("PSERVER_TRANSPORT", "auto"),
            environ.get("PSERVER_PLAN_ONLY", "") == "1",
            environ.get("PSERVER_PROBE", ""),
            seconds_of(environ, "PSERVER_PROBE_SECONDS", 6.0),
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
        """Sets variables of this process's environment, which connections then begin with.

        Raises:
            ValueError: one is wrong; none is set.
        """
        cls.from_environment({**os.environ, **texts})
        os.environ.update(texts)

    def check_no_grace(self, why: str) -> None:
        """Returns if nobody has asked for a grace period.

        Args:
            why: a trainer cannot leave this job before its end, as the end of a sentence.

        Raises:
            ValueError: somebody has.
        """
        if self.grace_seconds:
            raise ValueError(f"PSERVER_GRACE: expected 0 {why}, got {self.grace_seconds:g}")

    def check_collective(self, host: str) -> None:
        """Returns if trainers may meet at this host.

        Raises:
            ValueError: it is beyond this one, and the user has not said that nobody else reaches
                the network.
        """
        if not (self.insecure_collective or config.is_loopback(host)):
            raise ValueError(
                f"the trainers meet at {host}, beyond this host, and what they send one another is "
                "not encrypted: where nobody else reaches that network (a private one, a VPN) set "
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
        """What this trainer proves to servers, and asks of them.

        Args:
            endpoints: HOST:PORT of each server.

        Raises:
            ValueError: the token file or the keys cannot be read; or a server is beyond this host,
                and there are neither keys nor PSERVER_INSECURE.
        """
        if self.plan_only:
            return OPEN  # to nobody: the endpoints are made up
        if config.check_protected("PSERVER_ENDPOINTS", endpoints, self.keys, self.insecure):
            _warn_of_clear_text(tuple(endpoints))
        return Access.of(self.token_file, self.keys, "trainer")


@cache
def _warn_of_clear_text(endpoints: tuple[str, ...]) -> None:
    """Once."""
    log.warning(
        "PSERVER_INSECURE: what %s get and say is not encrypted: who is there can change models",
        ", ".join(endpoints),
    )
