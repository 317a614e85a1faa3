"""Gradients that leave while backward still runs: when they leave, and what is refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import eager_jobs
from tests.support.devices import Flags, on_a_device
from tests.support.eager_jobs import Servers, batches
from tests.support.eager_modes import adam, assert_equal, eventually, joined, net, strategy_of
from tests.support.threads import at_once
from trainer import fleet
from trainer.gradients.early import EarlyGradients
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByValue


class Quiesce(torch.autograd.Function):
    """The identity, whose backward, the last of all, waits until something holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holds: Callable[[], bool]) -> torch.Tensor:
        ctx.holds = holds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        eventually(ctx.holds)
        return grad, None


@pytest.mark.observes("a_sync_configs.overlap")
def test_overlap_sends_gradients_while_backward_runs(servers: Servers) -> None:
    """At least half of a step's bytes have left before backward ends, and the result is equal to
    the bit.
    """
    torch.manual_seed(0)
    mine = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())))
    reference = copy.deepcopy(mine)
    optimizer = joined(servers(2), mine, adam(mine), overlap=True, modes={"*": "sync"})
    plain = adam(reference)
    total = sum(parameter.nbytes for parameter in mine.parameters())
    for _ in range(3):
        before = optimizer.communicator.metrics()["bytes_out"]

        def half_has_left(before: float = before) -> bool:
            return optimizer.communicator.metrics()["bytes_out"] - before >= total / 2

        x = torch.ones(4, 128, requires_grad=True)
        optimizer.zero_grad()
        mine(Quiesce.apply(x, half_has_left)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        reference(torch.ones(4, 128)).square().mean().backward()
        plain.step()

    assert_equal(mine, reference)


# ---- gradients that are changed after they have left ----

Backward = Callable[[], None]
Touch = Callable[[nn.Module, Backward], None]


def _second(model: nn.Module, backward: Backward) -> None:
    backward()
    backward()


def _clipped(model: nn.Module, backward: Backward) -> None:
    backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _clamped(model: nn.Module, backward: Backward) -> None:
    backward()
    first(model).grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]  # backward has made it


def _data_clamped(model: nn.Module, backward: Backward) -> None:
    backward()
    first(model).grad.data.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]  # backward has made it


def _replaced(model: nn.Module, backward: Backward) -> None:
    backward()
    first(model).grad = torch.ones_like(first(model))


def _frozen(model: nn.Module, backward: Backward) -> None:
    backward()
    first(model).grad = None


def _interrupted(model: nn.Module, backward: Backward) -> None:
    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook = first(model).register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward()
    hook.remove()
    model.zero_grad()
    backward()


TOUCHES: dict[str, Touch] = {
    "a second backward": _second,
    "clip_grad_norm_": _clipped,
    "clamp_": _clamped,
    "another gradient": _replaced,
    "no gradient": _frozen,
    "an interrupted backward": _interrupted,
}


def first(model: nn.Module) -> nn.Parameter:
    """The parameter whose gradient is complete last."""
    return next(model.parameters())


def train(
    model: nn.Module,
    optimizer: Any,
    touch: Touch,
    touched: Collection[int],
    drain: Callable[[], Any],
) -> nn.Module:
    """Steps, of which some change their gradients."""
    for step, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()

        def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            F.cross_entropy(model(x), y).backward()

        if step in touched:
            touch(model, backward)
        else:
            backward()
        optimizer.step()
        drain()
    return model


