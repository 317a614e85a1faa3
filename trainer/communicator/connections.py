"""A trainer's clients, one for each server of its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pserver.client.channel import Channel
from pserver.client.client import Client, Identity
from pserver.client.replies import Joined
from pserver.client.stream import Destination
from pserver.errors import Refused
from pserver.transport.frames import DTYPES
from trainer.environment.environment import Connection
from transpiler.plan.plan import Deployment, Plan

TRANSPORTS = ("shm", "tcp", "grpc")


def clients_of(
    deployment: Deployment,
    connection: Connection,
    destinations: Sequence[Destination],
    table_destination: Callable[[int], Destination | None],
    incarnation: str,
) -> list[Client]:
    """The clients of a trainer, by server; none has joined yet.

    Args:
        deployment: a trainer's.
        connection: timeouts, which transports to offer, and the key.
        destinations: by lane, where values go.
        table_destination: gives, for a server's index, where arrays of tables go; None where the
            plan has no tables.
        incarnation: of this trainer.
    """
    # Without wait_port the servers are expected to be there already.
    start_timeout = (
        connection.start_timeout_seconds
        if deployment.wait_port
        else connection.heartbeat_timeout_seconds
    )
    access = connection.access_to(deployment.endpoints)
    identity = _identity(deployment, connection, incarnation)
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
        coordinator=deployment.endpoints[0],
    )


def channels_of(clients: Sequence[Client], plan: Plan, lane: int) -> list[Channel]:
    """A lane's channels, by server, to servers that have been joined."""
    shorter = {
        table.name: DTYPES[table.gradients_in]
        for table in plan.tables
        if table.gradients_in != table.computes_in and not plan.lanes[lane].kind.steps_on_trainer
    }
    channels = [client.channels[lane] for client in clients]
    for channel in channels:
        channel.rows_travel = shorter
    return channels


def begun_at(clients: Sequence[Client], joined: Sequence[Joined], lane: int) -> int:
    """The last step of a lane that the servers have applied: none in a new job, and where they were
    started with programs that a job has left, the last one of that job.

    Args:
        joined: what each of the clients was told.

    Raises:
        Refused: these are of different steps.
    """
    steps = [each.steps[lane] if len(each.steps) > lane else 0 for each in joined]
    for client, step in zip(clients, steps, strict=True):
        if step != steps[0]:
            raise Refused(
                f"{clients[0].endpoint} begins with step {steps[0]} of lane {lane}, and "
                f"{client.endpoint} with step {step}: start all servers with what they held at one "
                "moment"
            )
    return steps[0]
