"""What the settings of an update mode do, shown on a server that is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pserver.client import stream
from pserver.client.channel import Channel
from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.eager_modes import Held, eventually, strategy_of
from trainer.communicator.communicator import Communicator, options_of
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.strategy.from_strategy import lanes_of


class Bare:
    """A communicator over one vector ``w``, SGD with rate 1: integers in, integers out."""

    def __init__(self, endpoints: str, trainer: int = 0, trainers: int = 1, **configs: Any) -> None:
        self.w = torch.zeros(8)
        rule = Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
        self.rows = {0: rule.hparams}
        strategy = strategy_of(**configs) if configs else None
        named = [("w", (8,), "float32", 0)]
        count = len(endpoints.split(","))
        plan = plan_parameters(
            named,
            [rule],
            lanes=lanes_of(strategy),
            trainers=trainers,
            servers=count,
            min_block_size=4,
        )
        self.communicator = Communicator(
            Deployment(plan, tuple(endpoints.split(",")), trainer_id=trainer),
            {"w": self.w},
            options=options_of(strategy),
        )
        self.communicator.start()

    def step(self, gradient: float = -1.0) -> None:
        self.communicator.send_whole({"w": torch.full((8,), gradient)})
        self.communicator.commit(self.rows)

    def metric(self, name: str) -> float:
        return self.communicator.metrics()[name]

    def close(self) -> float:
        self.communicator.leave()
        return float(self.w[0])


@contextmanager
def nothing_leaves(channel: Channel) -> Iterator[None]:
    """While it lasts the thread that sends on a channel stands still."""
    free, send = threading.Event(), channel._send

    def held(number: int, frame: Any) -> None:
        free.wait(timeout=10.0)
        send(number, frame)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "DIRECT_BYTES", -1)  # that thread sends all
        patched.setattr(channel, "_send", held)
        yield
        free.set()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig()) as server:
        yield server


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_gradient_that_does_not_fit_leaves_nothing_of_the_step(server: Server, mode: str) -> None:
    """It is refused before the step begins; the next one is as if it had never come."""
    bare = Bare(server.endpoint, modes={"*": mode})
    for wrong in (torch.ones(8, dtype=torch.float64), torch.ones(7), torch.ones(8).to_sparse()):
        with pytest.raises(ValueError, match="the gradient of 'w'"):
            bare.communicator.send_whole({"w": wrong})
        assert not bare.communicator.has_sent(0)
    bare.step()
    bare.communicator.lanes[0].drain()

    assert bare.close() == 1.0


@pytest.mark.observes("a_sync_configs.max_merge_var_num")
def test_max_merge_var_num_merges_steps(server: Server) -> None:
    """Server held, 12 steps, 4: 3 messages arrive, and every step is in the sum."""
    bare = Bare(server.endpoint, max_merge_var_num=4, send_wait_times=100)
    with Held(server):
        for _ in range(12):
            bare.step()
    bare.communicator.lanes[0].drain()

    assert bare.metric("messages") == 3
    assert server.job.installed().version == 3
    assert bare.close() == 12.0


@pytest.mark.observes("a_sync_configs.soft_wait_ms")
def test_soft_wait_ms_bounds_how_far_a_trainer_runs_ahead(server: Server) -> None:
    """Server held, a queue with room: a step waits so long for the answer to the one before, and
    with 0 not at all.
    """
    seconds = {}
    for wait in (0, 1000):
        bare = Bare(server.endpoint, soft_wait_ms=wait)
        with Held(server):
            bare.step()
            began = time.monotonic()
            bare.step()
            seconds[wait] = time.monotonic() - began
        bare.communicator.flush()
        assert bare.w[0] == 2.0
        bare.close()

    assert seconds[1000] >= 0.95 and seconds[0] < seconds[1000]


@pytest.mark.observes("a_sync_configs.merge")
def test_merge_is_a_sum_or_a_mean(server: Server) -> None:
    """SGD sums its own steps unless told otherwise; ``merge`` decides."""
    bare = Bare(server.endpoint, max_merge_var_num=4, send_wait_times=100, merge="mean")
    with Held(server):
        for _ in range(12):
            bare.step()

    assert bare.close() == 3.0


@pytest.mark.observes("a_sync_configs.send_queue_size")
def test_send_queue_size_blocks_the_step_that_finds_no_slot(server: Server) -> None:
    """2: the third step blocks, and the metric shows it."""
    bare = Bare(server.endpoint, send_queue_size=2)
    with ThreadPoolExecutor(1) as pool:
        with Held(server):
            bare.step()
            bare.step()
            before, begun = bare.metric("blocked_seconds"), threading.Event()
            third = pool.submit(lambda: (begun.set(), bare.step()))
            assert begun.wait(10)
            eventually(lambda: bare.metric("steps_queued") == 2 and not third.done())
            threading.Event().wait(0.1)
            assert not third.done()
        third.result(timeout=10)

    assert bare.metric("blocked_seconds") > before + 0.01  # its thread may have begun late
    assert bare.close() == 3.0


@pytest.mark.observes("a_sync_configs.thread_pool_size")
def test_thread_pool_size_bounds_the_sends_in_flight() -> None:
    """1: while the first server's message leaves, the second one's has not; 2: it has."""
    for size, expected in ((1, 0), (2, 1)):
        with Server(ServerConfig()) as first, Server(ServerConfig()) as second:
            bare = Bare(
                f"{first.endpoint},{second.endpoint}", thread_pool_size=size, send_queue_size=4
            )
            lane = second.job.installed().lanes[0]
            with nothing_leaves(bare.communicator.clients[0].channels[0]):
                bare.step()
                if expected:
                    eventually(lambda lane=lane: lane.queued == 1)
                threading.Event().wait(0.1)
                assert lane.queued == expected
            assert bare.close() == 1.0


@pytest.mark.observes("a_sync_configs.send_wait_times")
def test_send_wait_times_0_does_not_wait_to_merge(server: Server) -> None:
    """A step that finds the sender idle leaves at once."""
    bare = Bare(server.endpoint, max_merge_var_num=4, send_wait_times=0, send_queue_size=4)
    for number in range(1, 4):
        bare.step()
        eventually(
            lambda number=number: (
                bare.metric("messages") == number and bare.metric("steps_queued") == 0
            )
        )

    assert bare.close() == 3.0


@pytest.mark.observes("a_sync_configs.independent_recv_thread")
def test_independent_recv_thread_brings_parameters_without_a_send(server: Server) -> None:
    """They change on the server by another trainer's step, and arrive here between steps only."""
    first = Bare(server.endpoint, 0, 2, independent_recv_thread=True)
    second = Bare(server.endpoint, 1, 2, independent_recv_thread=True)
    second.step()
    eventually(lambda: second.metric("steps_merged") == 1)
    threading.Event().wait(0.3)
    assert first.w[0] == 0.0

    def arrived() -> bool:
        first.communicator.refresh()
        return float(first.w[0]) == 1.0

    eventually(arrived)
    first.close()
    second.close()


