"""What we are compared with, and trainers beside ours: each role is a process that answers lines.
See processes.py.

python tests/benchmarks/peers.py ROLE ARGUMENTS...
"""

from __future__ import annotations

import copy
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from jobs import SGD, wide_batch, wide_model
from processes import READY, memory_bytes
from torch import nn


def say(line: object) -> None:
    """One line of an answer."""
    print(line, flush=True)


def answer(ask: Callable[[str], object]) -> None:
    """Answers lines until there are no more."""
    for line in sys.stdin:
        say(ask(line.strip()))


def timed(
    step: Callable[[], object], settle: Callable[[], object] = lambda: None
) -> Callable[[str], float]:
    """Takes as many steps as a line says; the seconds that they took.

    Args:
        settle: waits for what steps have begun and not ended.
    """

    def run(line: str) -> float:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        settle()
        return time.perf_counter() - began

    return run


def held_memory() -> int:
    """Bytes that this process holds, without the holes of its heap: where malloc puts gradients
    differs from run to run, and these by more than all that a trainer needs.
    """
    from pserver.telemetry.memory import trim_memory

    trim_memory()
    return memory_bytes(os.getpid())


# ---- bytes ----


def raw_exchange(
    connection: socket.socket, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]
) -> None:
    """Sends all bytes, then receives as many."""
    for piece in outgoing:
        connection.sendall(piece)
    for piece in incoming:
        receive_into(connection, piece)


def receive_into(connection: socket.socket, piece: memoryview) -> None:
    """Receives exactly as many bytes."""
    while piece:
        got = connection.recv_into(piece)
        if not got:
            raise EOFError
        piece = piece[got:]


