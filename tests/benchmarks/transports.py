"""Rows: a step's gradients pushed and its parameters pulled, over each transport, beside the same
bytes by other means.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator

import torch
from harness import Contender, Promise, Row, alternate, timed
from jobs import Trainer, trainer
from peers import batches, flight_client, raw_exchange, read_batches
from processes import Peer, peers, server

from pserver.malloc import keep_memory
from pserver.transport.codec import buffer_of

SETTING = "1 trainer, 1 server, SGD, 1 thread each, loopback"
RAW = "raw TCP socket, the same bytes one way after the other"
BARE = "bare Arrow Flight exchange of the same bytes in 2 MB batches"
TCP = "torch.distributed.rpc held to TCP, one call"
OWN = "torch.distributed.rpc, its own transport, one call"

LARGE = (  # 64 MB in 100 tensors
    Promise("wire/flight 64 MB, raw TCP", RAW, 0.6, setting=SETTING),
    Promise("wire/flight 64 MB, bare Flight", BARE, 0.85, setting=SETTING),
    Promise("wire/flight 64 MB, rpc", TCP, 1.5, setting=SETTING),
    Promise("wire/shm 64 MB, rpc", OWN, 1.5, setting=SETTING),
)
MEDIUM = (  # 16 MB in 20 tensors
    Promise("wire/flight 16 MB, rpc", TCP, 0.8, setting=SETTING),
    Promise("wire/shm 16 MB, rpc", OWN, 1.5, setting=SETTING),
)
SMALL = (  # 300 of 1 KB
    Promise(
        "wire/flight 300 x 1 KB, rpc",
        "torch.distributed.rpc held to TCP, one call per tensor",
        10,
        setting=SETTING,
    ),
    Promise(
        "wire/flight 300 x 1 KB, rpc at once", "the same, all calls at once", None, setting=SETTING
    ),
)
BASELINES = {
    RAW: "raw",
    BARE: "bare",
    TCP: "rpc",
    OWN: "own",
    SMALL[0].against: "each",
    SMALL[1].against: "at once",
}
PROMISES = (*LARGE, *MEDIUM, *SMALL)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    keep_memory()
    for promises, count, elements in (
        (LARGE, 100, 160_000),
        (MEDIUM, 20, 200_000),
        (SMALL, 300, 256),
    ):
        chosen = [promise for promise in promises if promise in wanted]
        if chosen:
            yield from _block(chosen, 3 if tiny else count, 64 if tiny else elements, runs)


def _block(promises: list[Promise], count: int, elements: int, runs: int) -> Iterator[Row]:
    """The rows of one size, measured together."""
    size, port = count * elements * 4, free_port()
    others = Peer("raw", size), Peer("flight", size)
    rpcs = [
        Peer("rpc", rank, port + 1 - tcp, tcp, count, elements) for tcp in (1, 0) for rank in (1, 0)
    ]
    with (
        peers(*others, *rpcs) as ports,
        server("flight") as (_, flight_endpoint),
        server("shm") as (_, shm_endpoint),
        trainer(flight_endpoint, [elements] * count, "flight") as over_flight,
        trainer(shm_endpoint, [elements] * count, "shm") as over_shm,
    ):
        contenders = {
            "flight": timed(over_flight.step),
            "shm": timed(over_shm.step),
            "raw": _raw(int(ports[0]), over_flight),
            "bare": _bare(int(ports[1]), size),
            "rpc": asked(rpcs[1], "all"),
            "own": asked(rpcs[3], "all"),
            "each": asked(rpcs[1], "each"),
            "at once": asked(rpcs[1], "once"),
        }
        used = {transport_of(p) for p in promises} | {BASELINES[p.against] for p in promises}
        medians = alternate({name: run for name, run in contenders.items() if name in used}, runs)
    for promise in promises:
        yield Row(
            promise, medians[transport_of(promise)], medians[BASELINES[promise.against]], runs
        )


def transport_of(promise: Promise) -> str:
    """The transport that a row names."""
    return promise.name.removeprefix("wire/").partition(" ")[0]


def asked(peer: Peer, way: str) -> Contender:
    """A peer that says how many seconds its steps took."""
    count = 0

    def run() -> float:
        nonlocal count
        if not count:
            peer.ask(f"{way} 1")
            count = 1 + int(0.25 / float(peer.ask(f"{way} 1")))
        return float(peer.ask(f"{way} {count}")) / count * 1e3

    return run


def _raw(port: int, like: Trainer) -> Contender:
    connection = socket.create_connection(("127.0.0.1", port))
    outgoing = [buffer_of(gradient) for gradient in like.gradients.values()]
    incoming = [buffer_of(torch.zeros_like(value)) for value in like.parameters.values()]
    return timed(lambda: raw_exchange(connection, outgoing, incoming))


def _bare(port: int, size: int) -> Contender:
    writer, reader = flight_client(port)
    memory = bytearray(size)

    def exchange() -> None:
        for batch in batches(memory):
            writer.write_batch(batch)
        read_batches(reader, size)

    return timed(exchange)


def free_port() -> int:
    """Two ports that nobody uses at the moment, the second behind the first: torch's rpc wants to
    be told.
    """
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
        with socket.create_server(("127.0.0.1", port + 1)):
            return port
