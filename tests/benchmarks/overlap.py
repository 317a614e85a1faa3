"""Rows: how much of the wire a trainer hides behind the work of its device, which is emulated: see
overlap_roles.py.

A step cannot be shorter than its work, nor than its bytes take on the wire: 1.0 is perfect, and
2.0, where both take equally long, is one after the other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from ctr_data import BATCH, DIM, SLOTS
from harness import Contender, Promise, Row, alternate, timed
from overlap_roles import AHEAD, CONFIGS
from peers import raw_exchange, receive_into
from processes import Peer, peers, server

DENSE_BYTES, BESIDE_TABLES_BYTES = 16_000_000, 1_320_000
WIRE = (
    "the longer of the device's work, c, and w, the same bytes over raw sockets one way after the "
    "other"
)
SETTING = (
    "1 trainer, 1 server, tcp, SGD, 1 thread each; 8 layers on an emulated device, of which work "
    "and copies take time and no processor"
)
OF = {
    "dense": f"{SETTING}; 16 MB",
    "tables": f"{SETTING}; 1.3 MB, and 26 x 512 ids of 16 floats, Zipf 1.2 over 10 M ids",
}
RUN_SECONDS = 0.8  # of a run: the last steps' wire, which nothing hides, is a small part
WORK = {"c = w": 0.0, "c = 10 ms": 0.01, "c = 20 ms": 0.02, "c = 40 ms": 0.04}  # seconds
TARGETS = {  # at c = w
    ("dense", "async"): 1.15,
    ("dense", "sync, overlap"): 1.65,
    ("tables", f"async{AHEAD}"): 1.4,
}
MODES = {
    "dense": tuple(CONFIGS),
    "tables": ("sync", f"sync{AHEAD}", "async", f"async{AHEAD}", "k-step"),
}
NAMED = {
    (kind, mode, work): Promise(
        f"overlap/{'tables ' if kind == 'tables' else ''}{mode}, {work}",
        WIRE,
        TARGETS.get((kind, mode)) if work == "c = w" else None,
        most=True,
        setting=OF[kind] + ("; a window of 4 steps" if mode == "k-step" else ""),
    )
    for kind, modes in MODES.items()
    for mode in modes
    for work in WORK
}
PROMISES = tuple(NAMED.values())


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    for kind, modes in MODES.items():
        for mode in modes:
            works = {work: NAMED[kind, mode, work] for work in WORK}
            if chosen := {work: each for work, each in works.items() if each in wanted}:
                yield from _of_mode(kind, mode, chosen, runs, tiny)


def _of_mode(
    kind: str, mode: str, chosen: Mapping[str, Promise], runs: int, tiny: bool
) -> Iterator[Row]:
    size = BESIDE_TABLES_BYTES if kind == "tables" else DENSE_BYTES
    wire = [0.0]  # milliseconds, of the last run
    with ExitStack() as stack:
        raw = timed(stack.enter_context(_exchange(size, kind == "tables")))

        def transfer() -> float:
            wire[0] = raw()
            return wire[0]

        _, endpoint = stack.enter_context(server("tcp"))
        trainer = Peer("emulated", endpoint, mode, kind, size)
        stack.enter_context(peers(trainer))
        contenders: dict[str, Contender] = {"wire": transfer}
        contenders |= {work: _step(trainer, WORK[work], wire, tiny) for work in chosen}
        medians = alternate(contenders, runs)
    for work, promise in chosen.items():
        bound = max(WORK[work] * 1e3, medians["wire"])
        yield Row(promise, medians[work], bound, runs)


def _step(trainer: Peer, seconds: float, wire: list[float], tiny: bool) -> Contender:
    """Milliseconds a step with so much work; 0: as much as the wire takes."""
    steps = 3 if tiny else round(RUN_SECONDS / max(seconds, 0.01))

    def run() -> float:
        work = seconds or wire[0] / 1e3
        return float(trainer.ask(f"{work:.6f} {steps}")) / steps * 1e3

    return run


@contextmanager
def _exchange(size: int, tables: bool) -> Iterator[Callable[[], None]]:
    """Moves the bytes of a step both ways over raw sockets, once a call."""
    dense = memoryview(bytearray(size))
    ids, rows = SLOTS * BATCH * 8, SLOTS * BATCH * DIM * 4
    asked = [length.to_bytes(8, "little") + bytes(length) for length in (ids, ids + rows)]
    answered = [memoryview(bytearray(length)) for length in (rows, 1)]
    with ExitStack() as stack:
        values = stack.enter_context(_connected(Peer("raw", size)))
        lookups = stack.enter_context(_connected(Peer("answers", rows, 1))) if tables else None

        def move() -> None:
            for message, answer in zip(asked, answered, strict=True) if lookups else ():
                assert lookups is not None, "there are tables"
                lookups.sendall(message)
                receive_into(lookups, answer)
            raw_exchange(values, [dense], [dense])

        yield move


@contextmanager
def _connected(peer: Peer) -> Iterator[socket.socket]:
    """A connection to a peer, which says its port."""
    with peers(peer) as (port,):
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
