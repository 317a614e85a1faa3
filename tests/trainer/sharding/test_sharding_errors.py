"""The page's example of ``group_sharded_parallel``, and what it refuses, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pserver.errors import FingerprintMismatch
from tests.support.many_ranks import on_ranks, summed
from tests.support.sharded_nets import net, sharded
from trainer.collective.world import leave_parallel_env
from trainer.sharding import group_sharded_parallel, save_group_sharded_model
from trainer.sharding.units import whole_of
from transpiler import ClipGradByGlobalNorm


@on_ranks(4)
def test_what_cannot_be_saved_is_said(rank: int, scratch: Path) -> None:
    """A model that is not sharded, a file in the directory's place, another optimizer, a directory
    that cannot be written.
    """
    model, optimizer, _ = sharded("os")
    file = scratch / f"a file of {rank}"
    file.write_text("")
    with pytest.raises(ValueError, match="not sharded"):
        save_group_sharded_model(net(), scratch / "out")
    with pytest.raises(ValueError, match="expected a directory, got the file"):
        save_group_sharded_model(model, file)
    with pytest.raises(TypeError, match="group_sharded_parallel returned, got Adam"):
        save_group_sharded_model(model, scratch / "out", torch.optim.Adam(model.parameters()))
    with pytest.raises(OSError):
        save_group_sharded_model(model, file / "below a file", optimizer)


@on_ranks(2)
def test_a_tensor_in_a_parameters_place_raises_and_is_not_lost(rank: int, scratch: Path) -> None:
    """``functional_call`` of a unit, and of the whole model; elsewhere it acts."""
    model, _, _ = sharded("p_g_os", segment_size=1)
    unit = next(module for module in model.modules() if isinstance(module, nn.Linear))
    doubled = {"weight": 2 * whole_of(unit.weight.detach())}
    call, x = torch.func.functional_call, torch.randn(2, unit.in_features)
    with pytest.raises(ValueError, match="'weight' of .*Linear.*lost at level 'p_g_os'.*os_g"):
        call(unit, doubled, (x,))
    name = next(name for name, each in model.named_parameters() if each is unit.weight)
    with pytest.raises(ValueError, match="another tensor in its place"):
        call(model, {name: doubled["weight"]}, (x,))
    unit(x)


@on_ranks(4)
def test_the_pages_example(rank: int, scratch: Path) -> None:
    """Line by line; its level "p_g" raises and names the three, and with "p_g_os" it trains."""
    scaler = torch.amp.GradScaler("cpu")

    group = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            model = nn.Linear(10, 10)
            group_sharded_parallel(model, torch.optim.AdamW(model.parameters()), "os", group=group)
        return
    model = nn.Linear(1000, 1000)

    clip = ClipGradByGlobalNorm(clip_norm=1.0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.00001)
    optimizer.grad_clip = clip

    with pytest.raises(ValueError, match="'os', 'os_g', 'p_g_os', got 'p_g'"):
        group_sharded_parallel(model, optimizer, "p_g", scaler=scaler, group=group)
    model, optimizer, scaler = group_sharded_parallel(
        model, optimizer, "p_g_os", scaler=scaler, group=group, segment_size=10**6
    )

    img, label = torch.randn(4, 1000), torch.randint(0, 1000, (4,))
    label.requires_grad = False
    img.requires_grad = False

    before = whole_of(model.weight.detach()).clone()
    out = model(img)
    loss = F.cross_entropy(input=out, target=label)

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(whole_of(model.weight.detach()), before)


@on_ranks(4)
def test_wrong_arguments_are_named(rank: int, scratch: Path) -> None:
    """Every message says what was expected and what came."""
    model, frozen = net(), net().requires_grad_(False)
    adam = torch.optim.Adam(model.parameters())
    clipped: Any = torch.optim.Adam(model.parameters())
    clipped.grad_clip = 1.0
    cases: tuple[tuple[type[Exception], str, Any, Any, str, dict[str, Any]], ...] = (
        (TypeError, "expected a torch.nn.Module, got int", 3, adam, "os", {}),
        (TypeError, "expected a torch.optim.Optimizer, got int", model, 3, "os", {}),
        (ValueError, "none of the model's", nn.Linear(2, 2), adam, "os", {}),
        (ValueError, "got none", frozen, torch.optim.Adam(frozen.parameters()), "os", {}),
        (
            ValueError,
            "rows and columns",
            model,
            torch.optim.Adafactor(model.parameters()),
            "os",
            {},
        ),
        (TypeError, "grad_clip: expected one of transpiler's", model, clipped, "os", {}),
        (
            ValueError,
            "segment_size: has an effect at level 'p_g_os' only",
            model,
            adam,
            "os_g",
            {"segment_size": 5},
        ),
        (
            ValueError,
            "sync_buffers: the model has no buffers",
            model,
            adam,
            "os",
            {"sync_buffers": True},
        ),
        (TypeError, "offload: expected True or False, got 1", model, adam, "os", {"offload": 1}),
        (
            ValueError,
            "buffer_max_size: expected a whole number of elements",
            model,
            adam,
            "os",
            {"buffer_max_size": 0},
        ),
        (TypeError, "expected a torch.amp.GradScaler, got int", model, adam, "os", {"scaler": 3}),
    )
    for kind, words, given, optimizer, level, options in cases:
        with pytest.raises(kind, match=words):
            group_sharded_parallel(given, optimizer, level, **options)
    assert summed(1) == 4  # nobody has waited for anybody in vain


@on_ranks(4)
def test_a_second_call_and_a_late_group_are_named(rank: int, scratch: Path) -> None:
    """A model is sharded once, with all its groups."""
    model, optimizer, _ = sharded("os")
    with pytest.raises(ValueError, match="called for it before"):
        group_sharded_parallel(model, optimizer, "os")
    with pytest.raises(ValueError, match="expected all groups before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert summed(1) == 4  # nobody has waited for anybody in vain


@on_ranks(4)
def test_ranks_that_differ_are_named(rank: int, scratch: Path) -> None:
    """Another model, or another level, on one rank: all learn from whom, and how it differs."""
    wide = net(width=30 if rank == 2 else 24)
    with pytest.raises(
        FingerprintMismatch,
        match=r"on trainer 2: 0.bias: float32\[30\] \(trainer 0 has float32\[24\]\)",
    ):
        sharded("os", model=wide)
    with pytest.raises(
        FingerprintMismatch, match=r"on trainer 3: level: os \(trainer 0 has os_g\)"
    ):
        sharded("os" if rank == 3 else "os_g")


def test_trainers_that_have_not_met_are_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the two calls that bring up a process group."""
    leave_parallel_env()  # a world of one that another test may have left
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    model = net()
    with pytest.raises(
        RuntimeError, match=r"init_parallel_env\(\) or fleet.init\(is_collective=True\)"
    ):
        group_sharded_parallel(model, torch.optim.Adam(model.parameters()), "os")
