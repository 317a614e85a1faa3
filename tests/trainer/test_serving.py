"""Promises of exported tables: torch alone reads them, and lookups in them are those of the
embedding that was trained.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from pserver.table.rows import initial_rows
from tests.support.exported_tables import DIM, exported, trained
from trainer.checkpoint.export import TableRows, export
from trainer.embedding.embedding import DistributedEmbedding
from trainer.serving import InitialRows, LookupModule, load_embedding
from transpiler.ir.tables import Constant, Initial, Normal, Segment, Table, Uniform


def table(
    rows: int | None = None, initial: Initial | None = None, dtype: str = "float32", seed: int = 11
) -> Table:
    return Table(
        "emb",
        DIM,
        (Segment(0, DIM, 0),),
        dtype,
        rows,
        seed=seed,
        initial=initial or Normal(0.0, 0.1),
    )


def begun(of: Table, ids: np.ndarray) -> torch.Tensor:
    out = np.empty((len(ids), of.dim), of.dtype)
    initial_rows(of.initial, of.seed, ids, out)
    return torch.from_numpy(out)


def chunks(*parts: list[int], dtype: str = "float32") -> Iterator[dict[str, np.ndarray]]:
    for ids in parts:
        yield {
            "ids": np.array(ids, np.int64),
            "values": np.outer(np.array(ids, np.float64), np.arange(1, DIM + 1)).astype(dtype),
        }


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_table_of_a_range_is_the_weight_of_an_embedding(tmp_path: Path, name: str) -> None:
    """Rows that were touched and initial values of all the others, in a state_dict that
    nn.Embedding loads strictly.
    """
    of = table(rows=70_000)
    export(
        str(tmp_path / name),
        {"fc.bias": torch.ones(2)},
        {"emb": TableRows(of, chunks([3, 69_999], [0]))},
    )
    state = read(tmp_path / name)
    module = nn.ModuleDict({"emb": nn.Embedding(70_000, DIM)})
    assert state.pop("fc.bias").tolist() == [1.0, 1.0]
    module.load_state_dict(state)

    expected = begun(of, np.arange(70_000))
    for own in (3, 69_999, 0):
        expected[own] = own * torch.arange(1.0, DIM + 1)
    assert torch.equal(module["emb"].weight, expected) and [
        path.name for path in tmp_path.iterdir()
    ] == [name]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("rows", [None, 1000], ids=["any id", "too large a range"])
def test_a_table_of_any_ids_lists_them(tmp_path: Path, name: str, rows: int | None) -> None:
    """Ids in ascending order, whatever order the servers gave them in, with the row of each."""
    listed = [7, 400, 999] if rows else [-(2**63), 400, 2**62]
    export(
        str(tmp_path / name),
        {},
        {"a.emb": TableRows(table(rows), chunks([listed[1]], [], [listed[2], listed[0]]))},
        max_bytes=999,
    )
    state = read(tmp_path / name)

    assert (
        set(state) == {"a.emb.ids", "a.emb.weight", "a.emb.initial"}
        and state["a.emb.ids"].tolist() == listed
    )
    assert torch.equal(state["a.emb.weight"], torch.from_numpy(next(chunks(listed))["values"]))


def test_bad_tables_are_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    """Rows of another width or dtype, ids out of range, a name that another tensor has: a
    ValueError, and nothing is written.
    """
    path = tmp_path / "model.pt"
    export(str(path), {"w": torch.ones(1)})
    before = path.read_bytes()
    odd = {"ids": np.array([1]), "values": np.zeros((1, DIM + 1), np.float32)}
    for rows, message in (
        (TableRows(table(), [odd]), r"expected rows float32 \[1, 5\], got float32 \[1, 6\]"),
        (
            TableRows(table(dtype="float64"), chunks([1])),
            r"expected rows float64 \[1, 5\], got float32",
        ),
        (TableRows(table(rows=5), chunks([1, 5])), "expected ids from 0 to 4, got 1 to 5"),
        (TableRows(table(rows=5), chunks([1])), "emb.weight: expected one tensor of this name"),
    ):
        with pytest.raises(ValueError, match=message):
            export(str(path), {"emb.weight": torch.ones(1)}, {"emb": rows})

    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("rows", [None, 100], ids=["any id", "range"])
def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None
) -> None:
    """An OSError where there is no place for the rows; the old file stays, and nothing else."""
    path = tmp_path / "model.pt"
    export(str(path), {"w": torch.ones(1)})
    before = path.read_bytes()

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        export(str(path), {}, {"emb": TableRows(table(rows), chunks([3, 4]))})

    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "initial",
    [Constant(0.25), Uniform(-0.5, 2.0), Normal(1.0, 0.3)],
    ids=lambda initial: initial.kind,
)
def test_plain_torch_makes_the_initial_rows_of_the_servers(initial: Initial, dtype: str) -> None:
    """For ids of any size, odd widths, negative and large seeds: to the bit, in float64 normal
    numbers to the last few.
    """
    ids = np.concatenate(
        [np.arange(-2000, 2000), np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 4000)]
    )
    for seed in (0, 12345, -1, 2**63 + 5):
        of = table(initial=initial, dtype=dtype, seed=seed)
        made = InitialRows(
            initial.kind, initial.low, initial.high, seed, DIM, getattr(torch, dtype)
        )(torch.from_numpy(ids))
        expected = begun(of, ids)

        assert made.dtype == expected.dtype and made.shape == expected.shape
        if initial.kind == "normal":
            assert torch.allclose(
                made, expected, rtol=1e-7 if dtype == "float32" else 1e-14, atol=1e-15
            )
            # a float32 differs where a double lies between two
            assert dtype == "float64" or (made != expected).sum() <= 2
        else:
            assert torch.equal(made, expected)


@pytest.mark.parametrize("size", [None, 60], ids=["any id", "range"])
def test_a_served_row_is_the_trained_one(tmp_path: Path, size: int | None) -> None:
    """For ids of any shape, trained, untrained and padded; unknown ids read their initial values,
    or zeros by argument.
    """
    embedding = DistributedEmbedding(DIM, num_embeddings=size, padding_idx=2, seed=3)
    trained(embedding, torch.tensor([[1, 2, 3], [50, 7, 1]]))
    exported(embedding, tmp_path / "model.pt")
    served = load_embedding(str(tmp_path / "model.pt"), "emb")
    ids = torch.tensor([[[1, 2], [3, 50]], [[7, 11], [59, 12]]])

    assert torch.equal(served(ids), embedding(ids)) and served(ids).shape == (2, 2, 2, DIM)
    assert torch.equal(served(ids[:0]), torch.empty(0, 2, 2, DIM))
    assert served(torch.tensor([2])).abs().sum() == 0
    if size is None:
        zeros = load_embedding(str(tmp_path / "model.pt"), "emb", unknown="zeros")
        assert torch.equal(
            zeros(torch.tensor([11, 50])),
            torch.stack([torch.zeros(DIM), embedding(torch.tensor([50]))[0]]),
        )
    else:
        with pytest.raises(IndexError):
            served(torch.tensor([60]))


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("padding", [None, 4])
def test_served_bags_are_the_trained_ones(
    tmp_path: Path, pooling: str, padding: int | None
) -> None:
    """Ragged bags with empty ones, matrices, and weights: equal to the embedding's own pooling to
    the bit.
    """
    embedding = DistributedEmbedding(DIM, padding_idx=padding, pooling=pooling, seed=8)
    trained(embedding, torch.tensor([[1, 4, 3], [9, 7, 1]]))
    exported(embedding, tmp_path / "model.safetensors")
    served = load_embedding(str(tmp_path / "model.safetensors"), "emb", pooling, padding)
    ids, offsets = torch.tensor([1, 1, 4, -5, 9, 3, 4, 7]), torch.tensor([0, 0, 3, 6, 7, 8])
    weights = torch.tensor([0.5, 2.0, 1.0, -1.0, 3.0, 0.25, 1.0, 4.0])

    ragged, square = (ids, offsets, weights), (ids.view(2, 4), None, weights.view(2, 4))
    for given in (ragged, ragged[:2], square, square[:1], (ids[:0], offsets[:2])):
        assert torch.equal(served(*given), embedding(*given))


def test_a_table_without_rows_serves_initial_values(tmp_path: Path) -> None:
    """What was never trained is served too: initial values of every id, with or without a batch."""
    embedding = DistributedEmbedding(DIM, seed=8, init=Uniform(-1.0, 1.0))
    exported(embedding, tmp_path / "model.pt")
    served = load_embedding(str(tmp_path / "model.pt"), "emb")
    ids = torch.tensor([0, -1, 2**62])

    assert torch.equal(served(ids), embedding(ids))
    zeros = load_embedding(str(tmp_path / "model.pt"), "emb", unknown="zeros")
    assert torch.equal(zeros(ids), torch.zeros(3, DIM))


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("size", [None, 100], ids=["any id", "range"])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_model_takes_the_whole_file(
    tmp_path: Path, rows: int, size: int | None, form: str
) -> None:
    """``load_state_dict`` of a model with a served table takes the export as it is, strictly; the
    export of a table that begins otherwise is refused.
    """
    embedding = DistributedEmbedding(DIM, num_embeddings=size, seed=8, init=Uniform(-1.0, 1.0))
    if rows:
        trained(embedding, torch.arange(rows))
    exported(embedding, tmp_path / "model.pt", rows=form)
    state = read(tmp_path / "model.pt")
    served = load_embedding(str(tmp_path / "model.pt"), "emb")
    model = nn.ModuleDict({"emb": served, "fc": nn.Linear(2, 1, bias=False)})
    state["fc.weight"] = torch.ones(1, 2)
    model.load_state_dict(state)
    ids = torch.tensor([0, 2, 99])

    again = load_embedding(str(tmp_path / "model.pt"), "emb")
    assert torch.equal(served(ids), again(ids))
    assert torch.allclose(served(ids), embedding(ids), atol=0 if form == "float32" else 0.01)
    assert torch.equal(model.state_dict()["fc.weight"], torch.ones(1, 2))
    if size is not None:
        return
    state["emb.initial"] = torch.tensor(list(b'{"kind": "constant"}'), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match='emb.initial: expected .*"uniform".* got .*"constant"'):
        model.load_state_dict(state)


ALONE = """
import sys, torch
for name in ("trainer", "pserver", "transpiler", "numba", "pyarrow", "grpc", "safetensors"):
    sys.modules[name] = None
