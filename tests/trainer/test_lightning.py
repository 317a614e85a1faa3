"""Lightning's Trainer with PServerStrategy, in one process: a trainer with a server, or alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support.eager_jobs import assert_same
from tests.support.tiers import RARE
from trainer import Constant, DistributedEmbedding, fleet, row_optimizers
from transpiler import DistributedStrategy

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

from tests.cluster.lightning_trainer import ACCUMULATED, CLIP, Module, adam, loader, made, net  # noqa: E402,I001
from trainer.lightning import PServerStrategy  # noqa: E402

Servers = Callable[[int], str]
# Lightning warns of few workers, and its own imports of what torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 3


@pytest.fixture(params=["one server", RARE("alone")])
def begin(request: pytest.FixtureRequest, servers: Servers) -> Callable[..., None]:
    """``fleet.init`` of a job with one server, and of one without."""

    def init(**options: Any) -> None:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
        fleet.init(role if request.param == "one server" else None, **options)

    return init


@pytest.fixture
def joined(servers: Servers) -> Callable[..., None]:
    """``fleet.init`` of a job with one server."""

    def init(**options: Any) -> None:
        ends = servers(1).split(",")
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=ends), **options)

    return init


def plain_loop(clip: Callable[[Any], Any]) -> nn.Module:
    """What Lightning is held against: the loop as one writes it with torch alone."""
    model, batches = net(), loader()
    optimizer, scheduler = adam(model)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(batches, 1):
            (mse_loss(model(x), y) / ACCUMULATED).backward()
            if number % ACCUMULATED == 0 or number == len(batches):
                clip(model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize("algorithm", ["norm", RARE("value")])
def test_a_fit_equals_the_plain_loop(
    begin: Callable[..., None], tmp_path: Path, algorithm: str
) -> None:
    """With accumulation, clipping, a schedule, shuffled batches and validation in between, to the
    bit; and the Trainer has its clipping back.
    """
    clips = {
        "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP),
        "value": lambda parameters: nn.utils.clip_grad_value_(parameters, CLIP),
    }
    begin()
    trainer, module = (
        made(
            tmp_path,
            EPOCHS,
            gradient_clip_val=CLIP,
            gradient_clip_algorithm=algorithm,
            accumulate_grad_batches=ACCUMULATED,
        ),
        Module(),
    )
    trainer.fit(module, loader(), loader(shuffle=False))

    assert_same(module.net.state_dict(), plain_loop(clips[algorithm]).state_dict())
    assert trainer.gradient_clip_val == CLIP and trainer.callback_metrics["val"] > 0
    assert fleet.metrics()["steps"] == trainer.global_step == 6 * EPOCHS


def plain_lightning(folder: Path, module: Any, **more: Any) -> Any:
    """The same module under Lightning's own strategy."""
    made(folder, EPOCHS, strategy="auto", **more).fit(module, loader())
    return module


class Descending(Module):
    """A rule without a small epsilon, which float16 does not have."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", RARE("bf16-true"), RARE("16-true"), RARE("64-true")]
)
def test_every_precision_is_lightnings_own(
    joined: Callable[..., None], tmp_path: Path, precision: Any
) -> None:
    """To the bit."""
    joined()
    module = Descending()
    made(tmp_path, EPOCHS, precision=precision).fit(module, loader())
    expected = plain_lightning(tmp_path, Descending(), precision=precision)

    assert_same(module.state_dict(), expected.state_dict())


class Alternating(Module):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.01),
            torch.optim.Adam(self.net[2].parameters(), lr=0.01),
        ]


class Plateau(Module):
    """A schedule that looks at what validation logs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train"}


@pytest.mark.parametrize("kind", [Alternating, RARE(Plateau)])
def test_optimizers_by_hand_and_schedules_work(
    joined: Callable[..., None], tmp_path: Path, kind: Any
) -> None:
    """Several optimizers under manual optimization, and a schedule on a metric, as under Lightning
    alone, to the bit.
    """
    joined()
    module = kind()
    made(tmp_path, EPOCHS).fit(module, loader())

    assert_same(module.state_dict(), plain_lightning(tmp_path, kind()).state_dict())


def test_a_fit_goes_on_from_its_checkpoint(begin: Callable[..., None], tmp_path: Path) -> None:
    """A fit of three epochs equals one of two and one that goes on from its file; the file is one
    of Lightning's, with the states that the servers hold.
    """
    begin()
    whole = Module()
    made(tmp_path, EPOCHS).fit(whole, loader(shuffle=False))
    fleet.finish()
    begin()
    first = made(tmp_path, EPOCHS - 1)
    first.fit(Module(), loader(shuffle=False))
    first.save_checkpoint(tmp_path / "two.ckpt")
    fleet.finish()
    begin()
    module = Module()
    made(tmp_path, EPOCHS).fit(module, loader(shuffle=False), ckpt_path=tmp_path / "two.ckpt")
    steps = fleet.metrics()["steps"]
    fleet.finish()
    alone = Module()
    path = tmp_path / "two.ckpt"
    made(tmp_path, EPOCHS, strategy="auto").fit(alone, loader(shuffle=False), ckpt_path=path)

    assert_same(module.state_dict(), whole.state_dict())
    assert_same(alone.state_dict(), whole.state_dict())
    assert steps in (11, 11 * EPOCHS)  # of this job, or with those before
    Module.load_from_checkpoint(path)


