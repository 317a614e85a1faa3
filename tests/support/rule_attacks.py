"""Plans whose registered rule is none that a server runs, and what a refusal of each says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.registered_rules import Lars
from tests.support.server_programs import planned
from transpiler.ir.graph import Block, Literal, Op, Ref, Role, Symbol, Variable, freeze
from transpiler.ir.rules import Hparam, Rule, registered
from transpiler.program import Program

NUMBERS: dict[str, Hparam] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
INPUTS = (
    Variable("param", ("n",), "float32", Role.PARAMETER),
    Variable("grad", ("n",), "float32", Role.GRADIENT),
    Variable("m", ("n",), "float32", Role.STATE),
    Variable("lr", (), "float64", Role.INPUT),
)
OPS = (
    Op("aten.mul.Tensor", {"self": Ref("grad"), "other": Ref("lr")}, ("t",)),
    Op("aten.sub.Tensor", {"self": Ref("param"), "other": Ref("t")}, ("param@NEW",)),
    Op("assign", {"x": Ref("m")}, ("m@NEW",)),
)


def block(*ops: Op, inputs: tuple[Variable, ...] = INPUTS) -> Block:
    return Block(0, freeze({each.name: each for each in inputs}), ops)


def rule(*ops: Op, inputs: tuple[Variable, ...] = INPUTS, **fields: Any) -> Program:
    """A server's program whose plan has a rule of these ops, or with these fields."""
    sound = Rule("registered.mine", {"lr": 0.1}, {}, block(*(ops or OPS), inputs=inputs))
    return planned(groups=(replace(sound, **fields),))


def first(op_type: str, **arguments: Any) -> Program:
    """The rule whose first op is another."""
    return rule(Op(op_type, arguments, ("t",)), *OPS[1:])


def with_state(**fields: Any) -> Program:
    return rule(inputs=(*INPUTS[:2], replace(INPUTS[2], **fields), INPUTS[3]))