program = torch.export.load(sys.argv[1]).module()
for ids, offsets, expected in torch.load(sys.argv[2], weights_only=True):
    assert torch.equal(program(ids, offsets), expected)
print("served")
"""


@pytest.mark.processes
def test_a_saved_module_needs_torch_alone(tmp_path: Path) -> None:
    """Exported by torch, it serves bags of any number and size where none of these packages can be
    imported.
    """
    embedding = trained(
        DistributedEmbedding(DIM, padding_idx=4, pooling="sqrtn", seed=8), torch.tensor([[1, 4, 3]])
    )
    exported(embedding, tmp_path / "model.pt")
    served = load_embedding(str(tmp_path / "model.pt"), "emb", "sqrtn", 4)
    ids, offsets = torch.tensor([1, 1, 4, -5, 9, 3, 4, 7]), torch.tensor([0, 0, 3, 6, 7, 8])
    shapes = {"ids": {0: torch.export.Dim("n")}, "offsets": {0: torch.export.Dim("b")}}
    torch.export.save(
        torch.export.export(served, (ids, offsets), dynamic_shapes=shapes),
        str(tmp_path / "emb.pt2"),
    )
    # the last one: padding alone
    asked = [(ids, offsets), (ids[:5], offsets[:3]), (ids[:4] * 0 + 4, offsets[:2])]
    torch.save([(*given, embedding(*given).detach()) for given in asked], tmp_path / "rows.pt")
    command = [sys.executable, "-c", ALONE, str(tmp_path / "emb.pt2"), str(tmp_path / "rows.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout == "served\n", done.stderr


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    """A missing table, a wrong argument, float ids, ids in no order: an error that names it."""
    path = str(tmp_path / "model.pt")
    dense = {"fc.weight": torch.ones(1, DIM), "norm.weight": torch.ones(DIM)}
    export(path, dense, {"emb": TableRows(table(), chunks([1, 2]))})
    with pytest.raises(KeyError, match="no table 'other'; weights of rows are of 'emb', 'fc'"):
        load_embedding(path, "other")
    with pytest.raises(KeyError, match="no table 'norm'"):
        load_embedding(path, "norm")
    with pytest.raises(ValueError, match="unknown: expected 'initial' or 'zeros', got 'ones'"):
        load_embedding(path, "emb", unknown="ones")
    with pytest.raises(
        ValueError, match="pooling: expected None or one of 'sum', 'mean', 'sqrtn', got 'max'"
    ):
        load_embedding(path, "emb", pooling="max")
    with pytest.raises(TypeError, match="expected int64"):
        load_embedding(path, "emb")(torch.ones(2))
    with pytest.raises(ValueError, match="offsets and per_sample_weights are for"):
        load_embedding(path, "emb")(torch.arange(2), torch.arange(1))
    with pytest.raises(ValueError, match="in ascending order"):
        LookupModule(torch.ones(2, DIM), torch.tensor([5, 5]))
    with pytest.raises(FileNotFoundError):
        load_embedding(str(tmp_path / "none.pt"), "emb")
