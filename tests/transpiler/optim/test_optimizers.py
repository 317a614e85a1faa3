"""Update rules over slices equal torch.optim over whole tensors."""

import math
import platform
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from pserver.dense.update import CHUNK, SliceUpdater, SmallSlices, slice_state
from transpiler.ir.rules import RULES, Rule, hparams_of, rule_of, state_of
from transpiler.optim.optim import AdamD2Sum, DecayedAdagrad, Ftrl

# Where a parameter of three rows is cut: at odd places, with an empty slice, and one of more than a
# chunk.
CUTS = [0, 3, 3, 3 + CHUNK + 14, 3 * 30011]
# the last slices begin inside what is left after the last full vector
FEW = [0, 3, 3, 1017, 3003, 3007, 3 * 1003]

VARIANTS: list[tuple[str, type[optim.Optimizer], dict[str, Any]]] = [
    ("sgd", optim.SGD, {}),
    ("sgd", optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    ("sgd", optim.SGD, {"foreach": True}),
    ("momentum", optim.SGD, {"momentum": 0.9}),
    ("momentum", optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("momentum", optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (
        "momentum",
        optim.SGD,
        {"momentum": 0.9, "nesterov": True, "maximize": True, "foreach": False},
    ),
    ("adam", optim.Adam, {}),
    ("adam", optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    ("adam", optim.Adam, {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-5}),
    ("adam", optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("adam", optim.Adam, {"foreach": True, "amsgrad": True}),
    ("adamw", optim.AdamW, {}),
    ("adamw", optim.AdamW, {"amsgrad": True, "weight_decay": 0.2, "maximize": True}),
    ("adamax", optim.Adamax, {"weight_decay": 0.01}),
    ("adamax", optim.Adamax, {"maximize": True, "foreach": True}),
    ("nadam", optim.NAdam, {"momentum_decay": 0.01}),
    ("nadam", optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    ("radam", optim.RAdam, {}),
    ("radam", optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    ("adagrad", optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("adagrad", optim.Adagrad, {"weight_decay": 0.1, "maximize": True}),
    ("adadelta", optim.Adadelta, {"rho": 0.8}),
    ("adadelta", optim.Adadelta, {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    ("rmsprop", optim.RMSprop, {}),
    ("rmsprop", optim.RMSprop, {"momentum": 0.9}),
    ("rmsprop", optim.RMSprop, {"centered": True, "weight_decay": 0.01}),
    ("rmsprop", optim.RMSprop, {"centered": True, "momentum": 0.5, "maximize": True}),
    ("rprop", optim.Rprop, {}),
    ("rprop", optim.Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0), "maximize": True}),
    ("asgd", optim.ASGD, {"t0": 5, "lambd": 0.01, "weight_decay": 0.01}),
    ("asgd", optim.ASGD, {"maximize": True}),
    ("ftrl", Ftrl, {}),
    ("ftrl", Ftrl, {"l1": 0.01, "l2": 0.1, "beta": 1.0}),
    ("decayed_adagrad", DecayedAdagrad, {}),
    ("decayed_adagrad", DecayedAdagrad, {"decay": 0.5}),
    ("adam_d2sum", AdamD2Sum, {}),
]
FUSED: list[tuple[str, type[optim.Optimizer], dict[str, Any]]] = [
    ("sgd", optim.SGD, {"fused": True}),
    ("momentum", optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    ("adam", optim.Adam, {"fused": True, "amsgrad": True}),
    ("adamw", optim.AdamW, {"fused": True}),
    ("adagrad", optim.Adagrad, {"fused": True}),
]


def label(value: object) -> str:
    """Readable test names."""
    if isinstance(value, type):
        return value.__name__
    return (
        "-".join(f"{key}={item}" for key, item in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def schedule(group: dict[str, Any], step: int) -> None:
    """What a one-cycle schedule does to a group: rate and momentum (or betas) move together."""
    group["lr"] = 0.01 * (1.5 + math.sin(step))
    if "betas" in group:
        group["betas"] = (0.85 + 0.005 * step, 0.99)
    elif group.get("momentum"):
        group["momentum"] = 0.85 + 0.005 * step


def made(rule: Rule, memory: Tensor, cuts: list[int]) -> list[SliceUpdater]:
    """An updater for each slice."""
    edges = zip(cuts, cuts[1:], strict=False)
    return [SliceUpdater(rule, memory[begin:end], begin, memory.numel()) for begin, end in edges]


def both(
    cls: type[optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype, cuts: list[int]
) -> tuple[Tensor, Tensor, list[SliceUpdater]]:
    """20 steps over the whole tensor with torch.optim, and over slices, which are saved and loaded
    in the middle.
    """
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(3, cuts[-1] // 3, generator=generator).to(dtype)
    memory = whole.clone().reshape(-1)
    optimizer = cls([whole], lr=0.01, **settings)
    group = optimizer.param_groups[0]
    rule = rule_of(optimizer, group)
    updaters = made(rule, memory, cuts)
    for step in range(20):
        whole.grad = torch.randn(3, cuts[-1] // 3, generator=generator).to(dtype)
        schedule(group, step)
        optimizer.step()
        row = hparams_of(rule.type, group)
        for updater, begin, end in zip(updaters, cuts, cuts[1:], strict=False):
            updater.update(whole.grad.reshape(-1)[begin:end], row)
        if step == 9:
            states = [updater.state() for updater in updaters]
            updaters = made(rule, memory, cuts)
            for updater, state in zip(updaters, states, strict=True):
                updater.load_state(state)
    return whole.reshape(-1), memory, updaters


@pytest.mark.parametrize(("op_type", "cls", "settings"), VARIANTS, ids=label)
def test_every_element_wise_optimizer_works_on_slices(
    op_type: str, cls: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    """Slices of a parameter end where the whole parameter ends, to the bit, with a moving schedule
    and a reload half-way.
    """
    whole, memory, updaters = both(cls, settings, torch.float32, CUTS)
    assert updaters[0].rule.type == op_type
    assert torch.equal(whole, memory)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between two tensors' elements."""
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    lines = [
        torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)
        for bits in (a.view(kind).long(), b.view(kind).long())
    ]
    return (lines[0] - lines[1]).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op_type", "cls", "settings"), FUSED, ids=label)
def test_fused_steps_on_slices(
    op_type: str, cls: type[optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """A fused rule on slices ends within one ulp of the fused rule on the whole (on x86: equal to
    the bit).
    """
    whole, memory, updaters = both(cls, settings, dtype, FEW)
    assert updaters[0].rule.type == op_type and updaters[0].rule.flags["fused"]
    assert int(ulps(whole, memory).max()) <= int(platform.machine() != "x86_64")


@pytest.mark.parametrize(("op_type", "cls", "settings"), VARIANTS, ids=label)
def test_bfloat16_slices(
    op_type: str, cls: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    """bfloat16 slices end within one ulp of the whole parameter after 20 steps (on x86: equal to
    the bit).
    """
    whole, memory, updaters = both(cls, settings, torch.bfloat16, FEW)
    assert updaters[0].rule.type == op_type
    assert int(ulps(whole, memory).max()) <= int(platform.machine() != "x86_64")


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=label)
def test_a_servers_thread_count_does_not_change_a_slice(settings: dict[str, float]) -> None:
    """A large bfloat16 slice ends at the same bits whether the server has one thread or two."""
    optimizer = optim.SGD([torch.zeros(1)], lr=0.01, **settings)  # type: ignore[arg-type]
    rule = rule_of(optimizer, optimizer.param_groups[0])
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            generator = torch.Generator().manual_seed(5)
            values = torch.randn(50_017, generator=generator).to(torch.bfloat16)
            updater = SliceUpdater(rule, values, 3, 60_000)
            for _ in range(3):
                updater.update(
                    torch.randn(50_017, generator=generator).to(torch.bfloat16), rule.hparams
                )
            results.append(values)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize(("op_type", "cls", "settings"), VARIANTS, ids=label)
def test_state_names_follow_torch(
    op_type: str, cls: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    """The states that a rule announces are those that torch makes, without drawing random
    numbers.
    """
    parameter = torch.zeros(5, 2)
    optimizer = cls([parameter], lr=0.01, **settings)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    before = torch.random.get_rng_state()
    announced = state_of(rule)
    assert torch.equal(before, torch.random.get_rng_state())
    parameter.grad = torch.ones(5, 2)
    optimizer.step()
    assert rule.type == op_type
    assert announced == {
        key: value.shape == parameter.shape for key, value in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize(("op_type", "cls", "settings"), VARIANTS + FUSED, ids=label)
def test_a_resumed_optimizer_hands_its_state_over(
    op_type: str, cls: type[optim.Optimizer], settings: dict[str, Any]
) -> None:
    """Slices that start from a stepped optimizer's state go on as it does."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(10, 7, generator=generator)
    optimizer = cls([whole], lr=0.01, **settings)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    for _ in range(3):
        whole.grad = torch.randn(10, 7, generator=generator)
        optimizer.step()
    memory = whole.clone().reshape(-1)
    updaters = [
        SliceUpdater(rule, memory[begin:end], begin, 70) for begin, end in ((0, 21), (21, 70))
    ]
    for updater, (begin, end) in zip(updaters, ((0, 21), (21, 70)), strict=True):
        updater.load_state(slice_state(optimizer, whole, begin, end))
    whole.grad = torch.randn(10, 7, generator=generator)
    for updater, (begin, end) in zip(updaters, ((0, 21), (21, 70)), strict=True):
        updater.update(whole.grad.reshape(-1)[begin:end], rule.hparams)
    optimizer.step()
    assert rule.type == op_type
    assert int(ulps(whole.reshape(-1), memory).max()) <= int(
        "fused" in settings and platform.machine() != "x86_64"
    )


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,)])
@pytest.mark.parametrize("op_type", sorted(RULES))
def test_empty_and_scalar_parameters_are_slices_too(op_type: str, shape: tuple[int, ...]) -> None:
    """A parameter without elements and one without dimensions are updated, saved and loaded as any
    other.
    """
    parameter = torch.full(shape, 2.0)
    memory = parameter.clone().reshape(-1)
    optimizer = RULES[op_type].cls([parameter], lr=0.1)  # type: ignore[call-arg]
    rule = rule_of(optimizer, optimizer.param_groups[0])
    updater = SliceUpdater(rule, memory)
    for _ in range(2):
        parameter.grad = torch.full(shape, 0.5)
        optimizer.step()
        updater.update(parameter.grad.reshape(-1), rule.hparams)
        saved = updater.state()
        updater = SliceUpdater(rule, memory)
        updater.load_state(saved)
    assert torch.equal(parameter.reshape(-1), memory)
    assert {key: value.dim() == 1 for key, value in saved.items()} == state_of(rule)


def test_tensor_hyper_parameters_become_floats() -> None:
    """A rate or beta given as a tensor is a number of the rule; the step is the same but for the
    last bits.
    """
    parameter = torch.ones(4)
    memory = parameter.clone()
    optimizer = optim.Adam(
        [parameter], lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99))
    )
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert rule.hparams["lr"] == float(torch.tensor(0.1)) and isinstance(rule.hparams["lr"], float)
    assert rule.hparams["betas"] == (float(torch.tensor(0.9)), float(torch.tensor(0.99)))
    parameter.grad = torch.full((4,), 0.3)
    SliceUpdater(rule, memory).update(parameter.grad, rule.hparams)
    optimizer.step()
    assert int(ulps(parameter, memory).max()) <= 2


def test_a_state_of_the_wrong_size_is_refused() -> None:
    """load_state names the state and both sizes, and leaves the updater as it was."""
    rule = Rule("momentum", {"lr": 0.1, "momentum": 0.9})
    updater = SliceUpdater(rule, torch.zeros(4))
    updater.update(torch.ones(4), rule.hparams)
    with pytest.raises(ValueError, match="state momentum_buffer: expected 4 elements"):
        updater.load_state({"momentum_buffer": torch.zeros(5)})
    assert torch.equal(updater.state()["momentum_buffer"], torch.ones(4))
    read = updater.read("momentum_buffer")
    assert read is not None and torch.equal(read, torch.ones(4)) and updater.read("exp_avg") is None


def test_bytes_held_counts_the_slice_and_its_states() -> None:
    """A slice of n float32 elements under Adam holds 12 n bytes and a step counter once it has been
    stepped.
    """
    rule = Rule("adam", {"lr": 0.1})
    updater = SliceUpdater(rule, torch.zeros(100))
    assert updater.bytes_held == 400
    updater.update(torch.ones(100), rule.hparams)
    assert updater.bytes_held == 1204


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("op_type", sorted(RULES))
def test_small_slices_that_step_together_are_equal_to_each_by_itself(op_type, fused):
    """Values and states, with gradients missing in some steps, new numbers in others, and a state
    loaded in between.
    """
    torch.manual_seed(0)
    cls = RULES[op_type].cls
    if fused and "fused" not in RULES[op_type].flags:
        return
    momentum = {"momentum": 0.9} if op_type == "momentum" else {}
    values = [torch.rand(size) + 0.5 for size in (5, 64, 1000)]
    made = cls(
        [value.clone() for value in values],
        lr=0.01,
        **momentum,
        **({"fused": True} if fused else {}),
    )
    rule = rule_of(made, made.param_groups[0])
    alone, joint = ([SliceUpdater(rule, value.clone()) for value in values] for _ in range(2))
    together = SmallSlices(joint)
    for step in range(5):
        row = {**rule.hparams, "lr": 0.01 / (1 + step)}
        grads = [torch.randn_like(value) for value in values]
        present = [index for index in range(3) if step != 2 or index != 1]
        if step == 3:
            joint[0].load_state(joint[0].state())
        for index in present:
            alone[index].update(grads[index], row)
        together.update({joint[index]: grads[index] for index in present}, row)
        for one, other in zip(alone, joint, strict=True):
            assert torch.equal(one.values, other.values)
            assert all(torch.equal(value, other.state()[key]) for key, value in one.state().items())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op_type", sorted(RULES))
def test_a_rate_that_is_a_tensor_rounds_as_the_users(op_type, dtype, options):
    """Each class with a tensor in place of its rate, which a schedule moves; over slices, to the
    bit.
    """
    torch.manual_seed(0)
    options = {**options, **({"momentum": 0.9} if op_type == "momentum" else {})}
    whole = torch.nn.Parameter(torch.rand(1000) + 0.5)
    rate = torch.tensor(0.02, dtype=dtype)
    try:
        own = RULES[op_type].cls([whole], lr=rate, **options)
    except (TypeError, ValueError):  # the class has no such option, or takes no tensor with it
        return
    if (op_type, dtype) == ("asgd", torch.float64) and "foreach" in options:
        with pytest.raises(ValueError, match="got one of float64: with foreach"):
            rule_of(own, own.param_groups[0])
        return
    rule = rule_of(own, own.param_groups[0])
    sizes = [1000] if rule.whole else [300, 700]
    updaters = [
        SliceUpdater(rule, part.clone(), begin, 1000)
        for part, begin in zip(whole.detach().split(sizes), (0, 300), strict=False)
    ]
    for step in range(6):
        rate.fill_(0.02 / (1 + step))
        whole.grad = torch.randn(1000)
        row = hparams_of(rule.type, own.param_groups[0])
        own.step()
        for updater, grad in zip(updaters, whole.grad.split(sizes), strict=True):
            updater.update(grad.clone(), row)
        assert torch.equal(torch.cat([each.values for each in updaters]), whole.detach())


def test_a_rate_of_another_dtype_is_refused():
    """The message says what is expected."""
    made = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5).bfloat16())
    with pytest.raises(ValueError, match="float32 or float64, got one of torch.bfloat16"):
        rule_of(made, made.param_groups[0])