class Rows(Module):
    """A table, whose rows are on the servers."""

    def __init__(self) -> None:
        super().__init__()
        rule = row_optimizers.Adagrad(lr=0.1)
        self.rows = DistributedEmbedding(6, optimizer=rule, init=Constant(0.5), name="rows")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        ids = (batch[0][:, 0] * 10).long()
        return mse_loss(self.net(self.rows(ids)), batch[1])


def test_tables_go_on_from_what_lies_beside_the_file(
    joined: Callable[..., None], tmp_path: Path
) -> None:
    """Rows, and the states of their rule; the folder goes when Lightning removes its file."""
    joined()
    whole = Rows()
    made(tmp_path, EPOCHS).fit(whole, loader(shuffle=False))
    fleet.export(str(tmp_path / "whole.pt"))
    fleet.finish()
    joined()
    first = made(tmp_path, EPOCHS - 1)
    first.fit(Rows(), loader(shuffle=False))
    path = tmp_path / "two.ckpt"
    first.save_checkpoint(path)
    fleet.finish()
    joined()
    last = made(tmp_path, EPOCHS)
    last.fit(Rows(), loader(shuffle=False), ckpt_path=path)
    fleet.export(str(tmp_path / "resumed.pt"))

    assert_same(torch.load(tmp_path / "resumed.pt"), torch.load(tmp_path / "whole.pt"))
    last.strategy.remove_checkpoint(path)
    assert not list(tmp_path.glob("two*"))


def test_predictions_and_tests_need_no_fit(begin: Callable[..., None], tmp_path: Path) -> None:
    """Before a fit a trainer evaluates the module as it is."""
    begin()
    module, data = Module(), loader(shuffle=False)
    trainer = made(tmp_path, 1)
    validated = trainer.validate(module, data, verbose=False)[0]["val"]
    x, y = data.dataset.tensors

    assert validated == pytest.approx(float(mse_loss(module.net(x), y)))


# ---- what cannot be ----


class Clipping(Module):
    def configure_gradient_clipping(self, *arguments: Any) -> None:
        raise AssertionError("never called")


class Distributed(Module):
    def configure_optimizers(self) -> Any:
        return fleet.distributed_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))


class Idle(Module):
    def configure_optimizers(self) -> Any:
        return None


def mixed() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.amp = True
    return strategy


def overlapping() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"overlap": True}
    return strategy


@pytest.mark.parametrize(
    ("options", "module", "strategy", "message"),
    [
        ({"devices": 2}, Module, None, "expected devices=1, got 2"),
        ({"num_nodes": 2}, Module, None, "expected num_nodes=1, got 2"),
        ({"sync_batchnorm": True}, Module, None, "set sync_batch_norm = True"),
        ({}, Distributed, None, "distributed already"),
        ({}, Idle, None, "with parameters, got _Mock"),
        ({}, Module, mixed, 'precision="bf16-mixed"'),
        ({"accumulate_grad_batches": 2}, Module, overlapping, "leave overlap off"),
    ],
)
def test_what_cannot_be_is_told(
    joined: Callable[..., None],
    tmp_path: Path,
    options: Any,
    module: Any,
    strategy: Any,
    message: str,
) -> None:
    """Each by what to write instead."""
    joined(strategy=strategy() if strategy else None)
    with pytest.raises(ValueError, match=message):
        made(tmp_path, 1, **options).fit(module(), loader())


def test_the_order_of_calls_is_told(joined: Callable[..., None], tmp_path: Path) -> None:
    """A Trainer before ``fleet.init``, and a second fit."""
    with pytest.raises(RuntimeError, match=r"call fleet.init\(\) first"):
        made(tmp_path, 1)
    joined()
    trainer = made(tmp_path, 1)
    trainer.fit(Module(), loader())
    with pytest.raises(RuntimeError, match="expected one fit between"):
        trainer.fit(Module(), loader())
    with pytest.raises(ValueError, match="expected devices=1"):
        PServerStrategy().parallel_devices = [torch.device("cpu")] * 4


def test_a_job_without_servers_is_lightnings(tmp_path: Path) -> None:
    """Its own ddp is made for that."""
    fleet.init(is_collective=True)
    with pytest.raises(ValueError, match='strategy="ddp" is made for these'):
        made(tmp_path, 1)
