"""A trainer's clients, one for each server of its plan."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from pserver.client.client import Client, Identity
from pserver.client.retrying_stream import Destination
from trainer.role import Connection
from transpiler.plan.plan import Deployment

TRANSPORTS = ("shm", "tcp", "grpc")


def clients_of(
    deployment: Deployment,
    connection: Connection,
    destinations: Sequence[Destination],
    table_destination: Callable[[int], Destination | None],
    incarnation: str = "",
) -> list[Client]:
    """The clients of a trainer, by server; none has joined yet.

    Args:
        deployment: a trainer's.
        connection: timeouts, which transports to offer, and the key.
        destinations: by lane, where values go.
        table_destination: gives, for a server's index, where arrays of tables go; None where the
            plan has no tables.
        incarnation: of this trainer; "" draws one.
    """
    # Without wait_port the servers are expected to be there already.
    start_timeout = (
        connection.start_timeout_seconds
        if deployment.wait_port
        else connection.heartbeat_timeout_seconds
    )
    access = connection.access_to(deployment.endpoints)
    identity = _identity(deployment, connection, incarnation or secrets.token_hex(8))
    return [
        Client(
            endpoint,
            index,
            identity,
            connection.heartbeat_timeout_seconds,
            start_timeout,
            destinations,
            table_destination(index),
            access,
        )
        for index, endpoint in enumerate(deployment.endpoints)
    ]


def _identity(deployment: Deployment, connection: Connection, incarnation: str) -> Identity:
    assert deployment.trainer_id is not None, "a trainer's deployment has its number"
    return Identity(
        trainer_id=deployment.trainer_id,
        incarnation=incarnation,
        fingerprint=deployment.plan.fingerprint(),
        manifest=deployment.plan.manifest(),
        transports=TRANSPORTS if connection.transport == "auto" else (connection.transport,),
    )
