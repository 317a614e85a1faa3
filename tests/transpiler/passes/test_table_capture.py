"""Sparse tables in programs, captured: lookups as ops, settings as data, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.table_jobs import MODES, batch, captured, job, sgd, step, types
from trainer import DistributedEmbedding
from transpiler import capture
from transpiler.ir.graph import Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.table_ops import declared, table_of
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
)
from transpiler.program import Program


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
        "expected SGD, Adagrad or SparseAdam .* got adam: use one of these",
    ),
    "max_norm": (
        lambda: One(nn.Embedding(9, 4, sparse=True, max_norm=1.0)),
        sgd,
        "emb: Embedding.sparse=True. is a table, which cannot have max_norm: a lookup would write",
    ),
    "a norm of 0": (
        lambda: One(nn.Embedding(9, 4, sparse=True, max_norm=0.0)),
        sgd,
        "which cannot have max_norm",
    ),
    "gradients by frequency": (
        lambda: One(nn.Embedding(9, 4, sparse=True, scale_grad_by_freq=True)),
        sgd,
        "which cannot have scale_grad_by_freq: a gradient would depend on how often",
    ),
    "a cache": (
        lambda: One(DistributedEmbedding(4, cache_rows=9)),
        sgd,
        "cache_rows: a program's lookups have no cache",
    ),
    "another table of the name": (
        lambda: Two(DistributedEmbedding(4, name="t"), DistributedEmbedding(4, name="t", seed=1)),
        sgd,
        "are called 't' and differ: seed 0 and 1 of 'first' and 'second'; embeddings of one name",
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
