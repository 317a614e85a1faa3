"""Rows: a click model whose embeddings are on a server, beside plain torch and DDP; and rows pulled
and pushed, beside the same bytes and the same arithmetic.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from ctr_data import BATCH, DIM, ROWS, SLOTS
from harness import Contender, Promise, Row, alternate, timed
from peers import receive_into
from processes import Peer, cpu_seconds, peers, server
from transports import free_port

from pserver.table.gradient import RowGradient
from trainer.communicator.communicator import Communicator
from trainer.embedding.local_rows import LocalRows
from trainer.environment.environment import Connection
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table, Uniform
from transpiler.plan.plan import Deployment

COUNT = SLOTS * BATCH
SLOT_ROWS = 10_000  # of each moved embedding
MODEL = (
    "26 slots, batch 512, rows of 16, network of 400-400-1, Zipf 1.2 over 10 M ids, Adagrad, "
    "1 thread each"
)
ALONE = "the same model in plain torch, local nn.Embedding(sparse=True)"
EXCHANGE = Promise(
    "table/pull + push, tcp",
    "the same bytes through a bare socket, and the lookup and the update themselves",
    0.7,
    setting="1 trainer, 1 server, 26 x 512 different ids of 16 floats, Adagrad, 1 thread each",
)
STEPS = tuple(
    Promise(
        f"table/CTR async step, {transport}",
        ALONE,
        target,
        setting=f"1 trainer, 1 server, until every step is applied; {MODEL}",
    )
    for transport, target in (("shm", 1.0), ("tcp", 1.0))
)
KSTEP = Promise(
    "table/CTR k-step",
    "the same model in plain torch with SGD",
    0.95,
    setting=f"1 trainer, 1 server, k = 10, SGD in place of Adagrad; {MODEL}",
)
SLOTWISE = Promise(
    "table/CTR sync, a table for each slot",
    "all slots in one table",
    0.8,
    setting=f"1 trainer, 1 server, sync; {MODEL}",
)
MOVED = Promise(
    "table/CTR sync, 52 moved embeddings",
    "two tables for all slots: weights and factors",
    0.75,
    setting=(
        "1 trainer, 1 server, sync, an nn.Embedding of weights and one of factors for each of 26 "
        "slots of 10,000 ids, moved by pattern; network of 400-400-1, batch 512, 1 thread each"
    ),
)
CPU = Promise(
    "table/CPU per million samples",
    f"{ALONE}, one process",
    1.4,
    "s",
    True,
    f"2 trainers, 1 server, all processes; {MODEL}",
)
BESIDE = {
    "async": "everything on the server, async",
    "sync": "everything on the server, sync",
    "ddp": "DDP, rows not exchanged",
}
MIXED = tuple(
    Promise(
        f"mixed/CTR step, {name}",
        against,
        None,
        setting=f"2 trainers, 1 server: rows async, the network averaged; {MODEL}",
    )
    for name, against in BESIDE.items()
)
PROMISES = (EXCHANGE, *STEPS, KSTEP, SLOTWISE, MOVED, CPU, *MIXED)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    rows, steps = (26_000, 5) if tiny else (ROWS, 40)
    if EXCHANGE in wanted:
        yield _exchange(runs)
    if chosen := [promise for promise in STEPS if promise in wanted]:
        transports = {promise.name.rpartition(" ")[2]: promise for promise in chosen}
        alone = {"alone": [Peer("ctr_plain", 0, rows)]}
        with _cast(alone, {name: (1, name, "async") for name in transports}, rows) as groups:
            medians = alternate({name: _turn(group, steps) for name, group in groups.items()}, runs)
        yield from (
            Row(promise, medians[name], medians["alone"], runs)
            for name, promise in transports.items()
        )
    if KSTEP in wanted:
        alone = {"alone": [Peer("ctr_plain", 0, rows, "sgd")]}
        yield _pair(KSTEP, alone, {"ours": (1, "auto", "k_step", "sgd")}, rows, steps, runs)
    if SLOTWISE in wanted:
        one, many = (1, "auto", "sync"), (1, "auto", "sync", "adagrad", SLOTS)
        yield _pair(SLOTWISE, {}, {"alone": one, "ours": many}, rows, steps, runs)
    if MOVED in wanted:
        yield _moved(steps, runs)
    if CPU in wanted:
        yield _cpu(rows, steps, runs)
    if chosen := [promise for promise in MIXED if promise in wanted]:
        yield from _mixed(chosen, rows, steps, runs)


# ---- whole models ----

# how many trainers, over which transport, in which mode; and further arguments of ctr_trainer
Ours = tuple[int, str, str, *tuple[object, ...]]


def _pair(
    promise: Promise,
    others: Mapping[str, Sequence[Peer]],
    ours: Mapping[str, Ours],
    rows: int,
    steps: int,
    runs: int,
) -> Row:
    """One row of two contenders, "ours" and "alone"."""
    with _cast(others, ours, rows) as groups:
        medians = alternate({name: _turn(group, steps) for name, group in groups.items()}, runs)
    return Row(promise, medians["ours"], medians["alone"], runs)


@contextmanager
def _cast(
    others: Mapping[str, Sequence[Peer]], ours: Mapping[str, Ours], rows: int
) -> Iterator[dict[str, Sequence[Peer]]]:
    """Processes that are ready, by contender."""
    with ExitStack() as stack:
        groups = dict(others)
        for name, (trainers, transport, place, *further) in ours.items():
            _, endpoint = stack.enter_context(server(transport))
            groups[name] = [
                Peer("ctr_trainer", number, trainers, endpoint, transport, place, rows, *further)
                for number in range(trainers)
            ]
        stack.enter_context(peers(*(peer for group in groups.values() for peer in group)))
        yield groups


def _turn(group: Sequence[Peer], steps: int) -> Contender:
    """Milliseconds a step, of the slowest."""

    def run() -> float:
        for peer in group:
            peer.tell(steps)
        return max(float(peer.heard().split()[0]) for peer in group) / steps * 1e3

    return run


def _mixed(chosen: Sequence[Promise], rows: int, steps: int, runs: int) -> Iterator[Row]:
    port, names = free_port(), {promise.name.rpartition(" ")[2]: promise for promise in chosen}
    others = (
        {"ddp": [Peer("ctr_ddp", rank, 2, port, rows) for rank in range(2)]}
        if "ddp" in names
        else {}
    )
    ours = {
        place: (2, "auto", place)
        for place in ("mixed", "async", "sync")
        if place == "mixed" or place in names
    }
    with _cast(others, ours, rows) as groups:
        medians = alternate({name: _turn(group, steps) for name, group in groups.items()}, runs)
    yield from (
        Row(promise, medians["mixed"], medians[name], runs) for name, promise in names.items()
    )


def _moved(steps: int, runs: int) -> Row:
    with ExitStack() as stack:
        groups = {}
        for name, moved in (("alone", 0), ("ours", 1)):
            _, endpoint = stack.enter_context(server())
            groups[name] = [Peer("ctr_moved", endpoint, SLOT_ROWS * SLOTS, moved)]
        stack.enter_context(peers(*(peer for group in groups.values() for peer in group)))
        medians = alternate({name: _turn(group, steps) for name, group in groups.items()}, runs)
    return Row(MOVED, medians["ours"], medians["alone"], runs)


def _cpu(rows: int, steps: int, runs: int) -> Row:
    """CPU seconds of all processes for a million samples; what they compute before the first step
    does not count.
    """
    with ExitStack() as stack:
        number, endpoint = stack.enter_context(server())
        ours = [Peer("ctr_trainer", rank, 2, endpoint, "auto", "async", rows) for rank in range(2)]
        alone = Peer("ctr_plain", 0, rows)
        stack.enter_context(peers(*ours, alone))
        contenders = {
            "ours": _spending(ours, [number], steps),
            "alone": _spending([alone], [], steps * 2),
        }
        medians = alternate(contenders, runs)
    samples = steps * 2 * BATCH / 1e6
    return Row(CPU, medians["ours"] / samples, medians["alone"] / samples, runs)


def _spending(group: Sequence[Peer], servers: Sequence[int], steps: int) -> Contender:
    """CPU seconds of a turn."""
    pids = [*(peer.pid for peer in group), *servers]

    def run() -> float:
        before = sum(map(cpu_seconds, pids))
        _turn(group, steps)()
        return sum(map(cpu_seconds, pids)) - before

    return run


# ---- rows alone ----


def _exchange(runs: int) -> Row:
    table = Table("emb", DIM, (Segment(0, DIM, 0),), initial=Uniform(-0.01, 0.01))
    plan = plan_parameters(
        [], [Rule("adagrad", {"lr": 0.05})], trainers=1, servers=1, tables=[table]
    )
    up, down = COUNT * 8, COUNT * DIM * 4
    bare = Peer("answers", down, 1)
    with ExitStack() as stack:
        (port,) = stack.enter_context(peers(bare))
        _, endpoint = stack.enter_context(server("tcp"))
        joined = Communicator(
            Deployment(plan, (endpoint,), trainer_id=0), {}, (), Connection(transport="tcp")
        )
        joined.start()
        stack.callback(joined.leave)
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        messages = [size.to_bytes(8, "little") + bytes(size) for size in (up, up + down)]
        arrived = [memoryview(bytearray(size)) for size in (down, 1)]
        ids, rows = torch.randperm(COUNT * 10)[:COUNT], torch.ones(COUNT, DIM)
        local, rules = LocalRows(table), [(0, DIM, Rule("adagrad", {"lr": 0.05}))]

        def exchange() -> None:
            for sent, place in zip(messages, arrived, strict=True):
                connection.sendall(sent)
                receive_into(connection, place)
            local.pull(ids)
            local.update(RowGradient(ids, rows.clone(), None), rules)

        source = joined.rows_of("emb")

        def ours() -> None:
            source.pull(ids)
            joined.send_rows({"emb": RowGradient(ids, rows, None)})
            joined.commit({0: {"lr": 0.05}})

        medians = alternate({"ours": timed(ours), "bare": timed(exchange)}, runs)
    return Row(EXCHANGE, medians["ours"], medians["bare"], runs)
