"""A small model that is trained on any device, and what it is compared with; and a device that is
emulated in main memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import fleet

Servers = Callable[[int], str]


STEPS = 10


cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


on_gpu = pytest.param("cuda:0", marks=cuda)


def net(device: str = "cpu") -> nn.Module:
    """Without a bias before the normalization, which would subtract it again: its gradient is what
    rounding leaves, of which Adam makes steps.
    """
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    ).to(device)


def batches(size: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps above what rounding leaves of a gradient that is nearly 0."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> nn.Module:
    device = next(model.parameters()).device
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x.to(device), y.to(device)).backward()
        optimizer.step()
    return model


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer or adam(model), **options)


def assert_near(model: nn.Module, reference: nn.Module) -> None:
    """Every variable within 1e-4 of the reference's, relative to its norm."""
    theirs = reference.state_dict()
    for name, tensor in model.state_dict().items():
        mine, other = tensor.detach().cpu().double(), theirs[name].detach().cpu().double()
        assert (mine - other).norm() <= 1e-4 * max(1.0, float(other.norm())), name


# ---- an emulated device ----


class Late:
    """A DeviceCopy without a GPU: copies out are made when somebody waits for them; those back have
    to be waited for, too.
    """

    class Copy:
        """A copy that is under way until somebody waits for it."""

        def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
            self.source: torch.Tensor | None = source
            self.target = target
            self.lock = threading.Lock()

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            with self.lock:
                if self.source is not None:
                    self.target.copy_(self.source)
                self.source = None

    def __init__(self, device: torch.device) -> None:
        self._under_way: list[Late.Copy] = []
        self._back: dict[int, Late.Copy] = {}  # by the memory that they come from

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Late.Copy:
        target.fill_(float("nan") if target.is_floating_point() else 0)
        self._under_way.append(Late.Copy(source, target))
        return self._under_way[-1]

    def to_device(
        self, source: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
    ) -> Late.Copy:
        if unless is None or not unless:
            target.copy_(source)  # what the script reads next waits for the copy
        before, self._back[source.data_ptr()] = (
            self._back.get(source.data_ptr()),
            Late.Copy(source.clone(), source.clone()),
        )
        assert before is None or before.source is None, (
            "the buffer was written to again, and nobody had waited for the copy"
        )
        return self._back[source.data_ptr()]

    def fresh(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def join(self) -> None:
        """Keeps what is under way from what the script writes from now on."""
        for copy_ in self._under_way:
            with copy_.lock:
                copy_.source = None if copy_.source is None else copy_.source.clone()
        self._under_way.clear()


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors count as those of a GPU, whose copies are :class:`Late`."""
    for module in ("sync_lane", "async_lane", "parameters", "writes"):
        monkeypatch.setattr(f"trainer.senders.{module}.is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        "trainer.senders.parameters.pinned",
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    monkeypatch.setattr("trainer.senders.parameters.DeviceCopy", Late)
    tables_on_a_device(monkeypatch)


def tables_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids and rows of tables count as those of a GPU, whose copies are :class:`Late`."""
    late = Late(torch.device("cpu"))
    for module in ("embedding", "joined_lookups", "proxy"):
        monkeypatch.setattr(f"trainer.embedding.{module}.is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        "trainer.device_copies.pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    monkeypatch.setattr("trainer.device_copies.GPUS", ("cpu",))
    monkeypatch.setattr("trainer.device_copies.copies_of", lambda device: late)


class Flags:
    """DeviceFlags without a GPU: what is compared is of the moment at which it was asked for."""

    waits: ClassVar[list[str]] = []  # and what else has happened

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.differ = torch.tensor([not torch.equal(then, now) for then, now in pairs])
        self.waits.append("look")

    def wait(self) -> list[bool]:
        self.waits.append("wait")
        return list(self.differ)
