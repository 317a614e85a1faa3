"""What makes a trainer part of a server's job: the plan that it runs, and the server's place in it.

Pure: nothing here locks, waits or reads a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from pserver import wire_pb2 as wire
from pserver.errors import Busy, FingerprintMismatch, Refused
from transpiler.plan.plan import Plan, differences

PROTOCOL = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The plan that all trainers of a job run, and which of its servers this one is.

    Attributes:
        fingerprint: of the plan.
        manifest: the facts that the fingerprint covers, by key.
        server_index: counts the plan's servers from 0.
    """

    fingerprint: str = ""
    manifest: Mapping[str, str] = field(default_factory=dict)
    server_index: int = 0

    @classmethod
    def of_request(cls, request: wire.JoinRequest) -> JobIdentity:
        """The job that trainer 0 begins by joining."""
        return cls(request.fingerprint, dict(request.manifest), request.server_index)

    @classmethod
    def of_plan(cls, plan: Plan, server_index: int) -> JobIdentity:
        """The job of a program that the server was given at its start."""
        return cls(plan.fingerprint(), plan.manifest(), server_index)

    @property
    def trainers(self) -> int:
        """How many trainers the plan has.

        Raises:
            Refused: the manifest does not say it.
        """
        try:
            return int(self.manifest["trainers"])
        except (KeyError, ValueError):
            raise Refused("the manifest does not say the number of trainers") from None

    def check(self, request: wire.JoinRequest, trainers: int) -> None:
        """Returns if the trainer that asks runs this job.

        Args:
            trainers: how many the job has.

        Raises:
            Busy: trainer 0 brings another program.
            FingerprintMismatch: another trainer runs another program; the message says in what it
                differs.
            Refused: the plan has no such trainer, or places this server elsewhere.
        """
        trainer = request.trainer_id
        if request.fingerprint != self.fingerprint:
            if trainer == 0:
                raise Busy(
                    "the server has a job with another program; start another server for a second "
                    "job"
                )
            other = differences(request.manifest, self.manifest, "trainer 0")
            log.warning("refused trainer %d, which runs another program: %s", trainer, other)
            raise FingerprintMismatch(
                f"trainer {trainer} runs another program than trainer 0: {other}"
            )
        if trainer >= trainers:
            raise Refused(f"expected a trainer number below {trainers}, got {trainer}")
        if request.server_index != self.server_index:
            raise Refused(
                f"this server holds part {self.server_index} of the program, trainer {trainer} "
                f"takes it for part {request.server_index}: give every process the endpoints in "
                "the same order"
            )


def check_protocol(request: wire.JoinRequest) -> None:
    """Returns if the trainer speaks this version of the protocol.

    Raises:
        Refused: it speaks another one.
    """
    if request.protocol != PROTOCOL:
        raise Refused(
            f"expected protocol version {PROTOCOL}, got {request.protocol}: install one version "
            "everywhere"
        )


def choose_transport(
    request: wire.JoinRequest | wire.ObserveRequest, offered: Mapping[str, int]
) -> str:
    """The first of the trainer's transports that the server offers.

    Args:
        offered: the server's transports, by name, with the port of each.

    Raises:
        Refused: they have none in common.
    """
    transport = next((name for name in request.transports if name in offered), None)
    if transport is None:
        raise Refused(
            f"no transport in common: the server has {sorted(offered)}, the trainer "
            f"{list(request.transports)}"
        )
    return transport
