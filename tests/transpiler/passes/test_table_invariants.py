"""Sparse tables in programs: the invariants that hold, and what a server refuses."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from tests.support.table_jobs import MODES, job
from transpiler import program_pb2 as pb
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, freeze
from transpiler.program import Program
from transpiler.verify import tables as table_invariants
from transpiler.verify.invariants import IllegalProgram
from transpiler.verify.untrusted import check_server_program
from transpiler.verify.verify import invariants_of, verify

Edit = Callable[[Program], Program]


def edited(
    kind: str,
    nth: int = 0,
    block: int = 0,
    outputs: tuple[str, ...] | None = None,
    **arguments: Argument,
) -> Edit:
    """Changes the nth op of a type."""

    def edit(op: Op) -> list[Op]:
        return [
            replace(
                op,
                arguments={**op.arguments, **arguments},
                outputs=op.outputs if outputs is None else outputs,
            )
        ]

    return with_op(kind, edit, nth, block)


def dropped(kind: str, nth: int = 0, block: int = 0) -> Edit:
    return with_op(kind, lambda op: [], nth, block)


def doubled(kind: str, nth: int = 0, block: int = 0) -> Edit:
    return with_op(kind, lambda op: [op, op], nth, block)


def with_op(kind: str, change: Callable[[Op], list[Op]], nth: int = 0, block: int = 0) -> Edit:
    def edit(program: Program) -> Program:
        ops = list(program.blocks[block].ops)
        at = [i for i, op in enumerate(ops) if op.type == kind][nth]
        ops[at : at + 1] = change(ops[at])
        return with_block(program, replace(program.blocks[block], ops=tuple(ops)))

    return edit


def with_block(program: Program, block: Block) -> Program:
    blocks = program.blocks
    blocks[block.index] = block
    return program.with_blocks(*blocks)


def added(op: Op) -> Edit:
    return lambda program: with_block(program, replace(program.main, ops=(*program.main.ops, op)))


def retyped(name: str, **fields: Any) -> Edit:
    def edit(program: Program) -> Program:
        changed = replace(program.main.variables[name], **fields)
        return with_block(
            program,
            replace(program.main, variables=freeze({**program.main.variables, name: changed})),
        )

    return edit


def reversed_parts(op: Op) -> list[Op]:
    parts = op.arguments["ids"]
    assert isinstance(parts, tuple)
    return [replace(op, arguments={**op.arguments, "ids": parts[::-1]})]


def asked_twice(op: Op) -> list[Op]:
    """The first table takes the second one's place."""
    tables = op.arguments["w"]
    assert isinstance(tables, tuple)
    return [replace(op, arguments={**op.arguments, "w": (tables[0], tables[0], *tables[2:])})]


def early(program: Program) -> Program:
    """The first gradient of rows leaves before it has been made."""
    ops = list(program.main.ops)
    at = next(i for i, op in enumerate(ops) if op.type == "lookup_table_grad")
    ops.append(ops.pop(at))
    return with_block(program, replace(program.main, ops=tuple(ops)))


def own_block(program: Program) -> int:
    return next(block.index for block in program.blocks if "ftrl" in [op.type for op in block.ops])


def in_own_block(edit: Callable[[int], Edit]) -> Edit:
    return lambda program: edit(own_block(program))(program)


def without_block(program: Program) -> Program:
    return with_block(program, replace(program.blocks[-1], ops=()))


