"""A job that goes on from a save: new servers read what those of a trial have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.job_log.records import Process as LogProcess
from tests.checker.history import History
from tests.checker.processes import Process
from tests.checker.reapplication import restored_differences
from tests.checker.server_lives import LivedReplicas, ServerLives
from tests.checker.trial import TwinServer
from tests.checker.worlds import World
from tests.faults.faults import load

SECONDS = 20.0  # for one server to read its part
ANOTHER = 9  # a start of trainer 0 that no trial has


def restored(
    world: World, folder: str, path: str, history: History, lives: ServerLives
) -> Iterator[str]:
    """Where a job of new servers, that has loaded a save, holds other bytes than the updates make
    that the save has, or knows other steps of its process; nothing: nowhere.

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
        # the process that the job began with, or another one of its number
        process = Process(world, endpoints, 0, world.seed % 2 * ANOTHER, History())
        process.start()
        stack.callback(process.communicator.leave, "the trial is over")
        for client, server in zip(process.communicator.clients, servers, strict=True):
            load(client, path, SECONDS)
            directory, held = f"{folder}/{path}/server-{client.index}", server.job.installed()
            yield from restored_differences(replicas.saved(directory), held)
            known = LogProcess(0, process.incarnation)
            own = checkpoint.reading(directory).meta["watermarks"].get("0", {})
            mine = own.get("incarnation") == process.incarnation
            for lane in range(len(world.plan.lanes)):
                last = replicas.watermark(directory, known, lane) if mine else 0
                if (found := server.job._members.step(0, lane)) != last:
                    yield f"{known} has watermark {found} after a save was loaded, not {last}"
