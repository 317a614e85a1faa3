"""Programs as messages: exact, and refused when malformed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.serialized import OPS, PROGRAM, RULE
from transpiler import program_pb2 as pb
from transpiler.formats.messages import (
    argument_from_proto,
    argument_to_proto,
    hparams_from_proto,
    hparams_to_proto,
)
from transpiler.ir.graph import Argument, Block, Literal, Op, Ref, Symbol, freeze
from transpiler.program import Program

VALUES: dict[str, Argument] = {
    "none": None,
    "true": True,
    "one": 1,
    "one as a real": 1.0,
    "minus zero": -0.0,
    "infinity": math.inf,
    "the least integer": -(2**63),
    "the largest integer": 2**63 - 1,
    "no text": "",
    "text": 'line\n"quote" \u00e9',
    "a variable": Ref("fc.weight@GRAD.block0"),
    "a symbol": Symbol("dtype", "float32"),
    "a constant": Literal("uint8", (2, 2), b"\x00\x01\xfe\xff"),
    "an empty list": (),
    "lists": ((1, (2.5, None)), (), (Ref("a"), (True,))),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_argument_survives_the_wire_exactly(name: str) -> None:
    """Value and type come back, also where Python thinks that two of them are equal."""
    sent = argument_to_proto(VALUES[name]).SerializeToString()
    back = argument_from_proto(pb.Argument.FromString(sent))

    assert repr(back) == repr(VALUES[name])
    assert type(back) is type(VALUES[name])


def test_nan_survives_the_wire() -> None:
    """A constant that is not a number stays one."""
    back = argument_from_proto(argument_to_proto(math.nan))

    assert isinstance(back, float) and math.isnan(back)


def test_what_does_not_fit_is_refused() -> None:
    """Integers beyond 64 bits, bottomless lists, text that is no Unicode and foreign types raise;
    nothing is cut off.
    """
    deep: Argument = ()
    for _ in range(40):
        deep = (deep,)

    with pytest.raises(ValueError, match="64 bits, got 9223372036854775808"):
        argument_to_proto(2**63)
    with pytest.raises(ValueError, match="16 deep"):
        argument_to_proto(deep)
    with pytest.raises(ValueError, match="UTF-8"):
        replace(PROGRAM, _blocks=(Block(0, freeze({}), (Op("init", {}, ("\ud800",)),)),)).to_proto()
    with pytest.raises(TypeError, match="op 'clip', argument 'max': expected None, bool"):
        replace(PROGRAM, _blocks=(Block(0, freeze({}), (Op("clip", {"max": {1}}),)),)).to_proto()


def test_a_program_survives_the_wire_exactly() -> None:
    """Blocks, variables, ops and the deployment come back equal, and so does the source line."""
    back = Program.from_proto(pb.Program.FromString(PROGRAM.to_proto().SerializeToString()))

    assert back == PROGRAM
    assert back.main.ops[0].location == "train.py:3"
    assert [op.inputs for op in back.main.ops] == [op.inputs for op in OPS]
    assert back.storage is None


def test_arguments_come_back_in_the_order_of_the_schema() -> None:
    """A message's map has no order; the inputs of an op do."""
    order = [
        "param",
        "grad",
        "exp_avg",
        "exp_avg_sq",
        "step",
        "group",
        "lr",
        "betas",
        "eps",
        "weight_decay",
    ]
    refs = {name: Ref(name) for name in order[:5]}
    arguments: dict[str, Argument] = {**RULE.hparams, "group": 0, **dict(reversed(refs.items()))}
    block = Block(0, freeze({}), (Op("adam", arguments, ("param",)),))

    back = Program.from_proto(Program((block,)).to_proto())

    assert list(back.main.ops[0].arguments) == order


def test_a_row_of_numbers_survives_the_wire() -> None:
    """Single numbers and tuples stay apart, also a tuple of one."""
    row = {"lr": 0.1, "betas": (0.9, 0.999), "one": (1.0,)}

    assert hparams_from_proto(pb.Rule(hparams=hparams_to_proto(row)).hparams) == row
    with pytest.raises(ValueError, match="'lr': expected one value, got 2"):
        hparams_from_proto({"lr": pb.Hparam(values=[1, 2])})


def _variable(**fields: object) -> pb.Program:
    return pb.Program(
        blocks=[pb.Block(variables=[pb.Variable(name="v", dtype="float32", **fields)])]
    )  # type: ignore[arg-type]


MALFORMED: dict[str, tuple[pb.Program, str]] = {
    "nothing": (pb.Program(), "one block or more"),
    "a block out of order": (
        pb.Program(blocks=[pb.Block(index=3)]),
        "block 0: expected its own index, got 3",
    ),
    "a variable twice": (
        pb.Program(blocks=[pb.Block(variables=[pb.Variable(name="v")] * 2)]),
        "'v': expected one definition",
    ),
    "a nameless variable": (
        pb.Program(blocks=[pb.Block(variables=[pb.Variable()])]),
        "names, got an empty one",
    ),
    "a size that is none": (_variable(shape=[pb.Dimension()]), "sizes of 0 or more"),
    "a negative size": (_variable(shape=[pb.Dimension(size=-1)]), "sizes of 0 or more"),
    "a nameless symbol": (_variable(shape=[pb.Dimension(symbol="")]), "named symbols"),
    "an unknown role": (_variable(role=99), "role of 0 to 9, got 99"),
    "an unknown op": (
        pb.Program(blocks=[pb.Block(ops=[pb.Op(type="init", outputs=["w"]), pb.Op(type="eval")])]),
        "block 0, op 1: .*'eval'",
    ),
    "an argument without a value": (
        pb.Program(
            blocks=[
                pb.Block(ops=[pb.Op(type="assign", arguments={"x": pb.Argument()}, outputs=["y"])])
            ]
        ),
        "block 0, op 0: op 'assign', argument 'x': expected an argument with a value",
    ),
    "an argument of another kind": (
        pb.Program(
            blocks=[
                pb.Block(
                    ops=[
                        pb.Op(type="assign", arguments={"x": pb.Argument(text="w")}, outputs=["y"])
                    ]
                )
            ]
        ),
        "block 0, op 0: op 'assign', argument 'x': expected a variable, got 'w'",
    ),
    "a trainer below none": (
        pb.Program(blocks=[pb.Block()], deployment=pb.Deployment(trainer_id=-2)),
        "trainer_id -2",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_refused_in_words(name: str) -> None:
    """A message that holds no program raises ValueError and says where."""
    message, words = MALFORMED[name]
    with pytest.raises(ValueError, match=words):
        Program.from_proto(message)


def test_bottomless_lists_are_refused_on_receipt() -> None:
    """A message that nests lists deeper than a program may is refused before anything recurses
    far.
    """
    argument = pb.Argument(none=pb.Nothing())
    for _ in range(40):
        argument = pb.Argument(list=pb.Arguments(items=[argument]))
    with pytest.raises(ValueError, match="16 deep"):
        Program.from_proto(
            pb.Program(blocks=[pb.Block(ops=[pb.Op(type="assign", arguments={"x": argument})])])
        )


def test_only_a_program_message_is_a_program() -> None:
    """Another message, or none, is a TypeError."""
    with pytest.raises(TypeError, match="got Block"):
        Program.from_proto(pb.Block())