@pytest.fixture(params=["in main memory", "on a device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the models."""
    if request.param == "on a device":
        on_a_device(monkeypatch)
        monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_what_a_gradient_holds_at_the_step_counts(
    servers: Servers, caplog: pytest.LogCaptureFixture, touch: str, mode: str
) -> None:
    """Equal to plain torch to the bit, with one warning; gradients leave early again later."""
    mine, reference = net(), net()
    optimizer = joined(servers(2), mine, adam(mine), overlap=True, modes={"*": mode})
    touched, early = (1, 3), list[bool]()

    def drain() -> None:
        optimizer.communicator.drain()

    def noted(parameter: torch.Tensor) -> None:
        early.append(parameter in set(optimizer._overlap))

    first(mine).register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]  # torch's own
    train(mine, optimizer, TOUCHES[touch], touched, drain)

    assert_equal(mine, train(reference, adam(reference), TOUCHES[touch], touched, lambda: None))
    assert len([r for r in caplog.records if "leave overlap off" in r.getMessage()]) == 1
    assert early[0] and early[-1] and not all(early)


def test_who_writes_through_data_sends_nothing_early_again(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first step it is found, and later ones need no look."""
    mine, reference = net(), net()
    optimizer = joined(servers(1), mine, adam(mine), overlap=True, modes={"*": "sync"})
    train(mine, optimizer, _data_clamped, range(8), optimizer.communicator.drain)

    assert_equal(mine, train(reference, adam(reference), _data_clamped, range(8), lambda: None))
    assert "because of a write through .data" in caplog.text
    assert optimizer.communicator.metrics()["reconnects"] == 1


def both(servers: Servers, mode: str = "sync", **options: Any) -> list[tuple[nn.Module, Any]]:
    """A model with overlap, and a reference in plain torch."""
    mine, reference = net(), net()
    strategy = strategy_of(overlap=True, modes={"*": mode})
    optimizer = eager_jobs.joined(servers(2), mine, adam(mine), strategy=strategy, **options)
    return [(mine, optimizer), (reference, adam(reference))]


ASKED: dict[str, Callable[[Any, Path], object]] = {
    "states": lambda optimizer, folder: optimizer.state_dict(),
    "values": lambda optimizer, folder: optimizer.flush(),
    "a save": lambda optimizer, folder: fleet.save(str(folder)),
    "states that are loaded": lambda optimizer, folder: optimizer.load_state_dict(
        optimizer.state_dict()
    ),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_servers_hold_is_asked_for_before_the_step(
    servers: Servers, tmp_path: Path, asked: str, mode: str
) -> None:
    """Gradients that have left use the same streams: they leave again with the step."""
    pair = both(servers, mode)
    for model, optimizer in pair:
        for step, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if model is pair[0][0] and step != 1:
                ASKED[asked](optimizer, tmp_path / str(step))
            optimizer.step()
            if model is pair[0][0]:
                optimizer.flush()
    assert_equal(pair[0][0], pair[1][0])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("touch", [None, "a second backward"])
def test_clipping_by_value_clips_what_leaves_early(
    servers: Servers, touch: str | None, mode: str
) -> None:
    """The trainer clips, as no server does; a gradient that leaves again is clipped as a whole."""
    (mine, optimizer), (reference, plain) = both(servers, mode, grad_clip=ClipGradByValue(1e-3))
    for x, y in batches(4):
        for model, each in ((mine, optimizer), (reference, plain)):
            each.zero_grad()
            for _ in range(1 if touch is None else 2):
                F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(reference.parameters(), 1e-3)
        optimizer.step()
        plain.step()
        optimizer.flush()
        assert all(
            torch.equal(one.grad, other.grad)  # type: ignore[arg-type]  # backward has made them
            for one, other in zip(mine.parameters(), reference.parameters(), strict=True)
        )
    assert_equal(mine, reference)


def test_hooks_of_two_threads_send_one_after_the_other(servers: Servers) -> None:
    """As autograd's of two devices do: no gradient is lost, none is torn."""
    layers = [nn.Sequential(*[nn.Linear(6, 6) for _ in range(20)]) for _ in range(2)]
    mine = nn.ModuleList(layers)
    reference = copy.deepcopy(mine)
    optimizer = joined(servers(1), mine, adam(mine), overlap=True, modes={"*": "sync"})
    plain, inside, met = adam(reference), [0], list[int]()
    right = optimizer.communicator.send_whole

    def send_whole(gradients: Any) -> None:
        inside[0] += 1
        met.append(inside[0])
        time.sleep(0.001)  # no wait: it lets the other thread run
        right(gradients)
        inside[0] -= 1

    optimizer.communicator.send_whole = send_whole
    (x, _), *_ = batches(1)
    at_once(*(layer(x).mean().backward for layer in layers))
    optimizer.step()
    for layer in reference:
        layer(x).mean().backward()
    plain.step()
    assert_equal(mine, reference)
    assert max(met) == 1


@pytest.mark.parametrize("finite", [True, False])
def test_a_scaled_step_is_that_of_its_unscaled_gradients(servers: Servers, finite: bool) -> None:
    """The scaler has found its infinities, and its scale is no gradient's."""
    models = [net(), net()]
    mine, reference = models
    optimizers = [
        joined(servers(1), mine, adam(mine), overlap=True, modes={"*": "sync"}),
        adam(reference),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
        for step, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            factor = 1.0 if finite or step != 1 else float("inf")
            scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    assert_equal(mine, reference)


def test_after_a_change_nothing_leaves_early_for_longer_each_time() -> None:
    """One step, two, four."""
    withdrawn = list[int]()
    early, parameter = EarlyGradients(lambda: withdrawn.append(1)), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    rests = []
    for _ in range(4):
        rests.append(0)
        while not early.leaves(parameter, parameter.grad):
            early.end()
            rests[-1] += 1
        early.gone()
        parameter.grad.mul_(2)
        early.look(scaled=False)
        assert not early and not early.leaves(parameter, parameter.grad)
        early.end()
    assert rests == [0, 1, 2, 4] and len(withdrawn) == 4


def test_clipping_that_needs_all_gradients_is_refused(servers: Servers) -> None:
    """On the trainer, before the first step."""
    mine = net()
    with pytest.raises(ValueError, match="gradients cannot leave early where grad_clip needs"):
        eager_jobs.joined(
            *(servers(1), mine, adam(mine)),
            strategy=strategy_of(overlap=True),
            grad_clip=ClipGradByGlobalNorm(1.0),
        )
