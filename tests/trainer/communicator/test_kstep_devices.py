"""K-step lanes whose parameters are on a device: the script's thread waits for no device, but where
it waits for servers, and what is trained equals, to the bit, what is trained in main memory.

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
from tests.support.eager_modes import eventually, strategy_of
from trainer import fleet
from trainer.communicator.communicator import Communicator, options_of
from trainer.senders.parameters import ParameterSlices
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.strategy.from_strategy import lanes_of

pytestmark = pytest.mark.usefixtures("finished")

SECONDS = 20.0
OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
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


@pytest.mark.parametrize("outliers", ["off", "refuse"])
def test_a_diloco_window_waits_for_the_device_at_its_end_alone(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, outliers: str
) -> None:
    """When all copies have begun, and for nothing behind the servers' answer."""
    on_this_device(monkeypatch)
    begun, waits = Late.to_host, list[list[str]]()

    def begins(self: Late, source: torch.Tensor, target: torch.Tensor) -> Late.Copy:
        found.append("begin")
        return begun(self, source, target)

    monkeypatch.setattr(Late, "to_host", begins)
    model = net()
    optimizer = joined(
        servers(2),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy_of(k_steps=2, outer_optimizer=OUTER, outlier_push=outliers),
    )
    lane = optimizer.communicator.lanes[0]
    with counted(monkeypatch) as found, Waits(found):
        for x, y in batches():
            loss_of(model, x, y).backward()
            optimizer.step()
            lane.refresh()
            waits.append(list(found))
            found.clear()
    slices, measured = len(lane._slices.names), outliers != "off"
    copies = (1 + measured) * slices
    at_the_end = ["begin"] * copies + ["Copy.synchronize"] * copies
    at_the_end += ["_local_scalar_dense"] * slices * measured  # norms, computed in main memory
    assert waits == [[], at_the_end] * (len(batches()) // 2)


# ---- what is trained ----


STEPS = 30  # an outlier is found after 22
REFUSED: dict[str, Any] = {"outlier_push": "refuse"}


def strided(count: int) -> torch.Tensor:
    """A vector of zeros that receives no values in place."""
    return torch.zeros(count, 2)[:, 0]


class Pair:
    """Two trainers on two servers of a vector, a smaller one, and two synced buffers."""

    def __init__(
        self,
        endpoints: str,
        make: Callable[[int], torch.Tensor],
        dtype: torch.dtype,
        **configs: Any,
    ) -> None:
        rule = Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
        strategy = strategy_of(**{"buffers": "mean", **configs})
        sizes = {"w": 3000, "v": 7, "mean": 2000}
        name = str(dtype).removeprefix("torch.")
        plan = plan_parameters(
            [
                *(
                    (each, (size,), name, 0 if each != "mean" else None)
                    for each, size in sizes.items()
                ),
                ("count", (), "int64", None),
            ],
            [rule],
            lanes=lanes_of(strategy),
            trainers=2,
            servers=2,
            min_block_size=1000,
        )
        self.hparams = {0: rule.hparams}
        self.values = [
            {
                **{each: make(size).to(dtype) for each, size in sizes.items()},
                "count": make(1)[0].to(torch.int64),
            }
            for _ in range(2)
        ]
        self.trainers = [
            Communicator(
                Deployment(plan, tuple(endpoints.split(",")), trainer_id=number),
                self.values[number],
                options=options_of(strategy),
            )
            for number in range(2)
        ]
        self.both(lambda number: self.trainers[number].start())
        self.lane: Any = self.trainers[0].lanes[0]
        self._random = [torch.Generator().manual_seed(5 + number) for number in range(2)]

    def both(self, play: Callable[[int], Any]) -> None:
        """Both trainers at once."""
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(play, number) for number in range(2)]:
                each.result(SECONDS)

    def step(self, number: int) -> None:
        """A step of one trainer's own optimizer; every other one has a forward that changes
        buffers.
        """
        values, trainer = self.values[number], self.trainers[number]
        for name in ("w", "v", "mean") if trainer.step % 2 else ("w", "v"):
            change = torch.randn(values[name].shape, generator=self._random[number])
            values[name].add_(change.to(values[name]))
        values["count"] += trainer.step % 2
        trainer.commit(self.hparams)

    def seen(self) -> list[torch.Tensor]:
        """The bits of both trainers' values."""
        return [bits(value) for values in self.values for value in values.values()]

    def close(self) -> list[torch.Tensor]:
        """Both leave: the bits of what the servers have."""
        for trainer in self.trainers:
            trainer.flush()
        served = [bits(value) for value in self.trainers[0].served().values()]
        self.both(lambda number: self.trainers[number].leave())
        return served


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as integers."""
    return tensor.cpu().contiguous().view(-1).view(torch.int16).clone()


class Gated(Pair):
    """Of a geo lane; the messages of trainer 0 leave when they are let go."""

    def __init__(self, *given: Any, **configs: Any) -> None:
        super().__init__(*given, **configs)
        self._exchange, self._gate = self.lane._exchange, threading.Semaphore(0)
        self.lane._exchange = self._gated

    def _gated(self, *given: Any) -> Any:
        assert self._gate.acquire(timeout=SECONDS)
        return self._exchange(*given)

    def let_go(self, messages: int = 1) -> None:
        """Lets messages of trainer 0 leave, and waits for the reply to the last of them."""
        replies = [reply for _, _, reply in self.lane._under_way if not reply.done()]
        for _ in range(messages):
            self._gate.release()
        replies[messages - 1].result(SECONDS)

    def close(self) -> list[torch.Tensor]:
        """See :class:`Pair`."""
        for _ in range(100):
            self._gate.release()
        return super().close()


def geo_steps(both: Gated, event: Callable[[Pair, int], None]) -> list[torch.Tensor]:
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


def diloco_steps(both: Pair, event: Callable[[Pair, int], None]) -> list[torch.Tensor]:
    """Steps of both at once, as each window's end waits for both."""
    seen: list[torch.Tensor] = []
    for number in range(STEPS):
        event(both, number)
        both.both(both.step)
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


