"""What a mode's settings do in a program, shown on a server that is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.eager_modes import Held, eventually
from trainer import Executor
from trainer.communicator.communicator import Communicator
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture


class Vector(nn.Module):
    """Eight numbers ``w``; the loss is minus their product with ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = -(self.w * x).sum(1).mean()
        return result


class Programs:
    """A trainer's programs over a :class:`Vector` under SGD with rate 1: integers in, integers out.

    Fields are those of the configuration.
    """

    def __init__(self, endpoints: str, trainer: int = 0, trainers: int = 1, **fields: Any) -> None:
        self.model = Vector()
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        main, startup = capture(self.model, lambda model, x: model(x), sgd, (torch.ones(2, 8),))
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=4, **fields))
        transpiler.transpile(trainer, main, endpoints, trainers, startup_program=startup)
        self.main = transpiler.get_trainer_program()
        self.executor = Executor()
        self.executor.run(transpiler.get_startup_program())

    def step(self, gradient: float = -1.0) -> None:
        self.executor.run(self.main, feed=(torch.full((2, 8), -gradient),))

    @property
    def w(self) -> float:
        return float(self.model.w[0].detach())

    @property
    def communicator(self) -> Communicator:
        return self.executor._runtimes[0].communicator

    def metric(self, name: str) -> float:
        return self.communicator.metrics()[name]

    def close(self) -> float:
        self.communicator.leave()
        self.executor.close()
        return self.w


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig()) as server:
        yield server


A_SYNC: dict[str, Any] = {"sync_mode": False}


def test_a_queue_does_not_wait_for_its_own_result(server: Server) -> None:
    """8 slots: 8 steps are taken while the server is held, and the ninth waits for a slot."""
    programs = Programs(server.endpoint, **A_SYNC, send_queue_size=8, soft_wait_ms=0)
    with ThreadPoolExecutor(1) as pool:
        with Held(server):
            for _ in range(8):
                programs.step()
            ninth = pool.submit(programs.step)
            eventually(lambda: programs.metric("steps_queued") == 8 and not ninth.done())
            assert server.job.installed().version == 0
        ninth.result(timeout=10)

    assert programs.close() == 9.0


def test_max_merge_var_num_merges_steps_of_a_program(server: Server) -> None:
    """Server held, 12 steps, 4: 3 messages arrive, and every step is in the sum, or in the mean."""
    for merge, result in (("sum", 12.0), ("mean", 3.0)):
        fields = {"send_queue_size": 16, "max_merge_var_num": 4, "send_wait_times": 100}
        programs = Programs(server.endpoint, **A_SYNC, **fields, soft_wait_ms=0, merge=merge)
        with Held(server):
            for _ in range(12):
                programs.step()
        programs.executor.flush()

        assert programs.metric("messages") == server.job.installed().version == 3
        assert programs.close() == result


def test_half_async_merges_own_steps_of_a_program(server: Server) -> None:
    """3: two steps send nothing, and the third sends the mean of all and waits for the result."""
    programs = Programs(server.endpoint, half_async=True, max_merge_var_num=3)
    seen = []
    for gradient in (-1.0, -2.0, -6.0, -1.0, -1.0, -1.0):
        programs.step(gradient)
        seen.append(programs.w)

    assert seen == [0.0, 0.0, 3.0, 3.0, 3.0, 4.0]
    assert programs.metric("messages") == 2
    programs.close()


def test_min_send_grad_num_before_recv_in_a_program(server: Server) -> None:
    """3: the answers to the first two messages bring no parameters."""
    programs = Programs(server.endpoint, **A_SYNC, min_send_grad_num_before_recv=3)
    seen = []
    for _ in range(6):
        programs.step()
        seen.append(programs.w)

    assert seen == [0.0, 0.0, 3.0, 3.0, 3.0, 6.0]
    programs.close()


def test_a_receiving_thread_brings_parameters_before_a_program_runs(server: Server) -> None:
    """They change on the server by another trainer's step, and arrive at the entry of a run."""
    fields = {**A_SYNC, "independent_recv_thread": True, "send_queue_size": 4}
    first, second = (Programs(server.endpoint, number, 2, **fields) for number in range(2))
    second.step()
    eventually(lambda: second.metric("steps_merged") == 1)
    threading.Event().wait(0.1)
    assert first.w == 0.0

    def run_sees() -> float:
        (loss,) = first.executor.run(first.main, feed=(torch.zeros(2, 8),), fetch_list=["w"])
        return float(loss[0])

    eventually(lambda: run_sees() == 1.0)
    first.close()
    second.close()


def test_no_program_runs_further_ahead_than_the_bound(server: Server) -> None:
    """Staleness 2: the third step of the fast trainer waits until the slow one has taken one."""
    fast, slow = (Programs(server.endpoint, n, 2, **A_SYNC, staleness=2) for n in range(2))
    fast.step()
    fast.step()
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(fast.step)
        eventually(lambda: server.job.installed().version == 3)
        threading.Event().wait(0.1)
        assert not third.done()
        slow.step()
        third.result(timeout=10)

    slow.close()
    fast.close()


def test_delay_compensation_of_a_program_takes_its_lambda(server: Server) -> None:
    """g + lambda (w - w_then) g g, with the lambda of ``dc_asgd``; ``enable_dc_asgd`` means 1."""
    for fields, result in (({"dc_asgd": 0.5}, -2.0), ({"enable_dc_asgd": True}, -10.0)):
        first, second = (Programs(server.endpoint, n, 2, **fields) for n in range(2))
        second.step(-4.0)  # w = 4, which the first has not seen
        first.step(-2.0)  # g = -2 + lambda * (4 - 0) * 4

        assert first.w == result
        second.close()
        first.close()


def test_a_held_server_takes_a_geo_delta_while_a_program_trains_on(server: Server) -> None:
    """The trainer's own steps continue while the delta travels."""
    programs = Programs(server.endpoint, k_steps=2, send_queue_size=4)
    with Held(server):
        for _ in range(5):
            programs.step()
        assert programs.w == 5.0 and server.job.installed().version == 0

    assert programs.close() == 5.0


def test_diloco_programs_average_what_changed(server: Server) -> None:
    """Two trainers that move 2 and 4 in two steps both go on from 3."""
    fields = {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}}
    each = [Programs(server.endpoint, number, 2, **fields) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            taken = [pool.submit(one.step, -1.0 - n) for n, one in enumerate(each)]
            for one in taken:
                one.result(timeout=10)
    assert [one.w for one in each] == [3.0, 3.0]
    for one in each:
        one.close()


def test_compression_of_a_program_halves_what_its_gradient_takes(server: Server) -> None:
    """``compression`` acts as that of ``fleet.distributed_optimizer``; integers stay exact."""
    plain = Programs(server.endpoint)
    plain.step()
    sent = plain.communicator.variable_bytes()["w"]["bytes_out"]
    plain.close()
    programs = Programs(server.endpoint, compression={"w": "bfloat16"})
    programs.step()

    halved = programs.communicator.variable_bytes()["w"]["bytes_out"]
    assert sent - halved == 16  # 8 gradients, of 2 bytes less
    assert programs.close() == 1.0
