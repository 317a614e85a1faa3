"""What makes a trainer part of a server's job: the plan that it runs, and the server's place in it.

Pure: nothing here locks, waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pserver import wire_pb2 as wire
from pserver.config import split_endpoint
from pserver.errors import Busy, FingerprintMismatch, PartialPlan, Refused
from pserver.limits import Limits
from transpiler.plan.plan import Plan, differences

PROTOCOL = 1
MOST_TRANSPORTS = 16  # that a trainer may name


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The plan that all trainers of a job run, and which of its servers this one is.

    Attributes:
        fingerprint: of the plan.
        manifest: the facts that the fingerprint covers, by key.
        server_index: counts the plan's servers from 0.
        of: whose plan it is, for messages.
    """

    fingerprint: str = ""
    manifest: Mapping[str, str] = field(default_factory=dict)
    server_index: int = 0
    of: str = "trainer 0"

    @classmethod
    def of_request(cls, request: wire.JoinRequest) -> JobIdentity:
        """The job that trainer 0 begins by joining."""
        return cls(request.fingerprint, dict(request.manifest), request.server_index)

    @classmethod
    def of_plan(cls, plan: Plan, server_index: int) -> JobIdentity:
        """The job of a program that the server was given at its start."""
        return cls(plan.fingerprint(), plan.manifest(), server_index, "the server's program")

    @property
    def trainers(self) -> int:
        """How many trainers the plan has.

        Raises:
            Refused: the manifest does not say it.
        """
        return number_in(self.manifest, "trainers")

    @property
    def lanes(self) -> int:
        """How many lanes the plan has."""
        return _numbered("lane", self.manifest)

    def check(self, request: wire.JoinRequest, trainers: int, late: bool = False) -> None:
        """Returns if the trainer that asks runs this job.

        Args:
            trainers: how many the job has.
            late: the others have begun already.

        Raises:
            Busy: trainer 0 brings another program than it brought before.
            PartialPlan: it is late, and its program has fewer parameter groups than the job's.
            FingerprintMismatch: a trainer runs another program than trainer 0, or than the server
                was started with; the message says in what it differs.
            Refused: the plan has no such trainer, or places this server elsewhere.
        """
        trainer = request.trainer_id
        if request.fingerprint != self.fingerprint:
            other = differences(request.manifest, self.manifest, self.of)
            made, groups = (_numbered("group", m) for m in (request.manifest, self.manifest))
            if late and made < groups:
                raise PartialPlan(
                    f"trainer {trainer} comes late, has distributed {made} of the job's {groups} "
                    "parameter groups, and joins with the last of them: make all optimizers "
                    f"before anything else of the job; now: {other}"
                )
            if trainer == 0 and self.of == "trainer 0":
                raise Busy(
                    "the server has a job with another program; start another server for a second "
                    "job"
                )
            raise FingerprintMismatch(
                f"trainer {trainer} runs another program than {self.of}: {other}"
            )
        if trainer >= trainers:
            raise Refused(f"expected a trainer number below {trainers}, got {trainer}")
        if request.server_index != self.server_index:
            raise Refused(
                f"this server holds part {self.server_index} of the program, trainer {trainer} "
                f"takes it for part {request.server_index}: give every process the endpoints in "
                "the same order"
            )


def _numbered(kind: str, manifest: Mapping[str, str]) -> int:
    """How many lanes or groups there are in a manifest."""
    keys = (key.partition(":")[0] for key in manifest if key.startswith(f"{kind} "))
    return len(set(keys))


def number_in(manifest: Mapping[str, str], key: str) -> int:
    """A number that a manifest tells.

    Raises:
        Refused: it does not.
    """
    text = manifest.get(key, "")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise Refused(f"the manifest does not say the number of {key}: got {text[:20]!r}")
    return int(text)


def check_request(request: wire.JoinRequest, limits: Limits) -> None:
    """Returns if the trainer speaks this version of the protocol, and the server is large enough
    for its job.

    Raises:
        Refused: it speaks another one, or something in it is beyond a limit.
    """
    if request.protocol != PROTOCOL:
        raise Refused(
            f"expected protocol version {PROTOCOL}, got {request.protocol}: install one version "
            "everywhere"
        )
    names = request.incarnation, request.fingerprint, request.coordinator
    texts = (*names, *request.transports[:MOST_TRANSPORTS])
    check_names(texts, limits)
    try:
        split_endpoint(request.coordinator or "localhost:1")
    except ValueError as error:
        raise Refused(f"the coordinator's endpoint: {error}") from error
    if len(request.transports) > MOST_TRANSPORTS:
        count = len(request.transports)
        raise Refused(f"expected at most {MOST_TRANSPORTS} transports, got {count}")
    trainers = number_in(request.manifest, "trainers")
    if not 1 <= trainers <= limits.trainers:
        raise Refused(
            f"the job has {trainers} trainers, and this server takes 1 to {limits.trainers} "
            "(--max-trainers)"
        )


def check_names(names: Iterable[str], limits: Limits) -> None:
    """Returns if names are short enough to be kept.

    Raises:
        Refused: one is not.
    """
    for name in names:
        if len(name) > limits.name_bytes:
            raise Refused(
                f"expected names of up to {limits.name_bytes} characters, got one of {len(name)}: "
                f"{name[:40]!r} ..."
            )


def check_trainer(trainer: int, limits: Limits) -> None:
    """Returns if a job may have a trainer of this number.

    Raises:
        Refused: it may not.
    """
    if trainer >= limits.trainers:
        raise Refused(
            f"expected a trainer number below {limits.trainers} (--max-trainers), got {trainer}"
        )


def choose_transport(
    request: wire.JoinRequest | wire.ObserveRequest | wire.FollowRequest,
    offered: Mapping[str, int],
) -> str:
    """The first of the peer's transports that the server offers.

    Args:
        offered: the server's transports, by name, with the port of each.

    Raises:
        Refused: they have none in common.
    """
    transport = next((name for name in request.transports if name in offered), None)
    if transport is None:
        raise Refused(
            f"no transport in common: the server has {sorted(offered)}, the peer "
            f"{list(request.transports)}"
        )
    return transport
