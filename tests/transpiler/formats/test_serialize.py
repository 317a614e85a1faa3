"""Programs as messages and files: exact, deterministic, and refused when damaged."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transpiler import program_pb2 as pb
from transpiler.formats.serialize import (
    argument_from_proto,
    argument_to_proto,
    canonical,
    hparams_from_proto,
    hparams_to_proto,
)
from transpiler.ir.graph import (
    Argument,
    Block,
    Literal,
    Op,
    Ref,
    Role,
    Storage,
    Symbol,
    Variable,
    freeze,
)
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program

RULE = Rule(
    "adam",
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"amsgrad": False, "maximize": True},
)
PLAN = Plan(
    (Lane("sync"),),
    trainers=2,
    servers=1,
    groups=(RULE,),
    placements=(
        Placement("w", (2, 3), "bfloat16", 0, (Slice("w", 0, 6, (2, 3), 0),)),
        Placement("n", (), "int64", None, (Slice("n", 0, 1, (), 0),)),
    ),
    clip=Clip("value", 1.0, -0.0),
    graph="00ff",
)
DEPLOYMENT = Deployment(PLAN, ("host:1",), trainer_id=0)
VARIABLES = {
    "x": Variable("x", ("batch", 3), "bfloat16", Role.INPUT),
    "w": Variable("w", (2, 3), "bfloat16", Role.PARAMETER),
    "empty": Variable("empty", (0, 7), "float32", Role.BUFFER),
    "n": Variable("n", (), "int64", Role.BUFFER),
    "w@GRAD": Variable("w@GRAD", (2, 3), "bfloat16", Role.GRADIENT, "w"),
}
OPS = (
    Op(
        "aten.clone",
        {"self": Ref("x"), "memory_format": Symbol("memory_format", "contiguous_format")},
        ("y",),
        "train.py:3",
    ),
    Op("assign_value", {"value": Literal("int64", (1,), b"\x00\xff" * 4)}, ("c",)),
    Op("aten.full", {"size": (Ref("b"), 2), "fill_value": -math.inf, "pin_memory": None}, ("f",)),
    Op("send", {"x": (Ref("w@GRAD"),), "endpoints": ("host:1",), "trainer_id": 0}),
)
PROGRAM = Program((Block(0, freeze(VARIABLES), OPS), Block(1, freeze({}), ())), DEPLOYMENT)

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
        replace(PROGRAM, _blocks=(Block(0, freeze({}), (Op("clip", {"max": {1}}),)),)).to_proto()  # type: ignore[dict-item]


def test_a_program_survives_the_wire_exactly() -> None:
    """Blocks, variables, ops and the deployment come back equal, and so does the source line."""
    back = Program.from_proto(pb.Program.FromString(PROGRAM.to_proto().SerializeToString()))

    assert back == PROGRAM
    assert back.main.ops[0].location == "train.py:3"
    assert [op.inputs for op in back.main.ops] == [op.inputs for op in OPS]
    assert back.storage is None


@pytest.mark.slow
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


@pytest.mark.processes
def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Two processes with different hash seeds give the same digits for the same program."""
    here = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {here!r}); import test_serialize as t; "
        "print(t.PROGRAM.fingerprint())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert found == {PROGRAM.fingerprint()}
    assert len(PROGRAM.fingerprint()) == 32


def with_op(op: Op, index: int = 3) -> Program:
    ops = (*OPS[:index], op, *OPS[index + 1 :])
    return PROGRAM.with_blocks(Block(0, freeze(VARIABLES), ops), PROGRAM.blocks[1])


def test_a_fingerprint_does_not_see_where_and_by_whom_a_program_runs() -> None:
    """Endpoints, trainer numbers, this process's place, source lines and the order of named
    arguments change nothing.
    """
    send = {"trainer_id": 1, "endpoints": ("elsewhere:9",), "x": (Ref("w@GRAD"),)}
    same = [
        replace(
            PROGRAM,
            deployment=Deployment(
                PLAN, ("elsewhere:9",), trainer_id=7, server_index=3, wait_port=False
            ),
        ),
        with_op(Op("send", send)),
        with_op(replace(OPS[0], location="other.py:9"), 0),
        replace(PROGRAM, storage=Storage({"w": torch.ones(2, 3)}, None)),
    ]

    assert {program.fingerprint() for program in same} == {PROGRAM.fingerprint()}