LOOKUP = Op("lookup_table", {"w": Ref("emb"), "ids": Ref("select")}, ("loss",))
ONE = ("127.0.0.1:6174", "127.0.0.1:6174")
BROKEN: list[tuple[str, str, str, Edit, str]] = [
    ("rows_pulled_once", "sync", "trainer", added(LOOKUP), "the servers hold this table"),
    (
        "rows_pulled_once",
        "sync",
        "trainer",
        edited("prefetch", endpoints=ONE),
        "expected all servers",
    ),
    (
        "rows_pulled_once",
        "run time",
        "trainer",
        edited("distributed_lookup_table", w=Ref("fc.weight")),
        "no table of the plan",
    ),
    ("rows_pulled_once", "sync", "trainer", with_op("prefetch", reversed_parts), "in its order"),
    ("rows_pulled_once", "sync", "trainer", with_op("prefetch", asked_twice), "prefetch once"),
    ("rows_pulled_once", "sync", "trainer", dropped("merge_ids", 2), "never merged"),
    (
        "rows_pulled_once",
        "sync",
        "trainer",
        edited("split_ids", padding_idx=3),
        "the lookups that were split",
    ),
    ("row_gradients_sent_once", "sync", "trainer", dropped("send", 2), "never sent"),
    ("row_gradients_sent_once", "sync", "trainer", doubled("send", 2), "a second time"),
    (
        "row_gradients_sent_once",
        "run time",
        "trainer",
        edited("send", 2, endpoints=ONE),
        "expected all servers",
    ),
    (
        "row_gradients_sent_once",
        "sync",
        "trainer",
        edited("send", 2, table="own"),
        "gradient of own",
    ),
    ("row_gradients_sent_once", "run time", "trainer", early, "before the op that produces it"),
    (
        "rows_updated_in_one_place",
        "geo",
        "trainer",
        dropped("ftrl"),
        "expected 2 updates on this trainer, got 1",
    ),
    (
        "rows_updated_in_one_place",
        "geo",
        "trainer",
        edited("ftrl", columns=(0, 2)),
        "no such segment",
    ),
    ("tables_declared", "sync", "startup", dropped("fake_init"), "expected one fake_init"),
    ("tables_declared", "sync", "startup", doubled("fake_init"), "expected one fake_init"),
    ("tables_declared", "sync", "startup", added(Op("init", {}, ("emb",))), "initialises nothing"),
    ("tables_held", "sync", "server", retyped("own", shape=(9, 5)), "expected float32"),
    ("tables_held", "sync", "server", retyped("own", role=Role.TEMPORARY), "holds a part"),
    (
        "table_blocks_complete",
        "sync",
        "server",
        in_own_block(lambda b: dropped("scale", 0, b)),
        "expected sum, scale, ftrl",
    ),
    (
        "table_blocks_complete",
        "sync",
        "server",
        in_own_block(lambda b: edited("scale", 0, b, scale=1.0)),
        "expected 0.5",
    ),
    (
        "table_blocks_complete",
        "sync",
        "server",
        in_own_block(lambda b: edited("ftrl", 0, b, lr=9.0)),
        "by Rule",
    ),
    (
        "table_blocks_complete",
        "sync",
        "server",
        in_own_block(lambda b: edited("ftrl", 0, b, columns=(0, 2))),
        "by Rule",
    ),
    (
        "table_blocks_complete",
        "delay-compensated",
        "server",
        in_own_block(lambda b: edited("dc_compensate", 0, b, factor=2.0)),
        "factor: expected 1.0, got 2.0",
    ),
    (
        "table_blocks_complete",
        "delay-compensated",
        "server",
        in_own_block(lambda b: edited("dc_compensate", 0, b, backups=(Ref("own@GRAD"),))),
        "backups: expected ('own.trainer_0_bak', 'own.trainer_1_bak')",
    ),
    (
        "table_blocks_complete",
        "diloco",
        "server",
        lambda program: edited("scale", 0, len(program.blocks) - 4, scale=0.5)(program),
        "scale: expected -0.5, got 0.5",
    ),
    (
        "table_blocks_complete",
        "diloco",
        "server",
        lambda program: edited("momentum", 0, len(program.blocks) - 4, lr=9.0)(program),
        "by Rule",
    ),
    ("table_blocks_complete", "sync", "server", without_block, "looks it up, got 0"),
]


@pytest.mark.parametrize(
    ("invariant", "mode", "program", "edit", "words"),
    BROKEN,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_law_of_tables_is_kept(
    invariant: str, mode: str, program: str, edit: Edit, words: str
) -> None:
    """A program that breaks it is refused: the invariant says what was expected of which table."""
    whole = job(mode)[program]
    assert whole.deployment is not None
    verify(whole, whole.deployment.plan)
    broken = edit(whole)
    with pytest.raises(IllegalProgram):
        verify(broken, whole.deployment.plan)
    violations = list(getattr(table_invariants, invariant)(broken, whole.deployment.plan))

    assert any(words in violation.why for violation in violations), violations


def test_every_law_of_tables_has_a_test_that_breaks_it() -> None:
    """All that complete programs are held against."""
    used = {
        invariant
        for mode in MODES
        for program in job(mode).values()
        for invariant in invariants_of(program)
    }
    names = {
        invariant.__name__ for invariant in used if inspect.getmodule(invariant) is table_invariants
    }

    assert names == {case[0] for case in BROKEN}


@pytest.mark.parametrize(
    ("mode", "edit"), [(case[1], case[3]) for case in BROKEN if case[2] == "server"]
)
def test_a_server_refuses_a_program_whose_tables_are_not_the_plans(mode: str, edit: Edit) -> None:
    """What comes over the wire is held against the plan in the same way."""
    program = Program.from_proto(edit(job(mode)["server"]).to_proto())
    with pytest.raises(ValueError, match="table|expected"):
        check_server_program(program)


FOREIGN: dict[str, tuple[Edit, str]] = {
    "a state of rows": (retyped("emb@GRAD", role=Role.STATE), "states are part of the rows"),
    "a width that is open": (retyped("emb@GRAD", shape=("n", "m")), "expected rows"),
    "an unknown variable": (
        in_own_block(lambda b: edited("sum", 0, b, x=(Ref("nothing"),))),
        "variables of its block",
    ),
    "lookups among updates": (
        lambda program: edited(
            "listen_and_serv", optimize_blocks=tuple(range(1, len(program.blocks)))
        )(program),
        "optimize_blocks",
    ),
    "no list of lookups": (edited("listen_and_serv", prefetch_blocks=()), "prefetch_blocks"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_server_refuses_what_no_pass_has_made(name: str) -> None:
    """Roles, shapes and names of a table's variables, and the lists of blocks."""
    edit, words = FOREIGN[name]
    with pytest.raises(ValueError, match=words):
        check_server_program(edit(job()["server"]))


def test_random_damage_of_tables_is_refused_or_harmless() -> None:
    """Bytes of a message changed at random give a ValueError or a sound program."""
    sent, refused = job()["server"].to_proto().SerializeToString(), 0
    for seed in range(1000):
        chance = random.Random(seed)
        damaged = bytearray(sent)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            check_server_program(Program.from_proto(pb.Program.FromString(bytes(damaged))))
        except (DecodeError, ValueError) as error:
            refused += not isinstance(error, DecodeError)
    assert refused > 50