@pytest.mark.parametrize("call", ["flush", "push", "pull"])
def test_fetched_values_do_not_come_behind_newer_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The thread that has fetched them stands still while the script's own call receives newer
    values; once it goes on, they are out of date.
    """
    bare = Bare(server.endpoint, independent_recv_thread=True)
    (lane,) = bare.communicator.lanes
    fetched, held, pull = threading.Semaphore(0), threading.Semaphore(0), lane._pipeline.pull

    def slow(*args: Any, **kwargs: Any) -> Any:
        pulled = pull(*args, **kwargs)
        if threading.current_thread() in lane._threads:
            fetched.release()
            assert held.acquire(timeout=10.0)
        return pulled

    monkeypatch.setattr(lane._pipeline, "pull", slow)
    assert fetched.acquire(timeout=10.0)  # values of 0
    if call == "push":
        bare.w.fill_(1.0)
    else:
        bare.step()
        bare.communicator.drain()
    getattr(bare.communicator, call)()
    assert bare.w[0] == 1.0
    held.release()
    assert fetched.acquire(timeout=10.0)  # so the ones before are staged, or dropped
    bare.communicator.refresh()

    assert bare.w[0] == 1.0
    held.release(1000)
    assert bare.close() == 1.0


@pytest.mark.observes("a_sync_configs.min_send_grad_num_before_recv")
def test_min_send_grad_num_before_recv_fetches_that_seldom(server: Server) -> None:
    """3: the answers to the first two messages bring no parameters."""
    bare = Bare(server.endpoint, send_queue_size=1, min_send_grad_num_before_recv=3)
    seen = []
    for _ in range(6):
        bare.step()
        seen.append(float(bare.w[0]))

    assert seen == [0.0, 0.0, 3.0, 3.0, 3.0, 6.0]
    bare.close()


@pytest.mark.observes("a_sync_configs.staleness")
def test_no_trainer_runs_further_ahead_than_the_bound(server: Server) -> None:
    """Staleness 2: the third step of the fast trainer waits until the slow one has taken its
    first.
    """
    fast, slow = Bare(server.endpoint, 0, 2, staleness=2), Bare(server.endpoint, 1, 2, staleness=2)
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


@pytest.mark.observes("a_sync_configs.dc_asgd")
def test_delay_compensation_adds_lambda_times_the_drift(server: Server) -> None:
    """g + lambda (w - w_then) g g, with w_then as this trainer last received it."""
    first, second = (
        Bare(server.endpoint, number, 2, dc_asgd=0.5, send_queue_size=1) for number in range(2)
    )
    second.step(-4.0)  # w = 4, which the first has not seen
    first.step(-2.0)  # g = -2 + 0.5 * (4 - 0) * 4 = 6

    assert first.w[0] == -2.0
    second.close()
    first.close()


@pytest.mark.observes("a_sync_configs.k_steps")
def test_a_held_server_takes_a_geo_delta_while_training_goes_on(server: Server) -> None:
    """The trainer's own steps continue while the delta travels, and what the others changed moves
    it.
    """
    first, second = (Bare(server.endpoint, number, 2, k_steps=2) for number in range(2))

    def local(bare: Bare, change: float) -> None:
        bare.w += change
        bare.communicator.commit(bare.rows)

    with Held(server):
        local(first, 1.0)
        local(first, 1.0)  # delta = 2 / 2 leaves
        local(first, 1.0)  # and the trainer goes on
        assert first.w[0] == 3.0
    first.communicator.lanes[0].wait_for_replies()
    local(second, 10.0)
    local(second, 10.0)  # delta = 10
    second.communicator.lanes[0].drain()
    assert server.job.installed().slices.values["w"][0] == 11.0
    local(first, 0.0)  # delta = (3 - 1) / 2 = 1; z = 12, of which 10 is new here
    first.communicator.lanes[0].drain()

    assert first.w[0] == 3.0 + 10.0
    second.close()
    first.close()


def test_send_queue_size_bounds_the_deltas_on_their_way(server: Server) -> None:
    """2: with the server held, two deltas leave, and the third waits for the first; what comes back
    late is put right.
    """
    bare = Bare(server.endpoint, k_steps=1, send_queue_size=2)

    def local() -> None:
        bare.w += 1.0
        bare.communicator.commit(bare.rows)

    with ThreadPoolExecutor(1) as pool:
        with Held(server):
            local()
            local()
            third = pool.submit(local)
            threading.Event().wait(0.1)
            assert not third.done()
        third.result(timeout=10)
    bare.communicator.flush()

    assert bare.w[0] == 3.0
    assert server.job.installed().slices.values["w"][0] == 3.0
    bare.close()


@pytest.mark.observes("a_sync_configs.outer_optimizer")
def test_two_trainers_diloco_go_on_from_the_same_point(server: Server) -> None:
    """x := z: the outer optimizer steps with the mean of what the trainers changed."""
    pair = [
        Bare(server.endpoint, n, 2, k_steps=2, outer_optimizer={"type": "sgd", "lr": 0.5})
        for n in range(2)
    ]

    def run(bare: Bare, change: float) -> None:
        for _ in range(2):
            bare.w += change
            bare.communicator.commit(bare.rows)

    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(run, bare, change) for bare, change in zip(pair, (1.0, 3.0), strict=True)
        ]:
            done.result(timeout=10)

    assert [float(bare.w[0]) for bare in pair] == [2.0, 2.0]  # 0 + 0.5 * (2 + 6) / 2
    for bare in pair:
        bare.close()
