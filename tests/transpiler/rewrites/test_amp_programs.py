"""``strategy.amp`` in a program: the dtype of each op as it prints, and the ops of the scale."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.amp_jobs import amp_strategy
from tests.support.distributed import TWO
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.precision.mixed_forward import fp16_guard
from transpiler.program import Program
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs


class Net(nn.Module):
    """A guarded layer, a product with a parameter, a softmax, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fp16_guard():
            x = self.body(x * self.scale)
        result: torch.Tensor = self.head(torch.softmax(x, 1))
        return result


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def captured(step: Any = step, **options: Any) -> Programs:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
    return Programs(*capture(model, step, optimizer, batch, **options))


def dtypes(program: Program, *types: str) -> list[str]:
    """Of the first results of the forward's ops of these types, in order, as they print."""
    forward = str(program).partition("# backward")[0]
    line = rf" = aten\.(?:{'|'.join(types)})[.(].* (\w+)\[[^]]*\]$"
    return [found[1] for found in re.finditer(line, forward, re.M)]


@pytest.mark.observes(
    "amp",
    "amp_configs.custom_white_list",
    "amp_configs.custom_black_list",
    "amp_configs.custom_black_varnames",
    "amp_configs.use_pure_fp16",
    "amp_configs.use_pure_bf16",
    "amp_configs.use_fp16_guard",
)
@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        # of the product, the layers and the softmax between them
        ({}, ["float32", "float16", "float16", "float16"]),
        ({"custom_white_list": ["mul"]}, ["float16", "float16", "float16", "float16"]),
        ({"custom_black_list": ["softmax"]}, ["float32", "float16", "float32", "float16"]),
        ({"custom_black_list": ["fc"]}, ["float32", "float32", "float32", "float32"]),
        ({"custom_black_varnames": ["head.bias"]}, ["float32", "float16", "float16", "float32"]),
        ({"use_pure_bf16": True}, ["bfloat16"] * 4),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, ["float16"] * 4),
        ({"use_pure_fp16": True}, ["float16", "float16", "float32", "float32"]),
    ],
)
def test_the_dtype_of_each_op_is_in_the_printed_program(
    configs: dict[str, Any], expected: list[str]
) -> None:
    """Gradients and parameters are float32 all the same."""
    made = rewritten(captured(), amp_strategy(**configs)).main

    assert dtypes(made, "mul", "addmm", "_softmax") == expected
    of_parameters = [each for each in made.main.variables.values() if each.of]
    assert {each.dtype for each in (*of_parameters, *made.parameters)} == {"float32"}


@pytest.mark.observes(
    "amp_configs.init_loss_scaling",
    "amp_configs.use_dynamic_loss_scaling",
    "amp_configs.incr_every_n_steps",
    "amp_configs.decr_every_n_nan_or_inf",
    "amp_configs.incr_ratio",
    "amp_configs.decr_ratio",
)
def test_the_scale_is_a_variable_that_ops_of_the_original_update() -> None:
    """Its rule is in the program; a fixed one has no update, and bfloat16 no scale."""
    numbers = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 4}
    ratios = {"incr_ratio": 8.0, "decr_ratio": 0.25}
    pair = captured()
    made = rewritten(pair, amp_strategy(init_loss_scaling=64.0, **numbers, **ratios))
    last = made.main.main.ops[-1]
    assert last.type == "update_loss_scaling" and last.attributes == {**numbers, **ratios}
    assert made.main.storage is not None and made.main.storage is made.startup.storage
    assert made.main.storage.tensors["loss_scaling"] == 64.0
    assert [op.outputs[0] for op in made.startup.main.ops][-3] == "loss_scaling"
    types = [op.type for op in made.main.main.ops]
    assert types.index("check_finite_and_unscale") < types.index("sgd")
    assert pair.main.storage is not None and "loss_scaling" not in pair.main.storage.tensors

    fixed = rewritten(pair, amp_strategy(use_dynamic_loss_scaling=False)).main
    assert [op.type for op in fixed.main.ops][-1] == "sgd"
    assert "loss_scaling@good_steps" not in fixed.main.variables
    bfloat = rewritten(pair, amp_strategy(use_pure_bf16=True)).main
    assert "loss_scaling" not in bfloat.main.variables


class Recurrent(nn.Module):
    """A GRU, which uses its weights at each step, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gru, self.layer = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.tanh(self.layer(self.gru(x)[0])))
        return result


def test_a_weight_may_be_used_often() -> None:
    """The gradients of its uses are summed in float32, in eager training and in the program."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = Programs(*capture(model, _square, optimizer, (torch.randn(4, 5, 8),)))
    made = rewritten(pair, amp_strategy()).main
    assert dtypes(made, "mm", "addmm")[:2] == ["float16"] * 2
    line = r"layer\.weight@GRAD@SCALED = aten\.add\.Tensor\(.*\) *float32\[8, 8\]"
    assert re.search(line, str(made))