def raw(size: int, host: str = "127.0.0.1", connections: int = 1) -> None:
    """A TCP server that receives ``size`` bytes and sends as many back, each connection its
    part.
    """
    listener = socket.create_server((host, 0))
    say(f"{READY} {listener.getsockname()[1]}")
    accepted = [listener.accept()[0] for _ in range(connections)]
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(_give_back, accepted, [size // connections] * connections))


def raw_tls(size: int, folder: str) -> None:
    """The same over TLS, with the key of a server that a folder holds, on one connection."""
    from pserver.security.keys import Keys

    listener = socket.create_server(("127.0.0.1", 0))
    say(f"{READY} {listener.getsockname()[1]}")
    context = Keys(folder, ("server",)).server_context()
    connection = context.wrap_socket(listener.accept()[0], server_side=True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _give_back(connection, size)


def _give_back(connection: socket.socket, size: int) -> None:
    memory = memoryview(bytearray(size))
    try:
        while True:
            receive_into(connection, memory)
            connection.sendall(memory)
    except (EOFError, ConnectionError):
        return


def updater(count: int, elements: int) -> None:
    """A TCP server that takes SGD's step with the gradients that it receives, tensor by tensor, and
    sends the values back.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    say(f"{READY} {listener.getsockname()[1]}")
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradients, values = torch.zeros(count, elements), torch.zeros(count, elements)
    arriving, leaving = (memoryview(each.numpy()).cast("B") for each in (gradients, values))
    try:
        while True:
            receive_into(connection, arriving)
            for value, gradient in zip(values, gradients, strict=True):
                value.add_(gradient, alpha=-1e-3)
            connection.sendall(leaving)
    except (EOFError, ConnectionError):
        return


def raw_mover(host: str, port: int, connections: int, size: int) -> None:
    """The other end.  Lines: a number of exchanges."""
    opened = [socket.create_connection((host, port)) for _ in range(connections)]
    memory = [memoryview(bytearray(size // connections)) for _ in opened]
    say(READY)
    with ThreadPoolExecutor(connections) as pool:

        def step() -> None:
            list(pool.map(lambda each, part: raw_exchange(each, [part], [part]), opened, memory))

        answer(timed(step))


def mover(endpoint: str, count: int, elements: int) -> None:
    """A trainer of ours that pushes and pulls tensors over TCP.  Lines: a number of steps."""
    from jobs import trainer as joined

    with joined(endpoint, [elements] * count, "tcp") as ours:
        say(READY)
        answer(timed(ours.step))


def answers(*sizes: int) -> None:
    """A TCP server that answers each message with one of these sizes, in turn: messages are
    preceded by their length.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    say(f"{READY} {listener.getsockname()[1]}")
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    due = itertools.cycle(bytes(size) for size in sizes)
    length = memoryview(bytearray(8))
    memory = memoryview(bytearray(2**24))
    try:
        while True:
            receive_into(connection, length)
            receive_into(connection, memory[: int.from_bytes(length, "little")])
            connection.sendall(next(due))
    except (EOFError, ConnectionError):
        return


# ---- torch.distributed.rpc ----

_held: dict[int, torch.Tensor] = {}  # of the process that serves


def apply_and_return(numbers: list[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a parameter server on torch's rpc does: takes gradients, applies SGD, returns
    parameters.
    """
    for number, gradient in zip(numbers, gradients, strict=True):
        if number not in _held:
            _held[number] = torch.zeros_like(gradient)
        _held[number].add_(gradient, alpha=-1e-3)
    return [_held[number] for number in numbers]


def rpc(rank: int, port: int, tcp: int, count: int, elements: int) -> None:
    """One of two processes: 0 asks, "all" in one call or "each" in a call per tensor, 1 serves.

    ``tcp``: no other transport.
    """
    import torch.distributed.rpc as torch_rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    held = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = torch_rpc.TensorPipeRpcBackendOptions(**held)
    torch_rpc.init_rpc(f"peer{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    say(READY)
    if rank == 0:
        gradients = [torch.ones(elements) for _ in range(count)]
        parameters = [torch.zeros(elements) for _ in range(count)]

        def step(way: str) -> None:
            if way == "all":
                landed = torch_rpc.rpc_sync(
                    "peer1", apply_and_return, (list(range(count)), gradients)
                )
            elif way == "each":
                landed = [
                    torch_rpc.rpc_sync("peer1", apply_and_return, ([n], [g]))[0]
                    for n, g in enumerate(gradients)
                ]
            else:
                calls = [
                    torch_rpc.rpc_async("peer1", apply_and_return, ([n], [g]))
                    for n, g in enumerate(gradients)
                ]
                landed = [call.wait()[0] for call in calls]
            for parameter, value in zip(parameters, landed, strict=True):
                parameter.copy_(value)

        answer(lambda line: timed(lambda: step(line.split()[0]))(line.split()[1]))
    sys.stdin.read()
    os._exit(0)  # its shutdown would wait for the other, which ends at the same moment


# ---- training ----


def loop(model: nn.Module, optimizer: Any, width: int, rows: int = 16) -> Callable[[], None]:
    """One step of the ordinary loop, on the device of the model."""
    device = next(model.parameters()).device
    x, y = (each.to(device) for each in wide_batch(width, rows))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def plain(width: int) -> None:
    """The plain loop; "memory" says what the process holds."""
    model = wide_model(width)
    run = timed(loop(model, torch.optim.SGD(model.parameters(), **SGD), width))
    say(READY)
    answer(lambda line: held_memory() if line == "memory" else run(line))


def plain_on_gpu(width: int, rows: int, copied: int) -> None:
    """The plain loop on the first GPU.

    ``copied``: every step copies its gradients to the host and its parameters back, through pinned
    memory, as anything that updates them elsewhere has to.
    """
    model = wide_model(width).to("cuda:0")
    parameters = list(model.parameters())
    pinned = [torch.empty(each.shape, pin_memory=True) for each in parameters]
    step = loop(model, torch.optim.SGD(parameters, **SGD), width, rows)

    def copies() -> None:
        step()
        for host, parameter in zip(pinned, parameters, strict=True):
            assert parameter.grad is not None
            host.copy_(parameter.grad, non_blocking=True)
        torch.cuda.synchronize()
        with torch.no_grad():
            for host, parameter in zip(pinned, parameters, strict=True):
                parameter.copy_(host, non_blocking=True)

    run = timed(copies if copied else step, torch.cuda.synchronize)
    say(READY)
    answer(run)


def ddp(rank: int, world: int, host: str, port: int, width: int) -> None:
    """One rank of DistributedDataParallel on gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(wide_model(width))
    run = timed(loop(model, torch.optim.SGD(model.parameters(), **SGD), width))
    say(READY)
    answer(run)
    dist.destroy_process_group()


def data_parallel(rank: int, world: int, host: str, port: int, width: int) -> None:
    """One rank of our DataParallel."""
    from trainer import DataParallel, init_parallel_env
    from trainer.collective.world import leave_parallel_env
    from trainer.environment.environment import World

    World(rank, world, rank, host, port).enter()
    init_parallel_env()
    model = DataParallel(wide_model(width))
    run = timed(loop(model, torch.optim.SGD(model.parameters(), **SGD), width))
    say(READY)
    answer(run)
    leave_parallel_env()


def trainer(
    number: int,
    trainers: int,
    endpoints: str,
    transport: str,
    width: int,
    configs: str = "",
    device: str = "cpu",
    rows: int = 16,
) -> None:
    """One trainer of ours; ``configs`` is "" for sync, otherwise a_sync_configs as
    "key=number,...": with "overlap=1" alone for sync, too.

    Lines: a number of steps; "drain", which waits until every step has been applied; "memory".
    """
    from trainer import fleet
    from transpiler import DistributedStrategy

    os.environ["PSERVER_TRANSPORT"] = transport
    strategy = DistributedStrategy()
    strategy.a_sync = configs not in ("", "overlap=1")
    if configs:
        strategy.a_sync_configs = {
            key: value == "1" if key == "overlap" else int(value)
            for key, value in (pair.split("=") for pair in configs.split(","))
        }
    fleet.init(
        fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        ),
        strategy=strategy,
    )
    model = fleet.distributed_model(wide_model(width).to(device))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), **copy.copy(SGD)))
    settle = torch.cuda.synchronize if device != "cpu" else lambda: None
    run = timed(loop(model, optimizer, width, rows), settle)
    say(READY)

    def ask(line: str) -> object:
        if line == "memory":
            return held_memory()
        took = run(line)
        began = time.perf_counter()
        if configs:
            for lane in optimizer.communicator.lanes:
                lane.drain()
        return took + time.perf_counter() - began

    answer(ask)
    fleet.finish()


def sharded(*arguments: Any) -> None:
    """One rank of a sharded model."""
    from sharded_rank import sharded as rank

    rank(*arguments)


ROLES: dict[str, Callable[..., None]] = {
    "raw": raw,
    "raw_tls": raw_tls,
    "updater": updater,
    "raw_mover": raw_mover,
    "mover": mover,
    "answers": answers,
    "rpc": rpc,
    "plain": plain,
    "plain_on_gpu": plain_on_gpu,
    "ddp": ddp,
    "trainer": trainer,
    "data_parallel": data_parallel,
    "sharded": sharded,
}


def main(arguments: Sequence[str]) -> None:
    """Plays the role."""
    from ctr_roles import ROLES as CLICKS
    from movielens_roles import ROLES as FILMS
    from overlap_roles import ROLES as DEVICES

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    (ROLES | CLICKS | FILMS | DEVICES)[arguments[0]](
        *(int(word) if word.lstrip("-").isdigit() else word for word in arguments[1:])
    )


if __name__ == "__main__":
    import peers  # under this name functions are sent by torch's rpc, so both ends know them

    peers.main(sys.argv[1:])
