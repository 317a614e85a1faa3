"""Rows: what a server computes and holds, and what a trainer holds beyond what training alone
needs.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from harness import Contender, Promise, Row, alternate
from jobs import Trainer, trainer
from peers import raw_exchange
from processes import Peer, cpu_seconds, memory_bytes, peers, server

from pserver.control.control_client import ControlClient
from pserver.telemetry.memory import keep_memory
from pserver.transport.frames import buffer_of

CPU = Promise(
    "wire/tcp CPU of both ends",
    "raw sockets', moving the same bytes",
    1.5,
    "s/GB",
    most=True,
    setting="GB pushed, applied and pulled; 64 MB in 100 tensors, SGD, 1 trainer, 1 server, 1 "
    "thread each",
)
SERVER_MEMORY = Promise(
    "wire/tcp server memory",
    "bytes held + 2 x bytes of its parameters",
    1.1,
    "MB",
    most=True,
    setting="beyond an empty server; 64 MB in 100 tensors, SGD, sync, 2 trainers, 1 thread each",
)
TRAINER_MEMORY = Promise(
    "wire/shm trainer memory",
    "bytes of its parameters",
    1.5,
    "MB",
    most=True,
    setting="async with the default queue, beyond the plain loop, without the holes of both heaps; "
    "16 MB model of two wide layers, batch 16, SGD, 1 thread each",
)
PROMISES = (CPU, SERVER_MEMORY, TRAINER_MEMORY)
MB = 1e6


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    keep_memory()
    shape = [64] * 3 if tiny else [160_000] * 100
    if CPU in wanted:
        yield _cpu(shape, min(runs, 5), tiny)
    if SERVER_MEMORY in wanted:
        yield _server_memory(shape)
    if TRAINER_MEMORY in wanted:
        yield _trainer_memory(64 if tiny else 2048, 1 if tiny else 5)


def _burnt(pid: int, step: Callable[[], object], size: int, tiny: bool) -> Contender:
    """CPU seconds of another process and of this one for each GB that goes there and back."""

    def burnt() -> float:
        return cpu_seconds(pid) + time.process_time()

    def run() -> float:
        before, moved, end = burnt(), 0, time.monotonic() + (0.1 if tiny else 2.0)
        while time.monotonic() < end:
            step()
            moved += size
        return (burnt() - before) / moved * 1e9

    return run


def _cpu(shape: list[int], runs: int, tiny: bool) -> Row:
    size = sum(shape) * 4
    raw = Peer("raw", size)
    with (
        peers(raw) as ports,
        server("tcp") as (pid, endpoint),
        trainer(endpoint, shape, "tcp") as ours,
    ):
        connection = socket.create_connection(("127.0.0.1", int(ports[0])))
        outgoing = [buffer_of(gradient) for gradient in ours.gradients.values()]
        incoming = [buffer_of(torch.zeros_like(value)) for value in ours.parameters.values()]
        contenders = {
            "ours": _burnt(pid, ours.step, size, tiny),
            "raw": _burnt(
                raw.pid, lambda: raw_exchange(connection, outgoing, incoming), size, tiny
            ),
        }
        medians = alternate(contenders, runs)
    return Row(CPU, medians["ours"], medians["raw"], runs)


def _server_memory(shape: list[int]) -> Row:
    with (
        server("tcp") as (empty, _),
        server("tcp") as (pid, endpoint),
        ThreadPoolExecutor(2) as pool,
    ):
        job = [Trainer([endpoint], shape, "tcp", number, 2) for number in range(2)]
        list(pool.map(lambda trainer: trainer.communicator.start(), job))
        for _ in range(10):
            list(pool.map(Trainer.step, job))
        held, beyond = (
            ControlClient(endpoint, 10.0).status().bytes_held,
            memory_bytes(pid) - memory_bytes(empty),
        )
        list(pool.map(lambda trainer: trainer.communicator.leave(), job))
    return Row(SERVER_MEMORY, beyond / MB, (held + 2 * sum(shape) * 4) / MB, 1)


def _trainer_memory(width: int, runs: int) -> Row:
    """Medians of pairs."""
    beyond = statistics.median(_beyond(width) for _ in range(runs))
    return Row(TRAINER_MEMORY, beyond / MB, 2 * width * (width // 2) * 4 / MB, runs)


def _beyond(width: int) -> int:
    plain = Peer("plain", width)
    with server("shm") as (_, endpoint), peers(plain):
        ours = Peer("trainer", 0, 1, endpoint, "shm", width, "k_steps=0")
        with peers(ours):
            for peer in (plain, ours):
                peer.ask(60)
            return int(ours.ask("memory")) - int(plain.ask("memory"))
