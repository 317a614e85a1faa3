"""A trainer whose device is emulated: how much of the wire does it hide behind the device's work?

The device has two streams, of which each keeps the time at which it will be done.  Work, copies and
a local optimizer's steps move that time and cost no processor.  As with a GPU the script's thread
runs ahead, and waits where the trainer's own code waits: for a copy, for the flags of written
parameters, or where torch's blocking copies wait for the stream.  Gradients and values are zeros,
and are never moved.

Lines: "SECONDS STEPS", the work of a step (of a window, in the k-step mode) and how many of them;
the answer: the seconds that they took, until every one was applied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from ctr_data import DIM, batches
from peers import answer, say
from processes import READY
from torch import nn

LAYERS, K_STEPS = 8, 4
PINNED_BYTES, PAGEABLE_BYTES = 20e9, 6e9  # a second, between main memory and the device
DEVICE_BYTES = 1e12  # a second, of the device's own memory
CONFIGS: dict[str, dict[str, Any] | None] = {  # a_sync_configs; None: sync
    "sync": None,
    "sync, overlap": {"overlap": True},
    "async": {},
    "k-step": {"k_steps": K_STEPS},
}
AHEAD = ", look-ahead"  # a mode of tables: the rows of the next batch are looked up ahead


class Done:
    """A copy, or an event, that is complete at a time."""

    def __init__(self, when: float) -> None:
        self._when = when

    def synchronize(self) -> None:
        """Waits for it, on the host."""
        if (left := self._when - time.perf_counter()) > 0:
            time.sleep(left)

    def query(self) -> bool:
        """Whether it is complete."""
        return time.perf_counter() >= self._when


class Device:
    """The emulated device: a stream of the script's work, and one of copies."""

    def __init__(self) -> None:
        self._work = self._copies = 0.0  # when each is done
        self.memory: set[int] = set()  # addresses of tensors that count as its own

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Makes tensors its own."""
        self.memory.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is its own."""
        return tensor.untyped_storage().data_ptr() in self.memory

    def compute(self, seconds: float) -> None:
        """Queues work."""
        self._work = max(time.perf_counter(), self._work) + seconds

    def copy(self, size: int) -> Done:
        """Queues a copy of so many bytes, behind the work that is queued."""
        begins = max(time.perf_counter(), self._copies, self._work)
        self._copies = begins + size / PINNED_BYTES
        return Done(self._copies)

    def join(self) -> None:
        """Makes later work wait for the queued copies."""
        self._work = max(self._work, self._copies)

    def event(self) -> Done:
        """Behind the work that is queued."""
        return Done(max(time.perf_counter(), self._work))

    def wait(self, blocking_bytes: int = 0) -> None:
        """Waits for the work, and for a blocking copy behind it."""
        Done(max(time.perf_counter(), self._work) + blocking_bytes / PAGEABLE_BYTES).synchronize()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the steps of an optimizer work of the device: values, gradients, values."""
        every = (each for group in optimizer.param_groups for each in group["params"])
        tensors = [each for each in every if self.holds(each)]
        size = 3 * sum(each.nbytes for each in tensors)

        def step() -> None:
            self.compute(size / DEVICE_BYTES)
            with torch.no_grad():
                for each in tensors:
                    each[:1].zero_()  # they count as written

        optimizer.step = step  # type: ignore[method-assign, assignment]


def install(device: Device) -> None:
    """Makes the trainer take the device for a GPU."""
    from trainer.senders import async_lane, parameters, sync_lane, writes

    class Copies:
        """See ``DeviceCopy``."""

        def __init__(self, _: torch.device) -> None:
            self.join = device.join

        def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Done:
            return device.copy(target.nbytes)

        def to_device(
            self, source: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
        ) -> Done:
            copied = device.copy(source.nbytes)
            device.join()
            return copied

    class Flags:
        """See ``DeviceFlags``: nothing is ever written."""

        def __init__(self, pairs: list[Any]) -> None:
            self.differ = torch.zeros(len(pairs), dtype=torch.bool)
            self._done = device.event()

        def wait(self) -> list[bool]:
            self._done.synchronize()
            return [False] * len(self.differ)

    for module in (sync_lane, async_lane, parameters, writes):
        module.is_on_gpu = device.holds  # type: ignore[attr-defined]
    read = parameters.ParameterSlices.read

    def read_blocking(self: Any, name: str) -> torch.Tensor:
        found = read(self, name)
        if device.holds(found):
            device.wait(found.nbytes)
        return found

    there = torch.zeros(1)  # stands for all values on the device, where k-step lanes compute
    part, to_part = parameters.ParameterSlices.part, parameters.ParameterSlices.to_part
    write_part = parameters.ParameterSlices.write_part

    def part_there(self: Any, name: str) -> torch.Tensor:
        return there.clone() if self.on_gpu(name) else part(self, name)

    def brought(self: Any, name: str, value: torch.Tensor) -> torch.Tensor:
        found = to_part(self, name, value)
        return there.clone() if self.on_gpu(name) else found

    def write_there(self: Any, name: str, value: torch.Tensor) -> None:
        if not self.on_gpu(name):
            write_part(self, name, value)

    parameters.ParameterSlices.read = read_blocking  # type: ignore[method-assign]
    parameters.ParameterSlices.part = part_there  # type: ignore[method-assign]
    parameters.ParameterSlices.to_part = brought  # type: ignore[method-assign]
    parameters.ParameterSlices.write_part = write_there  # type: ignore[method-assign]
    parameters.pinned = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    parameters.DeviceCopy = Copies  # type: ignore[assignment, misc]
    writes.DeviceFlags = Flags  # type: ignore[assignment, misc]


class Layers(nn.Module):
    """Layers whose forward and backward are work of the device; behind a table, if there is one.

    Attributes:
        seconds: of a step's work: a third of it in forward.
    """

    def __init__(self, device: Device, size: int, table: nn.Module | None) -> None:
        super().__init__()
        count = size // 4 // LAYERS
        self.weights = nn.ParameterList(torch.zeros(count) for _ in range(LAYERS))
        self.gradients = [torch.zeros(count) for _ in range(LAYERS)]
        self.table, self.seconds, self._device = table, 0.0, device
        device.take([*self.weights, *self.gradients])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number whose backward gives every weight its gradient."""
        if self.table is not None:
            x = _Moved.apply(self.table(x), self._device)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            x = _Layer.apply(x, weight, gradient, self)
        return x.sum()

    def work(self, part: float) -> None:
        """Queues a part of a layer's work."""
        self._device.compute(self.seconds * part / LAYERS)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor, model: Layers
    ) -> torch.Tensor:
        ctx.own, ctx.model = own, model
        model.work(1 / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.model.work(2 / 3)
        return gradient, ctx.own.detach(), None, None  # which autograd takes as it is


class _Moved(torch.autograd.Function):
    """Rows to the device and their gradient back, by blocking copies."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.shape, ctx.device = rows.shape, device
        device.wait(rows.nbytes)
        return rows.sum() * 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        found = torch.full(ctx.shape, 1e-3)
        ctx.device.wait(found.nbytes)
        return found, None


def emulated(endpoint: str, mode: str, kind: str, size: int) -> None:
    """The trainer.

    Args:
        kind: "tables", or "dense".
        size: bytes of the layers' parameters.
    """
    from trainer import DistributedEmbedding, Uniform, fleet, row_optimizers
    from transpiler import DistributedStrategy

    os.environ["PSERVER_TRANSPORT"] = "tcp"
    device = Device()
    install(device)
    strategy = DistributedStrategy()
    ahead, mode = mode.endswith(AHEAD), mode.removesuffix(AHEAD)
    strategy.a_sync = mode in ("async", "k-step")
    strategy.a_sync_configs = {**(CONFIGS[mode] or {}), **({"look_ahead": 1} if ahead else {})}
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[endpoint]), strategy=strategy
    )
    table, inputs = None, [torch.zeros(1, requires_grad=True)]
    if kind == "tables":
        rule = row_optimizers.SGD(lr=0.05)
        table = DistributedEmbedding(DIM, init=Uniform(-0.01, 0.01), optimizer=rule)
        inputs = [torch.from_numpy(ids) for ids, _ in batches(0)]
    model = Layers(device, size, table)
    trained = fleet.distributed_model(model)
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = fleet.distributed_optimizer(own)
    device.update(own)
    window, steps = (K_STEPS if mode == "k-step" else 1), 0

    def ask(line: str) -> float:
        nonlocal steps
        seconds, count = line.split()
        model.seconds = float(seconds) / window
        began = time.perf_counter()
        for _ in range(int(count) * window):
            optimizer.zero_grad()
            if ahead:
                fleet.prefetch(inputs[(steps + 1) % len(inputs)])
            trained(inputs[steps % len(inputs)]).backward()
            optimizer.step()
            steps += 1
        for lane in optimizer.communicator.lanes if strategy.a_sync else ():
            lane.drain()
        device.wait()
        return time.perf_counter() - began

    ask("0 8")  # in the first steps every element is compared
    say(READY)
    answer(ask)
    fleet.finish()


ROLES: dict[str, Callable[..., None]] = {"emulated": emulated}
