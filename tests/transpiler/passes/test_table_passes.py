"""Sparse tables in programs: captured as ops, divided among servers, held against their invariants."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from google.protobuf.message import DecodeError
from torch import nn

from trainer import DistributedEmbedding, row_optimizers
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler import program_pb2 as pb
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.table_ops import declared, table_of
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
)
from transpiler.ir.updates import tables_of
from transpiler.program import Program
from transpiler.verify import tables as table_invariants
from transpiler.verify.invariants import IllegalProgram
from transpiler.verify.untrusted_program import check_server_program
from transpiler.verify.verify import invariants_of, verify

ENDPOINTS = "127.0.0.1:6174,127.0.0.1:6175"
Edit = Callable[[Program], Program]


class Net(nn.Module):
    """A shared table with two lookups, one with an optimizer of its own for two segments, a weight
    of torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        rules = row_optimizers.Segments(
            [(1, row_optimizers.Ftrl(lr=0.1)), (3, row_optimizers.RowwiseAdagrad(lr=0.1))]
        )
        self.emb = DistributedEmbedding(4)
        self.own = DistributedEmbedding(4, num_embeddings=9, optimizer=rules, padding_idx=0)
        self.word = nn.Embedding(9, 3, sparse=True)
        self.fc = nn.Linear(15, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.emb(ids[:, 0]).relu()
        out: torch.Tensor = self.fc(
            torch.cat([first, self.emb(ids[:, 1]), self.own(ids[:, 2]), self.word(ids[:, 0])], 1)
        )
        return out


def step(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12).reshape(4, 3) % 9, torch.tensor([0, 1, 0, 1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@functools.cache
def captured() -> tuple[Program, Program]:
    model = Net()
    return capture(model, step, sgd(model), batch())


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 3},
}


@functools.cache
def job(mode: str = "sync") -> dict[str, Program]:
    """The programs of a job of two trainers and two servers."""
    config = DistributeTranspilerConfig()
    for name, value in MODES[mode].items():
        setattr(config, name, value)
    main, startup = captured()
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, main, pservers=ENDPOINTS, trainers=2, startup_program=startup)
    server, server_startup = transpiler.get_pserver_programs(ENDPOINTS.split(",")[0])
    return {
        "trainer": transpiler.get_trainer_program(),
        "startup": transpiler.get_startup_program(),
        "server": server,
        "server startup": server_startup,
    }


def types(program: Program, *wanted: str) -> list[str]:
    return [op.type for op in program.main.ops if not wanted or op.type in wanted]


# ---- capture ----


@pytest.mark.slow
def test_lookups_are_ops_and_each_table_has_one_gradient() -> None:
    """One declaration, one gradient over all lookups, and the ops of its rule for each table."""
    main, startup = captured()
    gradients = {
        op.outputs[0]: op.inputs[0] for op in main.main.ops if op.type == "lookup_table_grad"
    }
    shared = next(op for op in main.main.ops if op.outputs == ("emb@GRAD",))

    assert (
        types(main, "sparse_table", "lookup_table") == ["sparse_table"] * 3 + ["lookup_table"] * 4
    )
    assert gradients == {"emb@GRAD": "emb", "own@GRAD": "own", "word.weight@GRAD": "word.weight"}
    assert len(shared.inputs) == 5  # the table, ids and gradients of two lookups
    assert types(main, "sgd", "ftrl", "rowwise_adagrad") == [
        "sgd",
        "ftrl",
        "rowwise_adagrad",
        "sgd",
        "sgd",
        "sgd",
    ]
    assert {variable.name for variable in startup.main.variables_of(Role.TABLE)} == {
        "emb",
        "own",
        "word.weight",
    }
    assert "emb.proxy" not in main.main.variables and "emb.proxy" not in str(main)


