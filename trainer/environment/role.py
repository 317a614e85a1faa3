"""The role of this process in its job, read from the environment once or given by the script."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pserver import config
from trainer.environment.values import number_of
from trainer.environment.world import World, is_collective


class Role(enum.Enum):
    """The part of a process in a job."""

    TRAINER = "TRAINER"
    PSERVER = "PSERVER"
    SINGLE = "SINGLE"  # trains alone: no cluster variables are set
    # a trainer among trainers, without servers: torchrun's variables are set
    COLLECTIVE = "COLLECTIVE"

    WORKER = TRAINER  # the documentation's other names
    SERVER = PSERVER


@dataclass(frozen=True, slots=True)
class RoleMaker:
    """A process's place in its job.

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
        ValueError: some variables of a job are set and others are missing, or one holds something
            else than it should; the message names it.
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
