"""Rows: a step's gradients pushed and its parameters pulled, over each transport, beside the same
bytes by other means.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import Contender, Promise, Row, alternate, timed
from jobs import Trainer, trainer
from peers import raw_exchange
from processes import Peer, peers, server

from pserver.security.key_folder import KeyFolder
from pserver.security.keys import Keys
from pserver.telemetry.memory import keep_memory
from pserver.transport.frames import buffer_of

SETTING = "1 trainer, 1 server, SGD, 1 thread each, loopback"
RAW = "raw TCP socket, the same bytes one way after the other"
TCP = "torch.distributed.rpc held to TCP, one call"
TLS = "bare ssl sockets (TLS 1.3), the same bytes one way after the other"
OWN = "torch.distributed.rpc, its own transport, one call"
COPIES = "two copies of the same bytes and the update, in one process"

LARGE = (  # 64 MB in 100 tensors
    Promise("wire/tcp 64 MB, raw", RAW, 0.95, setting=SETTING),
    Promise("wire/tcp 64 MB, rpc", TCP, 1.15, setting=SETTING),
    Promise("wire/shm 64 MB, rpc", OWN, 1.5, setting=SETTING),
    Promise("wire/shm 64 MB, copies", COPIES, 0.85, setting=SETTING),
)
SECURED = (Promise("wire/tls 64 MB", TLS, 0.8, setting=SETTING),)  # the same tensors
MEDIUM = (  # 16 MB in 20 tensors
    Promise("wire/tcp 16 MB, raw", RAW, 0.9, setting=SETTING),
    Promise("wire/tcp 16 MB, rpc", TCP, 1.15, setting=SETTING),
    Promise("wire/checked 16 MB", "the same without checksums", 0.95, setting=SETTING),
    Promise("wire/shm 16 MB, rpc", OWN, 1.5, setting=SETTING),
    Promise("wire/shm 16 MB, copies", COPIES, 0.7, setting=SETTING),
)
SMALL = (  # 300 of 1 KB
    Promise(
        "wire/tcp 300 x 1 KB, rpc",
        "torch.distributed.rpc held to TCP, one call per tensor",
        10,
        setting=SETTING,
    ),
    Promise("wire/tcp 300 x 1 KB, rpc at once", "the same, all calls at once", 6, setting=SETTING),
)
LOOP = "a loop of Python over a raw socket: gradients, an update of each tensor, its values"
FEW = (Promise("wire/tcp 10 x 1 KB, loop", LOOP, 5, most=True, setting=SETTING),)
BASELINES = {
    RAW: "raw",
    TCP: "rpc",
    MEDIUM[2].against: "tcp",
    OWN: "own",
    COPIES: "copies",
    SMALL[0].against: "each",
    SMALL[1].against: "at once",
}
PROMISES = (*LARGE, *SECURED, *MEDIUM, *SMALL, *FEW)


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
    for promise in SECURED:
        if promise in wanted:
            yield _secured(promise, *((3, 64) if tiny else (100, 160_000)), runs)
    for promise in FEW:
        if promise in wanted:
            yield _few(promise, 10, 256, runs)


def _few(promise: Promise, count: int, elements: int, runs: int) -> Row:
    """A few small tensors, beside the least that Python takes."""
    with (
        peers(Peer("updater", count, elements)) as (port,),
        server("tcp") as (_, endpoint),
        trainer(endpoint, [elements] * count, "tcp") as ours,
        socket.create_connection(("127.0.0.1", int(port))) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        contenders = {"ours": timed(ours.step), "loop": _exchange(connection, ours)}
        medians = alternate(contenders, runs)
    return Row(promise, medians["ours"], medians["loop"], runs)


def _secured(promise: Promise, count: int, elements: int, runs: int) -> Row:
    """The row over TLS, with keys that are made for it."""
    size = count * elements * 4
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        KeyFolder.create(folder).add("a")
        own = folder / "a"
        (port,) = stack.enter_context(peers(Peer("raw_tls", size, own)))
        _, endpoint = stack.enter_context(server("tcp", flags=["--keys", str(own)]))
        ours = stack.enter_context(trainer(endpoint, [elements] * count, "tcp", str(own)))
        connection = (
            Keys(own, ("trainer",))
            .client_context()
            .wrap_socket(
                socket.create_connection(("127.0.0.1", int(port))), server_hostname="127.0.0.1"
            )
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        contenders = {"ours": timed(ours.step), "bare": _exchange(connection, ours)}
        medians = alternate(contenders, runs)
    return Row(promise, medians["ours"], medians["bare"], runs)


def _block(promises: list[Promise], count: int, elements: int, runs: int) -> Iterator[Row]:
    """The rows of one size, measured together."""
    size, port = count * elements * 4, free_port()
    raw = Peer("raw", size)
    rpcs = [
        Peer("rpc", rank, port + 1 - tcp, tcp, count, elements) for tcp in (1, 0) for rank in (1, 0)
    ]
    with (
        peers(raw, *rpcs) as ports,
        server("tcp") as (_, tcp_endpoint),
        server("tcp", flags=["--checksum", "on"]) as (_, checked_endpoint),
        server("shm") as (_, shm_endpoint),
        trainer(tcp_endpoint, [elements] * count, "tcp") as over_tcp,
        trainer(checked_endpoint, [elements] * count, "tcp") as checked,
        trainer(shm_endpoint, [elements] * count, "shm") as over_shm,
    ):
        contenders = {
            "tcp": timed(over_tcp.step),
            "checked": timed(checked.step),
            "shm": timed(over_shm.step),
            "raw": _exchange(socket.create_connection(("127.0.0.1", int(ports[0]))), over_tcp),
            "copies": timed(_copies([elements] * count)),
            "rpc": asked(rpcs[:2], "all"),
            "own": asked(rpcs[2:], "all"),
            "each": asked(rpcs[:2], "each"),
            "at once": asked(rpcs[:2], "once"),
        }
        for peer in rpcs:
            peer.rest()
        used = {transport_of(p) for p in promises} | {BASELINES[p.against] for p in promises}
        medians = alternate({name: run for name, run in contenders.items() if name in used}, runs)
    for promise in promises:
        yield Row(
            promise, medians[transport_of(promise)], medians[BASELINES[promise.against]], runs
        )


def transport_of(promise: Promise) -> str:
    """The transport that a row names."""
    return promise.name.removeprefix("wire/").partition(" ")[0]


def asked(pair: Sequence[Peer], way: str) -> Contender:
    """Two peers, which rest while others are measured, and of which the second says how many
    seconds its steps took.
    """
    count = 0

    def run() -> float:
        nonlocal count
        for each in pair:
            each.wake()
        peer = pair[1]
        peer.ask(f"{way} 1")
        count = count or 1 + int(0.25 / float(peer.ask(f"{way} 1")))
        took = float(peer.ask(f"{way} {count}")) / count * 1e3
        for each in pair:
            each.rest()
        return took

    return run


def _exchange(connection: socket.socket, like: Trainer) -> Contender:
    outgoing = [buffer_of(gradient) for gradient in like.gradients.values()]
    incoming = [buffer_of(torch.zeros_like(value)) for value in like.parameters.values()]
    return timed(lambda: raw_exchange(connection, outgoing, incoming))


def _copies(shape: Sequence[int]) -> Callable[[], None]:
    """The least that can be done: a gradient to where it is applied, and the value back."""
    gradients, parameters = ([fill(count) for count in shape] for fill in (torch.ones, torch.zeros))
    arrived, values = ([torch.zeros(count) for count in shape] for _ in range(2))

    def step() -> None:
        for target, source in zip(arrived, gradients, strict=True):
            target.copy_(source)
        for value, gradient in zip(values, arrived, strict=True):
            value.add_(gradient, alpha=-1e-3)
        for target, source in zip(parameters, values, strict=True):
            target.copy_(source)

    return step


def free_port() -> int:
    """Two ports that nobody uses at the moment, the second behind the first: torch's rpc wants to
    be told.
    """
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
        with socket.create_server(("127.0.0.1", port + 1)):
            return port
