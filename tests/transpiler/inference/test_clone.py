"""A training program's clone for tests computes what the module computes in its eval() mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import (
    EIGHT,
    Case,
    bert,
    classify,
    convolution,
    frozen,
    gpt2,
    lstm,
    rows,
    several_inputs,
    sgd,
)
from tests.support.unusual_models import bare
from trainer import Executor
from transpiler import DistributeTranspiler, Program, capture
from transpiler.ir.graph import PERSISTENT, Role, Storage
from transpiler.verify.invariants import defined_before_use


def captured(case: Callable[[], Case]) -> tuple[nn.Module, Callable, Program, Callable]:
    """A model that has trained a little: its step, its program and its batches."""
    torch.manual_seed(3)
    model, step, optimizer, batch = case()
    program, _ = capture(model, step, optimizer(model), batch(4))
    with Executor() as executor:
        executor.run(program, batch(6))
    return model, step, program, batch


def expected(model: nn.Module, step: Callable, fed: tuple[Tensor, ...]) -> dict[str, Tensor]:
    with torch.no_grad():
        result = step(copy.deepcopy(model).eval(), *fed)
    return {"loss": result} if isinstance(result, Tensor) else result


def check(model: nn.Module, step: Callable, clone: Program, fed: tuple[Tensor, ...]) -> list[str]:
    """The outputs that differ from the eager step's; what persists must not change."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = expected(model, step, fed)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with Executor() as executor, torch.backends.mkldnn.flags(enabled=not recurrent):
        came = executor.run(clone, fed, list(wanted))
    with torch.backends.mkldnn.flags(enabled=not recurrent):
        wanted = expected(model, step, fed)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    pairs = zip(wanted.items(), came, strict=True)
    return [name for (name, value), found in pairs if not torch.equal(value, found)]


def rewritten(program: Program) -> Program:
    """The clone in a process that did not capture the program."""
    assert program.storage is not None
    again = Program.from_proto(program.to_proto())
    storage = Storage(program.storage.tensors, None)
    return Program(tuple(again.blocks), None, storage).clone(for_test=True)


SHORT = [convolution, gpt2, several_inputs]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in SHORT else pytest.mark.long) for c in EIGHT],
    ids=lambda case: case.__name__,
)
def test_the_clone_equals_the_eager_step_in_eval_mode(case):
    """To the bit, at another batch size, over the module's own storage; it holds no gradient, no
    state and no update, and changes nothing; the module's modes stay.
    """
    model, step, program, batch = captured(case)
    model.train()
    clone = program.clone(for_test=True)

    assert clone.storage is program.storage
    assert all(module.training for module in model.modules())
    assert not clone.main.variables_of(Role.GRADIENT, Role.STATE)
    assert not list(defined_before_use(clone))
    assert check(model, step, clone, batch(5)) == []
    assert clone.clone(for_test=True).fingerprint() == clone.fingerprint()


ALONE = [frozen, several_inputs, convolution, lstm]


@pytest.mark.parametrize(
    "case",
    ALONE,
    ids=lambda case: case.__name__,
)
def test_a_program_alone_is_rewritten(case):
    """A process that has the program alone rewrites its ops, and gets the same bits."""
    model, step, program, batch = captured(case)
    clone = rewritten(program)

    assert not list(defined_before_use(clone))
    types = {op.type for op in clone.main.ops}
    assert not any("bernoulli" in each or "backward" in each for each in types), types
    assert check(model, step, clone, batch(5)) == []


@pytest.mark.parametrize("case", [gpt2, bert], ids=lambda case: case.__name__)
def test_attention_that_is_rewritten_may_round(case):
    """torch evaluates attention by a fused kernel; a rewritten program has the ops of training,
    without their dropout: equal but for rounding.
    """
    model, step, program, batch = captured(case)
    fed = batch(5)
    with Executor() as executor:
        (loss,) = executor.run(rewritten(program), fed, ["loss"])
    assert torch.allclose(loss, expected(model, step, fed)["loss"], rtol=1e-6, atol=0)


def test_a_trainer_evaluates_attention_as_its_module_does():
    """In the process that captured the step, the clone of a trainer's program computes by the same
    kernels as that of the single-node program; another process rewrites its ops.
    """
    torch.manual_seed(3)
    model, step, optimizer, batch = gpt2()
    program, startup = capture(model, step, optimizer(model), batch(4))
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program, "a:1,b:1", 1, startup_program=startup)
    trainer = transpiler.get_trainer_program()
    clone, single = (each.clone(for_test=True).main.ops for each in (trainer, program))
    received = [op for op in clone if op.type in ("recv", "fetch_barrier", "concat")]
    alone = Program.from_proto(trainer.to_proto()).clone(for_test=True)

    assert clone[len(received) :] == single
    fused = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert fused in {op.type for op in clone} - {op.type for op in alone.main.ops}


LAYERS = {
    "alpha": lambda: nn.AlphaDropout(0.3),
    "channels": lambda: nn.Dropout1d(0.3),
    "alpha_channels": lambda: nn.FeatureAlphaDropout(0.3),
    "in_place": lambda: nn.Dropout(0.4, inplace=True),
    "rrelu": lambda: nn.RReLU(),
    "batch_norm": lambda: nn.BatchNorm1d(3),
    "batch_norm_without_statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "instance_norm": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "dropout_before_relu": lambda: nn.Sequential(nn.Dropout(0.2), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_every_layer_that_trains_otherwise_is_rewritten(make):
    """Each kind of dropout and of norm, as eval() has it, to the bit."""
    model = nn.Sequential(nn.Conv1d(3, 3, 1), make(), nn.Flatten(), nn.Linear(15, 3))
    program, _ = capture(model, classify, sgd(model), rows(3, 5)(4))
    with Executor() as executor:
        executor.run(program, rows(3, 5)(6))
    assert check(model, classify, rewritten(program), rows(3, 5)(7)) == []


def test_what_a_step_writes_into_buffers_is_left_out():
    """A rewritten clone reads buffers as they are, and writes none."""

    def forward(self, x):
        with torch.no_grad():
            self.seen.add_(1.0)
        return self.out(x) * self.seen

    model = bare(forward, out=nn.Linear(6, 3))
    model.register_buffer("seen", torch.ones(3))
    program, _ = capture(model, classify, sgd(model), rows(6)(4))
    clone = rewritten(program)

    held = {v.name for v in clone.main.variables.values() if v.role in PERSISTENT}
    assert held == {"out.weight", "out.bias", "seen"}
    assert not any(op.type == "aten.add_.Tensor" for op in clone.main.ops)
    x, y = rows(6)(5)
    with Executor() as executor:
        (loss,) = executor.run(clone, (x, y), ["loss"])
    wanted = nn.functional.cross_entropy(model.out(x) * model.seen, y)
    assert torch.equal(loss, wanted.detach())


def test_a_clone_says_what_it_cannot_be():
    """A flag that is no flag, a program that returns nothing."""
    model = nn.Linear(6, 3)
    program, startup = capture(model, classify, sgd(model), rows(6)(4))

    assert program.clone() == program and program.clone() is not program
    with pytest.raises(TypeError, match="expected True or False, got 1"):
        program.clone(for_test=1)
    with pytest.raises(ValueError, match="got one that returns nothing"):
        startup.clone(for_test=True)
