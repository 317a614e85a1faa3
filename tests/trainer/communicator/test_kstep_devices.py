"""A geo lane whose parameters are on a device: the script's thread waits for no device, and what is
trained equals, to the bit, what is trained in main memory.

The device is emulated, except in the last tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.devices import (
    Flags,
    Late,
    Servers,
    assert_near,
    batches,
    joined,
    loss_of,
    net,
    on_a_device,
    train,
)
from tests.support.eager_modes import strategy_of
from trainer import fleet
from trainer.communicator.communicator import Communicator, options_of
from trainer.senders.parameters import ParameterSlices
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.strategy.from_strategy import lanes_of

pytestmark = pytest.mark.usefixtures("finished")

SECONDS = 20.0
SYNCHRONISE = ("equal", "is_nonzero", "item", "_local_scalar_dense", "nonzero", "masked_select")


# ---- what the script's thread waits for ----


class Waits(TorchDispatchMode):
    """Operations of this thread for whose results a host waits."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in SYNCHRONISE:
            self._found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes each wait of this thread for a device, inside."""
    script, found = threading.current_thread(), list[str]()

    def waiting(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def waits(self: Any, *given: Any) -> Any:
            if threading.current_thread() is script:
                found.append(f"{kind.__name__}.{name}")
            return original(self, *given)

        patch.setattr(kind, name, waits)

    with monkeypatch.context() as patch:
        waiting(Late.Copy, "synchronize")
        waiting(Flags, "wait")
        waiting(ParameterSlices, "read")  # a blocking copy
        yield found


def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)


@pytest.mark.parametrize("configs", [{"k_steps": 2, "send_queue_size": 1}, {"k_steps": 3}])
def test_no_step_of_a_window_waits_for_the_device(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any]
) -> None:
    """No step and no forward behind it waits, whatever has arrived; a flush does."""
    on_this_device(monkeypatch)
    model = net()
    optimizer = joined(
        servers(2),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy_of(**configs),
    )
    lane = optimizer.communicator.lanes[0]
    with counted(monkeypatch) as found, Waits(found):
        for x, y in batches():
            loss_of(model, x, y).backward()
            optimizer.step()
            lane.wait_for_replies()
            lane.refresh()
        assert lane.step == len(batches()) // configs["k_steps"] and not found
        optimizer.flush()
    assert found, "a flush waits, and is counted"


# ---- what is trained ----


STEPS = 30  # an outlier is found after 22
REFUSED: dict[str, Any] = {"outlier_push": "refuse"}


def strided(count: int) -> torch.Tensor:
    """A vector of zeros that receives no values in place."""
    return torch.zeros(count, 2)[:, 0]


class Pair:
    """Two trainers of a vector, and a smaller one, on two servers; the messages of trainer 0 leave
    when they are let go.
    """

    def __init__(
        self,
        endpoints: str,
        make: Callable[[int], torch.Tensor],
        dtype: torch.dtype,
        **configs: Any,
    ) -> None:
        rule = Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
        strategy = strategy_of(**configs)
        sizes = {"w": 3000, "v": 7}
        name = str(dtype).removeprefix("torch.")
        plan = plan_parameters(
            [(variable, (size,), name, 0) for variable, size in sizes.items()],
            [rule],
            lanes=lanes_of(strategy),
            trainers=2,
            servers=2,
            min_block_size=1000,
        )
        self.hparams = {0: rule.hparams}
        self.values = [{v: make(size).to(dtype) for v, size in sizes.items()} for _ in range(2)]
        self.trainers = [
            Communicator(
                Deployment(plan, tuple(endpoints.split(",")), trainer_id=number),
                self.values[number],
                options=options_of(strategy),
            )
            for number in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(trainer.start) for trainer in self.trainers]:
                each.result(SECONDS)
        self.lane: Any = self.trainers[0].lanes[0]
        self._exchange, self._gate = self.lane._exchange, threading.Semaphore(0)
        self.lane._exchange = self._gated
        self._random = torch.Generator().manual_seed(5)

    def _gated(self, *given: Any) -> Any:
        assert self._gate.acquire(timeout=SECONDS)
        return self._exchange(*given)

    def let_go(self, messages: int = 1) -> None:
        """Lets messages of trainer 0 leave, and waits for the reply to the last of them."""
        replies = [reply for _, _, reply in self.lane._under_way if not reply.done()]
        for _ in range(messages):
            self._gate.release()
        replies[messages - 1].result(SECONDS)

    def step(self, number: int, scale: float = 1.0) -> None:
        """A step of one trainer's own optimizer."""
        for value in self.values[number].values():
            change = torch.randn(value.shape, generator=self._random) * scale
            value.add_(change.to(value.dtype))
        self.trainers[number].commit(self.hparams)

    def seen(self) -> list[torch.Tensor]:
        """The bits of both trainers' values."""
        return [
            value.contiguous().view(torch.int16).clone()
            for values in self.values
            for value in values.values()
        ]

    def close(self) -> list[torch.Tensor]:
        """Both leave, one after the other: the bits of what the servers have."""
        for _ in range(100):
            self._gate.release()
        for trainer in self.trainers:
            trainer.flush()
        served = [value.view(torch.int16) for value in self.trainers[0].served().values()]
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(trainer.leave) for trainer in self.trainers]:
                each.result(SECONDS)
        return served