def test_a_fingerprint_sees_everything_that_a_program_means() -> None:
    """A number, a type that Python takes for equal, a constant's bit, a variable's role and the
    plan all count.
    """
    full = OPS[2].arguments
    other = b"\x00\xff" * 3 + b"\x01\xff"
    faster = replace(PLAN, groups=(replace(RULE, hparams={**RULE.hparams, "lr": 2e-3}),))
    role = {**VARIABLES, "n": replace(VARIABLES["n"], role=Role.PARAMETER)}
    others = [
        with_op(Op("aten.full", {**full, "fill_value": 1}, ("f",)), 2),
        with_op(Op("aten.full", {**full, "fill_value": True}, ("f",)), 2),
        with_op(Op("aten.full", {**full, "fill_value": 1.0}, ("f",)), 2),
        with_op(Op("assign_value", {"value": Literal("int64", (1,), other)}, ("c",)), 1),
        replace(PROGRAM, deployment=replace(DEPLOYMENT, plan=faster)),
        PROGRAM.with_blocks(Block(0, freeze(role), OPS), PROGRAM.blocks[1]),
        PROGRAM.with_blocks(PROGRAM.main),
        PROGRAM,
    ]

    assert len({program.fingerprint() for program in others}) == len(others)
    assert len({canonical(program.blocks, program.deployment) for program in others}) == len(others)


# ---- files ----


def stored() -> Program:
    """The program with values that share memory, are views, are empty and have no dimension."""
    big = torch.randn(4, 3).to(torch.bfloat16)
    values = {
        "w": big[1:3],
        "empty": torch.empty(0, 7),
        "n": torch.tensor(2**40),
        "stranger": torch.ones(1),
    }
    return replace(PROGRAM, storage=Storage(values, torch.optim.SGD([torch.zeros(1)], lr=1.0)))


def test_a_file_gives_back_program_and_values(tmp_path: Path) -> None:
    """Values come back to the bit, bfloat16, empty and 0-dim ones too; the loaded storage has no
    optimizer.
    """
    program = stored()
    program.save(tmp_path / "p.safetensors")

    back = Program.load(tmp_path / "p.safetensors")

    assert back == program and back.fingerprint() == program.fingerprint()
    assert program.storage is not None and back.storage is not None
    assert back.storage.optimizer is None
    assert set(back.storage.tensors) == {"w", "empty", "n"}
    for name, value in back.storage.tensors.items():
        assert value.dtype == program.storage.tensors[name].dtype
        assert torch.equal(value, program.storage.tensors[name])
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]


def test_values_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    """Two names for one memory are two values in the file."""
    shared = torch.arange(6).to(torch.bfloat16).view(2, 3)
    variables = {name: Variable(name, (2, 3), "bfloat16", Role.PARAMETER) for name in ("a", "b")}
    program = Program(
        (Block(0, freeze(variables), ()),), None, Storage({"a": shared, "b": shared}, None)
    )
    program.save(tmp_path / "p")

    back = Program.load(tmp_path / "p").storage

    assert (
        back is not None
        and torch.equal(back.tensors["a"], shared)
        and torch.equal(back.tensors["b"], shared)
    )


def test_a_program_without_values_saves_too(tmp_path: Path) -> None:
    """What was received holds no values; it still saves and loads, inf and all."""
    PROGRAM.save(str(tmp_path / "p"))

    back = Program.load(str(tmp_path / "p"))

    assert back == PROGRAM
    assert back.storage is not None and back.storage.tensors == {}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file cut anywhere, or overwritten, raises ValueError naming the file, and a missing one
    FileNotFoundError.
    """
    path = tmp_path / "p"
    stored().save(path)
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1)]
    damaged += [b"\xff" * len(whole), whole.replace(b"aten.clone", b"aten.clown"), whole + b"more"]

    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"Program.save wrote, got '{path}'"):
            Program.load(path)
    with pytest.raises(FileNotFoundError, match="no file at"):
        Program.load(tmp_path / "absent")


def test_a_file_whose_values_are_not_the_programs_is_refused(tmp_path: Path) -> None:
    """A value of another shape or dtype, or of a variable that is not there, raises and names it;
    so does a foreign file.
    """
    path = tmp_path / "p"
    stored().save(path)
    metadata = {"program": stored_metadata(path)}
    for values, words in (
        (
            {"w": torch.ones(3, 2, dtype=torch.bfloat16)},
            r"'w': expected bfloat16\[2, 3\], got torch.bfloat16\[3, 2\]",
        ),
        ({"w": torch.ones(2, 3)}, r"got torch.float32\[2, 3\]"),
        ({"x": torch.ones(2, 3)}, "'x': the program has no persistent variable"),
    ):
        save_file(values, path, metadata)
        with pytest.raises(ValueError, match=words):
            Program.load(path)
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="no program in its metadata"):
        Program.load(path)


def stored_metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["program"])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written leaves the file that was there, and nothing beside it."""
    path = tmp_path / "p"
    PROGRAM.save(path)
    before = path.read_bytes()
    bad = replace(PROGRAM, storage=Storage({"w": torch.ones(2, 3, dtype=torch.complex32)}, None))

    with pytest.raises(Exception, match="complex32|dtype|KeyError"):
        bad.save(path)

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]
