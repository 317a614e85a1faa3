"""The op catalogue: what is accepted, what is refused, and how a refusal reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from transpiler.ir.graph import Argument, Literal, Op, Ref, Symbol
from transpiler.ir.ops import COMMUNICATION, SERVER_OPS, allowed_on_server, aten_overload, check

ADAM = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def adam(**changes: Argument) -> Op:
    """An update of w; a change to the word ``Ref`` itself stands for "leave it out"."""
    states = {name: Ref(f"w@{name}") for name in ("step", "exp_avg", "exp_avg_sq")}
    arguments: dict[str, Any] = {
        "param": Ref("w"),
        "grad": Ref("w@GRAD"),
        **states,
        "group": 0,
        **ADAM,
        **changes,
    }
    return Op(
        "adam", {name: value for name, value in arguments.items() if value is not Ref}, ("w",)
    )


CHANGES: dict[str, Argument] = {
    "x": (Ref("a"),),
    "endpoints": ("h:1", "h:2"),
    "trainer_id": 0,
    "sections": (4, 4),
    "delta": ("a.block0.delta", "a.block1.delta"),
    "mode": "geo",
    "k_steps": 5,
}

ACCEPTED = [
    Op("aten.mm", {"self": Ref("x"), "mat2": Ref("w")}, ("y",)),
    Op("aten.add.Tensor", {"self": Ref("x"), "other": 2}, ("y",)),
    Op("aten.mul.Tensor", {"self": Ref("x"), "other": 0.125}, ("y",)),
    Op("aten.div.Scalar", {"self": Ref("x"), "other": Ref("batch")}, ("y",)),
    Op("aten.view", {"self": Ref("x"), "size": (Ref("batch"), -1)}, ("y",)),
    Op(
        "aten.sum.dim_IntList",
        {"self": Ref("x"), "dim": None, "dtype": Symbol("dtype", "float64")},
        ("y",),
    ),
    Op("aten.index.Tensor", {"self": Ref("x"), "indices": (None, Ref("i"))}, ("y",)),
    Op("aten.split.Tensor", {"self": Ref("x"), "split_size": 4}, ("a", "b", "c")),
    Op("aten.native_dropout", {"input": Ref("x"), "p": 0.5, "train": True}, ("y", "mask")),
    Op(
        "aten.native_layer_norm_backward",
        {
            "grad_out": Ref("g"),
            "input": Ref("x"),
            "normalized_shape": (4,),
            "mean": Ref("m"),
            "rstd": Ref("r"),
            "weight": None,
            "bias": None,
            "output_mask": (True, False, False),
        },
        ("gx", "", ""),
    ),
    Op(
        "aten.full",
        {"size": (), "fill_value": float("-inf"), "device": Symbol("device", "executor")},
        ("y",),
    ),
    Op("aten.sym_size.int", {"self": Ref("x"), "dim": 0}, ("n",)),
    Op("sym.size", {"x": Ref("x"), "dim": 0}, ("n",)),
    Op("sym.mul", {"a": Ref("n"), "b": 16}, ("m",)),
    Op("assign_value", {"value": Literal("int64", (2,), bytes(16))}, ("c",)),
    Op("split", {"x": Ref("w@GRAD"), "sections": (6, 2)}, ("w@GRAD.block0", "w@GRAD.block1")),
    Op("send", {"x": (Ref("a"), Ref("b")), "endpoints": ("h:1", "h:2"), "trainer_id": 0}),
    Op(
        "send", {"x": (Ref("a"),), "endpoints": ("h:1", "h:2"), "trainer_id": 0, "sections": (4, 4)}
    ),
    Op("send", CHANGES),
    Op("send_barrier", {"endpoints": ("h:1",), "trainer_id": 0, "half_async": True}),
    Op(
        "dc_compensate",
        {"grad": Ref("g"), "param": Ref("w"), "backups": (Ref("a"), Ref("b")), "factor": 0.5},
        ("h",),
    ),
    Op("recv", {"param": "w", "endpoints": ("h:1",)}, ("w",)),
    Op("clip", {"x": Ref("g"), "min": -1, "max": float("inf")}, ("g@CLIP",)),
    adam(),
    adam(amsgrad=True, max_exp_avg_sq=Ref("w@max")),
    adam(maximize=True, lr=1),
]


@pytest.mark.parametrize("op", ACCEPTED, ids=lambda op: op.type)
def test_what_the_catalogue_has_is_accepted(op: Op) -> None:
    """Ops with the arguments that their schemas ask for pass."""
    assert check(op) is None


REFUSED = [
    (Op("os.system", {"command": "ls"}), "op 'os.system': the catalogue has no such op"),
    (Op("aten.nope"), "torch .* has no such op"),
    (Op("aten.mm.default"), "has no second part"),
    (Op("aten.mm.__class__"), "no such op"),
    (Op("aten.__class__"), "no such op"),
    (Op("aten.name"), "no such op"),
    (Op("aten.mm\n"), "expected aten.NAME"),
    (Op("aten"), "no such op"),
    (Op("aten."), "expected aten.NAME"),
    (Op(""), "no such op"),
    (Op("prims.add"), "no such op"),
    (Op("aten.from_file", {"filename": "/etc/passwd"}, ("y",)), "may not hold it"),
    (Op("aten.set_.source_Storage"), "may not hold it"),
    (Op("aten.resize_", {"self": Ref("x"), "size": (9,)}, ("y",)), "may not hold it"),
    (
        Op("aten._reshape_alias", {"self": Ref("x"), "size": (9,), "stride": (1,)}, ("y",)),
        "may not hold it",
    ),
    (Op("aten.item", {"self": Ref("x")}, ("y",)), "may not hold it"),
    (Op("aten.save", {"item": 1, "filename": "x"}), "gives no tensor"),
    (Op("aten.manual_seed", {"seed": 1}), "gives no tensor"),
    (
        Op("aten.bernoulli", {"self": Ref("x"), "generator": 5}, ("y",)),
        "'generator': expected nothing .* or None, got 5",
    ),
    (
        Op("aten.mm", {"self": Ref("x")}, ("y",)),
        "op 'aten.mm', argument 'mat2': expected a variable .*, got none",
    ),
    (
        Op("aten.mm", {"self": Ref("x"), "mat2": "w"}, ("y",), "train.py:7"),
        r"op 'aten.mm' \(train.py:7\), .*got 'w' \(str\)",
    ),
    (
        Op("aten.mm", {"self": Ref("x"), "mat2": Ref("w"), "out": Ref("y")}, ("y",)),
        "got an argument 'out'",
    ),
    (Op("aten.mm", {"self": Ref(""), "mat2": Ref("w")}, ("y",)), "'self'"),
    (Op("aten.mm", {"self": Ref("x"), "mat2": Ref("w")}, ("y", "z")), "expected 1 results, got 2"),
    (
        Op("aten.native_dropout", {"input": Ref("x"), "p": 0.5, "train": True}, ("y", "y")),
        "names of their own",
    ),
    (
        Op("aten.native_dropout", {"input": Ref("x"), "p": 0.5, "train": 1}, ("y", "m")),
        "expected a bool or None, got 1",
    ),
    (Op("aten.view", {"self": Ref("x"), "size": (True,)}, ("y",)), "'size'"),
    (Op("aten.view", {"self": Ref("x"), "size": (2**63,)}, ("y",)), "'size'"),
    (Op("aten.view", {"self": Ref("x"), "size": (2.0,)}, ("y",)), "'size'"),
    (
        Op(
            "aten.full",
            {"size": (), "fill_value": 1, "device": Symbol("device", "file:///")},
            ("y",),
        ),
        "expected a device",
    ),
    (
        Op("aten._to_copy", {"self": Ref("x"), "dtype": Symbol("dtype", "serialize")}, ("y",)),
        "expected a dtype",
    ),
    (
        Op("aten._to_copy", {"self": Ref("x"), "dtype": Symbol("device", "cpu")}, ("y",)),
        "expected a dtype",
    ),
    (Op("assign_value", {"value": Literal("float32", (2,), bytes(4))}, ("c",)), "as many bytes"),
    (Op("assign_value", {"value": Literal("object", (), b"")}, ("c",)), "known dtype"),
    (
        Op("assign_value", {"value": Literal("float32", (-1, -1), bytes(4))}, ("c",)),
        "as many bytes",
    ),
    (Op("send", {"x": (), "endpoints": (), "trainer_id": 0}), "one or more variables"),
    (
        Op("send", {**CHANGES, "delta": ("a.delta",)}),
        "'delta': expected 2, one for each slice, got 1",
    ),
    (
        Op("send", {**CHANGES, "endpoints": ("h:1",)}),
        "'endpoints': expected 2, one for each slice, got 1",
    ),
    (Op("send", {**CHANGES, "k_steps": 0}), "'k_steps'"),
    (
        Op("send", {key: value for key, value in CHANGES.items() if key != "mode"}),
        "together, got delta, k_steps, sections",
    ),
    (
        Op("send", {key: value for key, value in CHANGES.items() if key != "delta"}),
        "together, got k_steps, mode, sections",
    ),
    (Op("send_barrier", {"endpoints": ("h:1",), "trainer_id": 0, "half_async": 1}), "'half_async'"),
    (
        Op(
            "dc_compensate",
            {"grad": Ref("g"), "param": Ref("w"), "backups": (), "factor": 0.5},
            ("h",),
        ),
        "'backups'",
    ),
    (
        Op("send", {"x": (Ref("a"),), "endpoints": ("h:1", "h:2"), "trainer_id": 0}),
        "expected 1, one for each slice, got 2",
    ),
    (Op("send", {"x": (Ref("a"),), "endpoints": ("h:1",), "trainer_id": -1}), "0 or more"),
    (
        Op("split", {"x": Ref("g"), "sections": (4,)}, ("a", "b")),
        "one for each of the 2 results, got 1",
    ),
    (Op("split", {"x": Ref("g"), "sections": ()}, ()), "1 or more results"),
    (
        Op("scale", {"x": Ref("g"), "scale": float("nan")}, ("g",)),
        "expected a finite number, got nan",
    ),
    (Op("clip", {"x": Ref("g"), "min": float("nan"), "max": 1.0}, ("g",)), "other than nan"),
    (Op("sum", {"x": (Ref("a"),)}, ("",)), "results with names"),
    (adam(lr=float("nan")), "argument 'lr': expected a finite number"),
    (adam(lr=True), "argument 'lr'"),
    (adam(lr=-1.0), "Invalid learning rate"),
    (adam(betas=0.9), "argument 'betas': expected list of 2"),
    (adam(betas=(0.9, 0.9, 0.9)), "argument 'betas': expected list of 2"),
    (adam(eps=Ref), "argument 'eps': expected a finite number, got none"),
    (adam(maximize=1), "argument 'maximize': expected a bool"),
    (adam(amsgrad=True), "argument 'max_exp_avg_sq': expected a variable, got none"),
    (adam(momentum=0.9), "got an argument 'momentum'"),
    (adam(group=-1), "argument 'group'"),
    (adam(step=Ref), "argument 'step'"),
    (replace(adam(), outputs=("v",)), "expected the parameter as its result"),
    (replace(adam(), outputs=()), "expected 1 results, got 0"),
]


@pytest.mark.parametrize(
    ("op", "message"), REFUSED, ids=lambda case: case.type if isinstance(case, Op) else ""
)
def test_what_the_catalogue_has_not_is_refused_in_words(op: Op, message: str) -> None:
    """An op that is unknown, unsafe or wrongly argued raises ValueError, naming op, argument, what
    was expected and what came.
    """
    with pytest.raises(ValueError, match=message):
        check(op)


def test_an_overload_is_the_one_that_torch_has() -> None:
    """A name without a second part is the default overload."""
    assert aten_overload("aten.mm") is torch.ops.aten.mm.default
    assert aten_overload("aten.add.Tensor") is torch.ops.aten.add.Tensor


def test_every_optimizer_op_checks_with_the_arguments_that_its_rule_asks_for() -> None:
    """For each rule: its defaults' numbers, and the states that torch keeps for them, make an op
    that passes.
    """
    from transpiler.ir.rules import RULES, rule_of, state_of

    for op_type, spec in RULES.items():
        w = torch.zeros(2, requires_grad=True)
        optimizer = spec.cls([w], momentum=0.9) if op_type == "momentum" else spec.cls([w])
        rule = rule_of(optimizer, optimizer.param_groups[0])
        states = {state: Ref(f"w@{state}") for state in state_of(rule)}
        arguments = {
            "param": Ref("w"),
            "grad": Ref("g"),
            **states,
            "group": 0,
            **rule.hparams,
            **rule.flags,
        }

        assert rule.type == op_type
        assert check(Op(op_type, arguments, ("w",))) is None


def test_servers_run_no_compute_op() -> None:
    """The allow-list of a server holds its own few ops and the optimizer ops: nothing of torch's,
    nothing of a trainer's.
    """
    assert not any(
        name.startswith("aten.") or allowed_on_server(f"aten.{name}") for name in SERVER_OPS
    )
    assert allowed_on_server("adam")
    assert COMMUNICATION & SERVER_OPS == {"listen_and_serv"}
    assert not allowed_on_server("send")