def steps(both: Pair, event: Callable[[Pair, int], None]) -> list[torch.Tensor]:
    """Steps of both, in one order: replies come while later changes are under way.

    Args:
        event: called before the steps of each number.
    """
    seen: list[torch.Tensor] = []
    for number in range(STEPS):
        event(both, number)
        both.step(0)
        if number > 0:
            both.let_go()
        both.step(1)
        both.trainers[1].flush()
        seen += both.seen()
    return seen + both.close() + both.seen()


def plain(both: Pair, number: int) -> None:
    """Nothing else happens."""


def written(both: Pair, number: int) -> None:
    """The script writes, behind torch's back too."""
    if number % 7 == 5:
        both.values[0]["w"].data.mul_(0.5)
        both.values[0]["v"].fill_(3.0)


def not_finite(both: Pair, number: int) -> None:
    """A step brings a NaN, which the servers refuse."""
    if number in (4, 11):
        both.values[0]["w"][17] = float("nan")


def outlier(both: Pair, number: int) -> None:
    """A step is refused as an outlier."""
    if number == STEPS - 4:
        both.values[0]["w"].mul_(1e6)


@pytest.mark.parametrize("queue", [2, 4])
@pytest.mark.parametrize(
    ("event", "make", "dtype", "configs"),
    [
        (plain, torch.zeros, torch.float32, {}),
        (plain, strided, torch.float32, {}),
        (plain, torch.zeros, torch.bfloat16, {}),
        (written, torch.zeros, torch.float32, {}),
        (not_finite, torch.zeros, torch.float32, {"nonfinite": "refuse"}),
        (outlier, torch.zeros, torch.float32, REFUSED),
    ],
)
def test_on_a_device_it_is_trained_as_in_main_memory(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    event: Callable[[Pair, int], None],
    make: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    configs: dict[str, Any],
    queue: int,
) -> None:
    """Every value after every step, and those of the servers, to the bit."""
    configs = {"k_steps": 1, "send_queue_size": queue, **configs}
    here = steps(Pair(servers(2), make, dtype, **configs), event)
    on_this_device(monkeypatch)
    there = steps(Pair(servers(2), make, dtype, **configs), event)

    assert len(here) == len(there) > STEPS
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert torch.equal(one, other), number


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("configs", [{"k_steps": 2, "send_queue_size": 1}, {"k_steps": 3}])
def test_on_a_gpu_no_step_of_a_window_waits_for_it(
    servers: Servers, configs: dict[str, Any]
) -> None:
    """torch raises where a host would wait; what is trained is what plain torch trains there."""
    model, reference = net("cuda:0"), net("cuda:0")
    data = [(x.to("cuda:0"), y.to("cuda:0")) for x, y in batches()]
    plainly = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = joined(
        servers(2),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy_of(**configs),
    )
    train(model, optimizer, data)  # kernels and memory of the first steps
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, data)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    fleet.finish()

    assert_near(model, train(reference, plainly, data * 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_that_moves_to_a_gpu_goes_on_there(servers: Servers) -> None:
    """With changes that have not been sent, and replies that have not been taken in."""
    model, reference = net(), net()
    optimizer = joined(
        servers(2),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy_of(k_steps=2),
    )
    train(model, optimizer, batches()[:5])
    train(model.to("cuda:0"), optimizer, batches()[5:])
    fleet.finish()

    plainly = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert_near(model, train(reference, plainly, batches()))
