"""What scripts do to gradients: a DistributedEmbedding's come out as a parameter's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from tests.support.devices import tables_on_a_device
from tests.support.embeddings import Net, Optimizer, pair, some_ids, values
from trainer import fleet
from trainer.optimizer import DistributedOptimizer
from transpiler import ClipGradByGlobalNorm, ClipGradByValue


@pytest.fixture(autouse=True, params=["in main memory", "on a device"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ids and rows are in main memory, or count as those of a GPU: nothing else differs."""
    if request.param == "on a device":
        tables_on_a_device(monkeypatch)
    return bool(request.param == "on a device")


def trained(
    net: Net, make: Optimizer, script: Callable[[Net, torch.optim.Optimizer], None]
) -> Tensor:
    script(net, make(net.parameters()))
    return values(net)


def clipped(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        net(some_ids(step)).backward()
        assert clip_grad_norm_(net.parameters(), 0.3) > 0.3
        optimizer.step()


def accumulated(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            net(some_ids(step + 4 * part)).backward()
            if part == 1:
                clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def zeroed_in_between(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step, to_none in enumerate([True, False, True, False]):
        net(some_ids(step + 7)).backward()
        optimizer.zero_grad(set_to_none=to_none)
        net(some_ids(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not to_none)


def never_zeroed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        net(some_ids(step)).backward()
        optimizer.step()
        optimizer.step()


def stepped_on_zeros(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net(some_ids(1)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # a momentum goes on
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient


def looked_up_twice(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        (net(some_ids(step)) + 2 * net(some_ids(step + 1)) + net(some_ids(step))).backward()
        optimizer.step()


def with_closures(net: Net, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(some_ids(3))
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is not None
        assert optimizer.step(closure=closure) is not None


def retained(net: Net, optimizer: torch.optim.Optimizer) -> None:
    loss = net(some_ids(1))
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)  # no gradient of theirs
    loss.backward()
    optimizer.step()


def checkpointed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for reentrant in (False, True):
        optimizer.zero_grad()
        start = torch.ones((), requires_grad=True)
        one = checkpoint(lambda x: x * net(some_ids(1)), start, use_reentrant=reentrant)
        other = checkpoint(lambda x: x * net(some_ids(2)), start, use_reentrant=reentrant)
        (one + other + net(some_ids(3))).backward()
        optimizer.step()


SCRIPTS = [
    clipped,
    accumulated,
    zeroed_in_between,
    never_zeroed,
    stepped_on_zeros,
    looked_up_twice,
    with_closures,
    retained,
]


@pytest.mark.parametrize("script", [*SCRIPTS, checkpointed])
def test_gradients_are_handled_as_a_parameters(
    script: Callable[[Net, torch.optim.Optimizer], None],
) -> None:
    """Clipping, accumulating, zeroing, retaining, recomputing: a table's rows come out as an
    nn.Embedding's.
    """
    theirs, mine = pair(padding_idx=3)
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    assert torch.allclose(trained(mine, make, script), trained(theirs, make, script), atol=2e-6)


def test_proxy_gradients_are_norms() -> None:
    """After each backward proxy.grad is the norm of nn.Embedding's gradient, and the rows that
    wait are its rows.
    """
    theirs, mine = pair()
    for step in range(3):
        for net in (theirs, mine):
            net(some_ids(step)).backward()
        gradient = mine.embedding.gradient()

        assert torch.allclose(mine.embedding.proxy.grad, theirs.embedding.weight.grad.norm())
        assert torch.equal(gradient.rows, theirs.embedding.weight.grad[gradient.ids])
        gradient.mul_(0.0)
        assert torch.equal(
            mine.embedding.gradient().rows, theirs.embedding.weight.grad[gradient.ids]
        )
        assert (
            len(gradient.ids)
            == int((theirs.embedding.weight.grad != 0).any(1).sum())
            == len(gradient.ids.unique())
        )
    mine.zero_grad(set_to_none=False)
    assert len(mine.embedding.gradient().ids) == 0
    mine.embedding.discard()
    assert mine.embedding.gradient() is None and mine.embedding.proxy.grad is None


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_grad_scaler_unscales_rows_and_skips_what_overflows(options: dict[str, Any]) -> None:
    """GradScaler's scale is taken out of rows, also where the optimizer does that itself; an
    overflow leaves them as they are.
    """
    found = []
    for net in pair():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(4):
            optimizer.zero_grad()
            loss = net(some_ids(step)) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if not options and step == 1:
                scaler.unscale_(optimizer)
                clip_grad_norm_(net.parameters(), 0.4)
            before = values(net)
            scaler.step(optimizer)
            scaler.update()
            assert (step == 2) == torch.equal(before, values(net))
        found.append((values(net), scaler.get_scale()))

    assert (
        torch.allclose(found[0][0], found[1][0], atol=1e-6) and found[0][1] == found[1][1] == 512.0
    )


def test_a_distributed_optimizer_alone_trains_tables() -> None:
    """Where fleet's optimizer has no servers its inner one steps the rows, once, clipped as it
    says.
    """
    found = []
    for net in pair():
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        if net.embedding.__class__ is nn.Embedding:
            optimizer: torch.optim.Optimizer = inner
        else:
            names = {parameter: name for name, parameter in net.named_parameters()}
            optimizer = DistributedOptimizer(
                inner, names, lambda _: None, ClipGradByGlobalNorm(0.5)
            )
        for step in range(3):
            optimizer.zero_grad()
            net(some_ids(step)).backward()
            if optimizer is inner:
                clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        found.append(values(net))

    assert torch.allclose(*found, atol=1e-6)


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 0.02)


def by_value_at_once(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 0.02, foreach=True)


def by_clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.01, 0.02)  # as older scripts write it


def by_largest(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.03, norm_type=math.inf)


def by_value_after_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.2)
    by_value(model)


@pytest.mark.parametrize(
    "clip", [by_value, by_value_at_once, by_clamp, by_largest, by_value_after_norm]
)
def test_clip_grad_value_acts_on_a_tables_rows(clip: Callable[[nn.Module], None]) -> None:
    """Element by element, not on the rows' norm: equal to a plain nn.Embedding, also over several
    lookups and backwards.
    """

    def script(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            (net(some_ids(step)) + net(some_ids(step + 1))).backward()
            net(some_ids(step + 2)).backward()
            clip(net)
            optimizer.step()

    theirs, mine = pair()
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    before = values(mine)
    found, expected = trained(mine, make, script), trained(theirs, make, script)
    assert torch.allclose(found, expected, atol=2e-6) and not torch.equal(found, before)


def test_what_neither_multiplies_nor_clamps_a_norm_is_refused() -> None:
    """A new value, a sum, a sign: the rows could not be told from the norm."""
    _, mine = pair()
    mine(some_ids(1)).backward()
    proxy = mine.embedding.proxy
    for change in (
        lambda: proxy.grad.clamp(-1, 1),
        lambda: proxy.grad.add_(1.0),
        lambda: proxy.grad.sign_(),
        lambda: torch._foreach_add_([proxy.grad], 1.0),
    ):
        with pytest.raises(TypeError, match="expected clamp_.. or clip_grad_value_, mul_"):
            change()


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda p: p.square().sum(),
    "product": lambda p: (p * p).sum(),
    "power": lambda p: (p**2).sum(),
    "norm": torch.linalg.vector_norm,
    "absolute": lambda p: p.abs().sum(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).square().mean(),
}


@pytest.mark.parametrize("looked_up", [True, False])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_on_all_of_a_models_parameters_raises(
    penalty: str, looked_up: bool, emulated: bool
) -> None:
    """The proxy parameter among them holds no row: the penalty would reach none, silently.  With
    rows on a GPU the step says so, as the backward would have to wait for it.
    """
    _, mine = pair()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    loss = mine(some_ids(1)) if looked_up else torch.zeros(())
    loss = loss + 0.1 * sum((PENALTIES[penalty](p) for p in mine.parameters()), torch.zeros(()))
    with pytest.raises(RuntimeError, match="proxy parameter.*give this parameter weight_decay"):
        loss.backward()
        assert emulated
        optimizer.step()


@pytest.mark.parametrize("servers_", [0, 1, 2])
@pytest.mark.parametrize("who", ["the script", "grad_clip"])
def test_clipping_by_value_equals_a_plain_embedding(
    servers: Callable[[int], str], servers_: int, who: str
) -> None:
    """Alone and on servers, by the script and by ``grad_clip``."""
    theirs, mine = pair()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
    clip = ClipGradByValue(0.02) if who == "grad_clip" else None
    inner = torch.optim.SGD(mine.parameters(), lr=0.5)
    if servers_:
        endpoints = servers(servers_).split(",")
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints))
        fleet.distributed_model(mine)
        optimizer: Any = fleet.distributed_optimizer(inner, grad_clip=clip)
    else:
        names = {p: name for name, p in mine.named_parameters() if p is not mine.embedding.proxy}
        optimizer = DistributedOptimizer(inner, names, lambda _: None, clip)
    for step in range(3):
        for net, one in ((theirs, plain), (mine, optimizer)):
            one.zero_grad()
            net(some_ids(step)).backward()
            if one is plain or clip is None:
                clip_grad_value_(net.parameters(), 0.02)
            one.step()
    assert torch.allclose(values(mine), values(theirs), atol=1e-6)
    fleet.finish()
