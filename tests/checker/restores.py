"""A job that goes on from a save: new servers read what those of a trial have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from pserver.config import ServerConfig
from tests.checker.history import History
from tests.checker.processes import Process
from tests.checker.reapplication import restored_differences
from tests.checker.server_lives import LivedReplicas, ServerLives
from tests.checker.trial import TwinServer
from tests.checker.worlds import World
from tests.faults.faults import load

SECONDS = 20.0  # for one server to read its part


def restored(
    world: World, folder: str, path: str, history: History, lives: ServerLives
) -> Iterator[str]:
    """Where a job of new servers, that has loaded a save, holds other bytes than the updates make
    that the save has; nothing: nowhere.

    Args:
        folder, path: where the servers of a trial have written it.
        history, lives: of that trial.
    """
    replicas = LivedReplicas(world, history, lives, lives.log(history))
    with ExitStack() as stack:
        transport = "grpc" if world.transport == "inprocess" else world.transport
        config = ServerConfig(transport=transport, min_trainers=1, data_dir=folder)
        servers = [TwinServer(config) for _ in range(world.servers)]
        for server in servers:
            server.start()
            stack.callback(server.stop, 0.0)
        endpoints = [server.endpoint for server in servers]
        process = Process(world, endpoints, 0, 0, History())
        process.start()
        stack.callback(process.communicator.leave, "the trial is over")
        for client, server in zip(process.communicator.clients, servers, strict=True):
            load(client, path, SECONDS)
            own = replicas.saved(f"{folder}/{path}/server-{client.index}")
            yield from restored_differences(own, server.job.installed())