EVENTS: list[tuple[Any, ...]] = [
    (plain, torch.zeros, torch.float32, {}),
    (plain, torch.zeros, torch.float32, {"buffers": "trainer0"}),
    (plain, strided, torch.float32, {}),
    (plain, torch.zeros, torch.bfloat16, {}),
    (written, torch.zeros, torch.float32, {}),
    (not_finite, torch.zeros, torch.float32, {"nonfinite": "refuse"}),
    (outlier, torch.zeros, torch.float32, REFUSED),
]


@pytest.mark.parametrize("queue", [2, 4])
@pytest.mark.parametrize(("event", "make", "dtype", "configs"), EVENTS)
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
    here = geo_steps(Gated(servers(2), make, dtype, **configs), event)
    on_this_device(monkeypatch)
    there = geo_steps(Gated(servers(2), make, dtype, **configs), event)
    assert_alike(here, there)


@pytest.mark.parametrize("k_steps", [1, 3])
@pytest.mark.parametrize(("event", "make", "dtype", "configs"), EVENTS)
def test_on_a_device_diloco_trains_as_in_main_memory(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    event: Callable[[Pair, int], None],
    make: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    configs: dict[str, Any],
    k_steps: int,
) -> None:
    """The same, in steps in whose windows buffers change or do not."""
    configs = {"k_steps": k_steps, "outer_optimizer": OUTER, **configs}
    here = diloco_steps(Pair(servers(2), make, dtype, **configs), event)
    on_this_device(monkeypatch)
    there = diloco_steps(Pair(servers(2), make, dtype, **configs), event)
    assert_alike(here, there)


WINDOWS: dict[str, dict[str, Any]] = {
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 100, "outer_optimizer": OUTER},
    "async": {},
}


@pytest.mark.parametrize("whose", ["trainer0", "mean"])
@pytest.mark.parametrize("mode", WINDOWS)
def test_no_step_waits_for_the_device_for_buffers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, whose: str
) -> None:
    """They leave, and arrive, and the script's thread reads none of them; in async mode it waits
    for what the device has found of parameters.
    """
    on_this_device(monkeypatch)
    pair = Pair(servers(2), torch.zeros, torch.float32, buffers=whose, **WINDOWS[mode])
    values, trainer = pair.values[0], pair.trainers[0]

    def step() -> None:
        values["mean"].add_(1.0)
        values["count"].add_(1)
        trainer.commit(pair.hparams)
        if mode != "diloco":
            pair.lane.wait_for_replies() if mode == "geo" else eventually(lambda: answered(trainer))
        trainer.refresh()

    for _ in range(3):  # in which async compares everything
        step()
    with counted(monkeypatch) as found, Waits(found):
        for _ in range(8):
            step()
    assert not [each for each in found if mode != "async" or each == "ParameterSlices.read"]
    travelled = trainer.variable_bytes()["count"]
    trainer.flush()
    assert (travelled["bytes_out"] > 3 * 8) == (mode != "diloco")
    pair.close()
    assert values["count"] == 11


def answered(trainer: Communicator) -> bool:
    """Whether all steps that it has sent are answered."""
    return trainer.metrics()["steps_queued"] == 0


def assert_alike(here: list[torch.Tensor], there: list[torch.Tensor]) -> None:
    assert len(here) == len(there) > STEPS
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert torch.equal(one, other), number


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "configs",
    [
        {"k_steps": 2, "send_queue_size": 1},
        {"k_steps": 3},
        {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
    ],
)
def test_on_a_gpu_no_step_of_a_window_waits_for_it(
    servers: Servers, configs: dict[str, Any]
) -> None:
    """torch raises where a host would wait, but for an event, as DiLoCo does when a window ends;
    what is trained is what plain torch trains there.
    """
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
@pytest.mark.parametrize("whose", ["trainer0", "mean"])
def test_on_a_gpu_diloco_trains_as_in_main_memory(servers: Servers, whose: str) -> None:
    """To the bit, buffers too: the GPU computes no more than differences."""

    def there(count: int) -> torch.Tensor:
        return torch.zeros(count, device="cuda:0")

    configs = {"k_steps": 3, "outer_optimizer": OUTER, "buffers": whose}
    found = [
        diloco_steps(Pair(servers(2), make, torch.float32, **configs), plain)
        for make in (torch.zeros, there)
    ]
    assert_alike(*found)


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