@pytest.mark.slow
def test_a_program_with_tables_is_data(tmp_path: Path) -> None:
    """Message and file are exact, in every mode; a fingerprint is that of the settings."""
    for program in (captured()[0], *(each for mode in MODES for each in job(mode).values())):
        again = Program.from_proto(program.to_proto())
        assert (
            again == program
            and again.fingerprint() == program.fingerprint()
            and str(again) == str(program)
        )
    captured()[0].save(tmp_path / "main")
    job()["trainer"].draw(tmp_path / "trainer.svg")
    job()["server"].draw(tmp_path / "server.svg")

    assert Program.load(tmp_path / "main") == captured()[0]
    assert "lookups of emb" in (tmp_path / "server.svg").read_text()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"rows": 50, "dtype": "float64", "seed": -3, "initial": Initial("uniform", -0.5, 0.5)},
    {"entry": CountFilterEntry(3), "ttl": 2.5, "capacity": 100, "eviction": "lfu"},
    {"entry": ProbabilityEntry(0.25), "memory_bytes": 4096},
    {"entry": ShowClickEntry("show", "click", threshold=2.0)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_declaration_has_all_settings_of_a_table(settings: dict[str, Any]) -> None:
    """The plan of a program has the tables that the model had."""
    table = Table("t", 5, (Segment(0, 5, 1),), **settings)

    assert table_of(declared(table), table.segments) == table


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.emb(ids[:, 0]) @ self.emb.weight.t()
        return out


class One(nn.Module):
    """One embedding over all ids."""

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.emb(ids)
        return found.reshape(len(ids), -1)


class Two(nn.Module):
    """Two embeddings of one table's name."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(ids[:, 0]) + self.second(ids[:, 1])
        return out


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


REFUSED: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], str]
] = {
    "a weight that is used densely, too": (Tied, sgd, "in lookups only, got another use"),
    "Adam of a sparse weight": (
        lambda: One(nn.Embedding(9, 4, sparse=True)),
        adam,
        "no such rule for sparse gradients",
    ),
    "max_norm": (
        lambda: One(nn.Embedding(9, 4, sparse=True, max_norm=1.0)),
        sgd,
        "sparse=True, max_norm",
    ),
    "a cache": (
        lambda: One(DistributedEmbedding(4, cache_rows=9)),
        sgd,
        "cache_rows: a program's lookups have no cache",
    ),
    "another table of the name": (
        lambda: Two(DistributedEmbedding(4, name="t"), DistributedEmbedding(4, name="t", seed=1)),
        sgd,
        "two embeddings are called 't' and differ: seed 0 and 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_hold_is_refused_in_words(name: str) -> None:
    """Each is a ValueError that names the table."""
    make, optimizer, words = REFUSED[name]
    model = make()
    with pytest.raises(ValueError, match=words):
        capture(model, step, optimizer(model), batch())


def test_embeddings_of_one_name_share_a_table() -> None:
    """Two modules with the same settings: one table, one gradient."""
    model = Two(DistributedEmbedding(4, name="t"), DistributedEmbedding(4, name="t"))
    main, _ = capture(model, step, sgd(model), batch())

    assert types(main, "sparse_table", "lookup_table", "lookup_table_grad") == [
        *("sparse_table", "lookup_table", "lookup_table", "lookup_table_grad")
    ]


# ---- transpiling ----


def test_a_trainer_pulls_once_for_all_lookups_of_a_table() -> None:
    """Split at compile time and at run time; gradients leave in parts or whole; the trainer updates
    no row and holds none.
    """
    split, whole = job("sync"), job("run time")
    pulls = ("split_ids", "prefetch", "merge_ids")

    assert types(split["trainer"], *pulls) == [*pulls * 3, *["split_ids"] * 3]
    assert (
        types(whole["trainer"], *pulls, "distributed_lookup_table")
        == ["distributed_lookup_table"] * 3
    )
    first = next(op for op in whole["trainer"].main.ops if op.type == "distributed_lookup_table")
    assert len(first.outputs) == 2 and first.arguments["endpoints"] == tuple(ENDPOINTS.split(","))
    for programs in (split, whole):
        assert types(programs["startup"], "fake_init", "init") == ["fake_init"] * 3
        assert not {"lookup_table", "sparse_table", "sgd", "ftrl"} & set(types(programs["trainer"]))
        assert (
            sum("table" in op.arguments for op in programs["trainer"].main.ops if op.type == "send")
            == 3
        )


def test_a_k_step_trainer_keeps_its_updates() -> None:
    """In geo mode the optimizer ops stay, and tables leave with the lane's one send of changes."""
    program = job("geo")["trainer"]
    (send,) = (op for op in program.main.ops if op.type == "send")

    assert types(program, "ftrl", "rowwise_adagrad") == ["ftrl", "rowwise_adagrad"]
    assert send.inputs[-3:] == ("emb", "own", "word.weight") and "emb.delta.server_1" in str(
        send.arguments["delta"]
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_server_has_two_blocks_for_each_table(mode: str) -> None:
    """One that updates it, complete for the mode, and one that looks rows up, which listen_and_serv
    lists.
    """
    program = job(mode)["server"]
    listen = program.main.ops[0]
    blocks = {block.index: [op.type for op in block.ops] for block in program.blocks}
    merge = ["sum", "scale"] if mode == "sync" else []
    update = ["sum"] if mode == "geo" else [*merge, "ftrl", "rowwise_adagrad"]

    prefetch = listen.arguments["prefetch_blocks"]
    assert (
        isinstance(prefetch, tuple)
        and [blocks[int(str(index))] for index in prefetch] == [["lookup_table"]] * 3
    )
    assert update in blocks.values()
    assert check_server_program(Program.from_proto(program.to_proto())) is None


class Chained(nn.Module):
    """Ids of the second lookup come from the rows of the first, or are drawn."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(4, num_embeddings=9)
        self.drawn = drawn

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids[:, 0])
        then = torch.randint_like(ids[:, 1], 9) if self.drawn else rows.argmax(1)
        out: torch.Tensor = rows + self.emb(then) + self.emb(ids[:, 2])
        return out


@pytest.mark.parametrize("drawn", [False, True])
def test_lookups_share_a_pull_only_where_their_ids_can_be_known_before(drawn: bool) -> None:
    """Ids that depend on rows, or on random numbers drawn after, are pulled by themselves; others
    still share.
    """
    model = Chained(drawn)
    main, startup = capture(model, step, sgd(model), batch())
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, pservers=ENDPOINTS, trainers=1, startup_program=startup)
    merges = [
        len(op.outputs)
        for op in transpiler.get_trainer_program().main.ops
        if op.type == "merge_ids"
    ]

    assert merges == [2, 1]


def test_tables_need_servers_and_a_gradient() -> None:
    """A mode without servers, and a table that nothing trains, are refused when transpiling."""
    main, startup = captured()
    config = DistributeTranspilerConfig()
    config.mode = "nccl2"
    with pytest.raises(
        ValueError,
        match="expected a program without tables in a mode without servers, got table 'emb'",
    ):
        DistributeTranspiler(config).transpile(
            0, main, trainers=ENDPOINTS, startup_program=startup, current_endpoint="127.0.0.1:6174"
        )
    kept = tuple(op for op in main.main.ops if op.type not in ("ftrl", "rowwise_adagrad"))
    untrained = main.with_blocks(replace(main.main, ops=kept))
    assert len(tables_of(untrained.main)) == 3
    with pytest.raises(ValueError, match="table 'own': expected an op that updates its rows"):
        DistributeTranspiler().transpile(
            0, untrained, pservers=ENDPOINTS, trainers=1, startup_program=startup
        )


# ---- invariants ----


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


@pytest.mark.parametrize("edit", [case[3] for case in BROKEN if case[2] == "server"])
def test_a_server_refuses_a_program_whose_tables_are_not_the_plans(edit: Edit) -> None:
    """What comes over the wire is held against the plan in the same way."""
    program = Program.from_proto(edit(job()["server"]).to_proto())
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


def test_rules_for_rows_are_ops_of_rows_alone() -> None:
    """An op of a rule that only rows have names its columns."""
    op = Op(
        "lazy_adam",
        {
            "param": Ref("w"),
            "grad": Ref("g"),
            "group": 0,
            "lr": 0.1,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
        },
        ("w",),
    )
    variables = {
        name: Variable(name, (2,), "float32", role)
        for name, role in (("w", Role.PARAMETER), ("g", Role.GRADIENT))
    }
    program = Program((Block(0, freeze(variables), (op,)),))
    with pytest.raises(ValueError, match="expected columns for a rule of rows, got none"):
        Program.from_proto(program.to_proto())
