"""Rows: whole training steps of several processes, and of many threads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from harness import Contender, Promise, Row, alternate, timed
from jobs import Trainer
from processes import Peer, peers, server
from transports import free_port

MODEL = "16 MB model of two wide layers, batch 16, SGD, 1 thread each"
DDP, PLAIN = "DDP on gloo, 2 ranks", "plain torch loop"
SYNC = tuple(
    Promise(
        f"wire/{transport} sync step, 2 trainers",
        DDP,
        target,
        setting=f"2 trainers, 1 server; {MODEL}",
    )
    for transport, target in (("shm", 1.15), ("tcp", 0.75))
)
ASYNC = tuple(
    Promise(
        f"wire/{transport} async step",
        PLAIN,
        target,
        setting=f"1 trainer, 1 server, until every step is applied; {MODEL}",
    )
    for transport, target in (("shm", 0.7), ("tcp", 0.45))
)
THREADS = Promise(
    "wire/shm 16 client threads",
    "16 times the step with 1",
    1,
    most=True,
    setting="2 servers, sync, 4 tensors of 100, 1 thread each",
)
AVERAGING = Promise("collective/DataParallel", DDP, 0.97, setting=f"2 ranks on gloo; {MODEL}")
PROMISES = (*SYNC, *ASYNC, THREADS, AVERAGING)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    width = 64 if tiny else 2048
    if chosen := [promise for promise in SYNC if promise in wanted]:
        port = free_port()
        yield from _training(
            chosen,
            2,
            [Peer("ddp", rank, 2, "127.0.0.1", port, width) for rank in range(2)],
            width,
            runs,
        )
    if chosen := [promise for promise in ASYNC if promise in wanted]:
        yield from _training(chosen, 1, [Peer("plain", width)], width, runs, "k_steps=0")
    if THREADS in wanted:
        yield _threads(16, runs)
    if AVERAGING in wanted:
        yield _averaging(width, runs)


def together(group: Sequence[Peer], steps: int) -> Contender:
    """Processes that take steps together: milliseconds a step, of the slowest."""

    def run() -> float:
        for peer in group:
            peer.tell(steps)
        return max(float(peer.heard()) for peer in group) / steps * 1e3

    return run


def _training(
    promises: list[Promise],
    trainers: int,
    others: list[Peer],
    width: int,
    runs: int,
    configs: str = "",
) -> Iterator[Row]:
    """Our trainers over each transport, in turn with other processes that train the same model."""
    steps = 20 if configs else 10
    with ExitStack() as stack:
        stack.enter_context(peers(*others))
        contenders = {"others": together(others, steps)}
        for transport in (
            promise.name.removeprefix("wire/").partition(" ")[0] for promise in promises
        ):
            _, endpoint = stack.enter_context(server(transport))
            own = [
                Peer("trainer", number, trainers, endpoint, transport, width, configs)
                for number in range(trainers)
            ]
            stack.enter_context(peers(*own))
            contenders[transport] = together(own, steps)
        medians = alternate(contenders, runs)
    for promise, transport in zip(promises, list(contenders)[1:], strict=True):
        yield Row(promise, medians[transport], medians["others"], runs)


def _averaging(width: int, runs: int) -> Row:
    """Two ranks of our DataParallel, in turn with two of torch's."""
    with ExitStack() as stack:
        contenders = {}
        for role in ("data_parallel", "ddp"):
            port = free_port()
            group = [Peer(role, rank, 2, "127.0.0.1", port, width) for rank in range(2)]
            stack.enter_context(peers(*group))
            contenders[role] = together(group, 10)
        medians = alternate(contenders, runs)
    return Row(AVERAGING, medians["data_parallel"], medians["ddp"], runs)


def _threads(count: int, runs: int) -> Row:
    """A step of one trainer, and one of many in this process; each job has two servers of its
    own.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count))
        contenders = {}
        for trainers in (1, count):
            endpoints = [stack.enter_context(server("shm"))[1] for _ in range(2)]
            job = [
                Trainer(endpoints, [100] * 4, "shm", number, trainers) for number in range(trainers)
            ]
            list(pool.map(lambda trainer: trainer.communicator.start(), job))
            stack.callback(
                lambda job=job: list(pool.map(lambda trainer: trainer.communicator.leave(), job))
            )
            contenders[f"{trainers}"] = timed(lambda job=job: list(pool.map(Trainer.step, job)))
        medians = alternate(contenders, runs)
    return Row(THREADS, medians[f"{count}"], medians["1"] * count, runs)