def _square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_rewritten_program_is_one_like_any_other(tmp_path: Path) -> None:
    """It draws, its file reads back, and its evaluation is the float32 module's."""
    made = rewritten(captured(), amp_strategy()).main
    made.draw(tmp_path / "amp.svg")
    assert Program.from_proto(made.to_proto()) == made
    assert "float16" not in str(made.clone(for_test=True))


def test_what_cannot_be_captured_again_raises() -> None:
    """A program of another process or an edited one; a step that does not call the model."""
    pair = captured()
    edited = replace(pair.main.main, ops=pair.main.main.ops[:-1])
    for main in (replace(pair.main, storage=None), pair.main.with_blocks(edited)):
        with pytest.raises(ValueError, match="got one that was loaded, or changed"):
            rewritten(Programs(main, pair.startup), amp_strategy())

    def by_parts(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(model.body(x)), y) + model.scale.sum()

    with pytest.raises(ValueError, match=r"expected a step that calls model\(\.\.\.\)"):
        rewritten(captured(by_parts), amp_strategy())


def test_steps_that_trainers_cannot_skip_together_raise() -> None:
    """Several programs, and gradients that trainers average beside servers; bfloat16 may."""
    for configs in ({}, {"use_pure_bf16": True}):
        pair, strategy = captured(), amp_strategy(**configs)
        strategy.a_sync_configs = {"modes": {"head.*": "collective", "*": "sync"}}
        transpiler = DistributeTranspiler(DistributeTranspilerConfig())
        given: Any = (0, pair.main, TWO, 2, None, pair.startup)
        if configs:
            transpiler.transpile(*given, strategy=strategy)
            continue
        with pytest.raises(ValueError, match="mode 'collective', got 'head.weight'.*use_pure_bf16"):
            transpiler.transpile(*given, strategy=strategy)


def test_a_key_without_effect_raises_in_a_program_too() -> None:
    """With servers and without."""
    pair, strategy = captured(), amp_strategy(incr_ratio=3.0)
    strategy.amp, strategy.a_sync = False, False
    for config, where in (
        (DistributeTranspilerConfig(), {"pservers": TWO, "trainers": 2}),
        (DistributeTranspilerConfig(mode="nccl2"), {"trainers": "a:1,b:1"}),
    ):
        with pytest.raises(ValueError, match="incr_ratio: has no effect without amp=True"):
            DistributeTranspiler(config).transpile(
                0, pair.main, startup_program=pair.startup, strategy=strategy, **where
            )


# ---- with what else a strategy asks for ----


def transpiled(optimizer: Any, servers: bool, **fields: Any) -> Program:
    """A trainer's program of two, of a model with one large weight."""
    model = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 2))
    batch = torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
    main, startup = capture(model, step, optimizer(model.parameters(), lr=0.1), batch)
    strategy = amp_strategy()
    strategy.a_sync = False
    for name, value in fields.items():
        setattr(strategy, name, value)
    places: dict[str, Any] = {"pservers": "a:6174", "trainers": 2}
    config = DistributeTranspilerConfig()
    if not servers:
        config = DistributeTranspilerConfig(mode="collective", collective_mode="grad_allreduce")
        places = {"trainers": TWO, "current_endpoint": TWO.partition(",")[0]}
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, main, startup_program=startup, strategy=strategy, **places)
    return transpiler.get_trainer_program()


@pytest.mark.parametrize("fields", [{}, {"fp16_allreduce": True}, {"fuse_all_reduce_ops": False}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_sums_over_trainers_are_back_before_the_check(
    optimizer: Any, fields: dict[str, Any]
) -> None:
    """Each gradient is summed once, as float16 too, and then checked."""
    types = [op.type for op in transpiled(optimizer, servers=False, **fields).main.ops]
    last = max(index for index, each in enumerate(types) if each == "c_allreduce_sum")

    assert types.count("c_allreduce_sum") == 4
    assert last < types.index("check_finite_and_unscale")


@pytest.mark.parametrize(
    ("servers", "fields", "words"),
    [
        (True, {"dgc": True}, "dgc, amp: a program checks whole gradients"),
        (False, {"sharding": True}, "float16 has no effect with strategy.sharding in a program"),
    ],
)
def test_what_checks_no_whole_gradients_is_refused(
    servers: bool, fields: dict[str, Any], words: str
) -> None:
    """With bfloat16 the same program trains."""
    momentum = partial(torch.optim.SGD, momentum=0.9)
    with pytest.raises(ValueError, match=words):
        transpiled(momentum, servers, **fields)

    brain = {**fields, "amp_configs": {"use_pure_bf16": True}}
    assert transpiled(momentum, servers, **brain).main.ops