GRAD, LR = Ref("grad"), Ref("lr")
ATTACKS: dict[str, tuple[Program, str]] = {
    "a file": (first("aten.from_file", filename="/etc/passwd"), "aten.from_file.*element by elem"),
    "a resize": (first("aten.resize_", self=GRAD, size=(2**40,)), "aten.resize_.*element by elem"),
    "a huge tensor": (
        first("aten.zeros", size=(2**40,)),
        "op 'aten.zeros': expected an op that works element by element",
    ),
    "a broadcast": (first("aten.expand", self=GRAD, size=(2**40, 6)), "aten.expand.*element by"),
    "a matrix": (first("aten.ger", self=GRAD, vec2=GRAD), "aten.ger.*element by element"),
    "a view in another dtype": (
        first("aten.view.dtype", self=GRAD, dtype=Symbol("dtype", "int8")),
        "aten.view.dtype.*element by element",
    ),
    "random numbers": (first("aten.rand_like", self=GRAD), "aten.rand_like.*element by element"),
    "in place": (first("aten.mul_.Tensor", self=GRAD, other=2.0), "aten.mul_.Tensor.*element by"),
    "into another tensor": (
        first("aten.mul.out", self=GRAD, other=GRAD, out=Ref("param")),
        "changes none of its arguments",
    ),
    "indices": (first("aten.where", condition=GRAD), "changes none of its arguments and gives one"),
    "a device": (
        first("aten._to_copy", self=GRAD, device=Symbol("device", "cuda")),
        "may not use the argument",
    ),
    "a server's op": (first("scale", x=GRAD, scale=2.0), "op 'scale': expected an op that works"),
    "a send": (first("fetch_barrier", endpoints=(), trainer_id=0), "'fetch_barrier'"),
    "a whole number without end": (
        first("sym.pow", a=10, b=10**18),
        "op 'sym.pow': expected numbers, at least one of them a variable",
    ),
    "arithmetic on sizes": (first("sym.size", x=GRAD, dim=0), "op 'sym.size'"),
    "a constant tensor": (
        first("assign_value", value=Literal("float32", (1,), b"\0" * 4)),
        "op 'assign_value': expected an op that works element by element",
    ),
    "an unknown argument": (first("aten.neg", self=GRAD, x=1), "argument 'x'"),
    "a missing argument": (first("aten.neg"), "argument 'self': expected a variable"),
    "an undefined variable": (first("aten.neg", self=Ref("w")), "earlier op wrote, got 'w'"),
    "a result twice": (rule(OPS[0], *OPS), "expected a new name as its result, got 't'"),
    "an input as a result": (rule(replace(OPS[0], outputs=("grad",)), *OPS[1:]), "a new name"),
    "two results": (rule(replace(OPS[0], outputs=("t", "u")), *OPS[1:]), "expected one result"),
    "no new parameter": (rule(OPS[0], OPS[2]), "expected an op that writes 'param@NEW'"),
    "no new state": (rule(*OPS[:2]), "expected an op that writes 'm@NEW'"),
    "too many ops": (
        rule(*(replace(OPS[0], outputs=(f"t{i}",)) for i in range(257)), *OPS),
        "expected 256 ops or fewer, got 260",
    ),
    "too many values at a time": (
        rule(
            *(replace(OPS[0], outputs=(f"t{i}",)) for i in range(70)),
            *(Op("aten.neg", {"self": Ref(f"t{i}")}, (f"u{i}",)) for i in range(70)),
            *OPS,
        ),
        "expected 64 values or fewer at a time, got 76",
    ),
    "too many variables": (
        rule(inputs=(*INPUTS, *(Variable(f"s{i}", (), "float32", Role.STATE) for i in range(64)))),
        "expected 64 variables or fewer, got 68",
    ),
    "a state of its own size": (with_state(shape=(2**40,)), "variable 'm': expected the shape"),
    "a state with another role": (with_state(role=Role.TABLE), "expected a STATE or INPUT"),
    "a state of the parameter's name": (
        rule(inputs=(*INPUTS, Variable("group", (), "float32", Role.STATE))),
        "variable 'group': expected another name",
    ),
    "no gradient": (rule(inputs=(INPUTS[0], *INPUTS[2:])), "expected a variable 'grad', got none"),
    "a scalar that is none": (
        rule(
            *OPS[:2],
            replace(OPS[2], arguments={"x": GRAD}),
            inputs=(*INPUTS[:2], replace(INPUTS[2], shape=()), INPUTS[3]),
        ),
        r"expected the shape \[\] of the new 'm', got \[3\]",
    ),
    "an op that torch refuses": (
        first("aten.bitwise_not", self=GRAD),
        "update: torch refuses it for torch.float32",
    ),
    "no block": (rule(update=None), "rule 'registered.mine': expected its block of ops, got none"),
    "another name": (rule(type="registered.a/b"), "expected registered.NAME"),
    "the name of a known rule": (rule(type="sgd"), "expected registered.NAME"),
    "flags": (rule(flags={"foreach": True}), "expected no flags"),
    "no rate": (rule(hparams={}), "expected a number for 'lr', got none"),
    "two rates": (rule(hparams={"lr": (0.1, 0.2)}), "expected one number for 'lr'"),
    "a rate without end": (rule(hparams={"lr": float("inf")}), "expected finite numbers for 'lr'"),
    "an hparam too many": (rule(hparams={"lr": 0.1, "x": 1.0}), "hparams that its block has"),
    "a norm of a slice": (
        planned(groups=(Rule("registered.Lars", {"lr": 0.1}, {}, registered[Lars].update),)),
        "variable 'w': expected one slice, because the rule 'registered.Lars'",
    ),
    "a norm of a slice, by a rule of the table": (
        planned(groups=(Rule("lamb", NUMBERS, {}),)),
        "variable 'w': expected one slice, because the rule 'lamb'",
    ),
}
