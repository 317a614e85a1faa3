"""Weights of another system: ``fleet.load_arrays``."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, ShowClickEntry, fleet, row_optimizers
from transpiler import DistributedStrategy

ROWS, DIM = 40, 4


class Clicks(nn.Module):
    """A table, two linear layers, one of them square, and a batch norm with buffers."""

    def __init__(self, **table: Any) -> None:
        super().__init__()
        optimizer = table.pop("optimizer", row_optimizers.LazyAdam(lr=0.01))
        self.rows = DistributedEmbedding(DIM, optimizer=optimizer, padding_idx=0, **table)
        self.square = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.norm(self.square(self.rows(ids))).relu())
        return out


NAMES = {"norm._mean": "norm.running_mean", "norm._variance": "norm.running_var"}


def dense(seed: int = 5) -> dict[str, np.ndarray]:
    """Weights as Paddle has them: those of linear layers are [in, out]."""
    draw = np.random.default_rng(seed)
    shapes = {
        **{"square.weight": (DIM, DIM), "square.bias": (DIM,), "norm.weight": (DIM,)},
        **{"norm.bias": (DIM,), "norm._mean": (DIM,), "top.weight": (DIM, 1), "top.bias": (1,)},
    }
    found = {name: draw.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    return found | {"norm._variance": draw.uniform(0.5, 2.0, DIM).astype("f4")}


def chunks(states: bool = False) -> list[dict[str, np.ndarray]]:
    """All rows but one, in chunks of two sizes."""
    draw = np.random.default_rng(6)
    ids = draw.permutation(ROWS)[1:]
    whole = {"ids": ids, "values": draw.normal(size=(len(ids), DIM)).astype("f4")}
    if states:
        whole["state.exp_avg"] = draw.normal(size=(len(ids), DIM)).astype("f4") / 100
        whole["state.exp_avg_sq"] = draw.uniform(1e-4, 1e-2, (len(ids), DIM)).astype("f4")
    return [
        {key: array[part] for key, array in whole.items()} for part in (slice(30), slice(30, 99))
    ]


def joined(endpoints: str, model: nn.Module, strategy: DistributedStrategy | None = None) -> Any:
    role = None
    if endpoints:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def expected(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The prediction in numpy's arithmetic of Paddle's layout."""
    weights = {name: torch.from_numpy(array) for name, array in dense().items()}
    hidden = rows @ weights["square.weight"] + weights["square.bias"]
    hidden = (hidden - weights["norm._mean"]) / (weights["norm._variance"] + 1e-5).sqrt()
    hidden = (hidden * weights["norm.weight"] + weights["norm.bias"]).relu()
    return hidden @ weights["top.weight"] + weights["top.bias"]


MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {"k_steps": 0},
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 2, "outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": 0.9}},
}


def strategy_of(mode: str) -> DistributedStrategy | None:
    keys = MODES.get(mode)
    if keys is None:
        return None
    strategy = DistributedStrategy()
    strategy.a_sync_configs = keys
    return strategy


@pytest.mark.parametrize("mode", ["alone", *MODES])
@pytest.mark.parametrize("suffix", ["npz", "safetensors", ""])
def test_a_model_predicts_what_its_weights_say(
    servers: Callable[[int], str], mode: str, suffix: str, tmp_path: Path
) -> None:
    """From a mapping and from files; on two servers, and after the first lookups, too.  Rows that
    are not given keep their values.
    """
    model, ids = Clicks(num_embeddings=ROWS), torch.arange(1, ROWS)
    joined("" if mode == "alone" else servers(2), model, strategy_of(mode))
    before = model.rows(ids).detach()
    arrays: Any = dense()
    given: Any = chunks()
    if suffix:
        arrays = tmp_path / f"dense.{suffix}"
        given = [tmp_path / f"rows-{number}.{suffix}" for number in range(len(given))]
        write = np.savez if suffix == "npz" else _write_safetensors
        for path, content in zip([arrays, *given], [dense(), *chunks()], strict=True):
            write(path, **content)

    fleet.load_arrays(arrays, names=NAMES, transpose=[nn.Linear], tables={"rows": given})

    known = {int(i): row for c in chunks() for i, row in zip(c["ids"], c["values"], strict=True)}
    rows = torch.stack(
        [torch.from_numpy(known[int(i)]) if int(i) in known else before[i - 1] for i in ids]
    )
    assert set(ids.tolist()) - known.keys(), "one id is not given"
    model.eval()
    assert torch.equal(model.rows(ids), rows)
    assert torch.allclose(model(ids), expected(ids, rows), atol=1e-6)
    assert torch.equal(model.state_dict()["top.weight"], torch.from_numpy(dense()["top.weight"]).T)


def _write_safetensors(path: Path, **arrays: np.ndarray) -> None:
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_states_continue(servers: Callable[[int], str], count: int) -> None:
    """A step after loading the states of rows is the step that torch's SparseAdam takes from
    them, on any number of servers.
    """
    model = Clicks(num_embeddings=ROWS)
    optimizer = joined(servers(count) if count else "", model)
    ids = torch.tensor([3, 7, 9, 3])

    given = chunks(states=True)
    fleet.load_arrays(tables={"rows": iter(given)}, steps=100)
    whole = {key: np.concatenate([chunk[key] for chunk in given]) for key in given[0]}
    assert {3, 7, 9} <= set(whole["ids"].tolist())
    plain = nn.Embedding(ROWS, DIM, sparse=True)
    theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.01)
    states = {name: torch.zeros(ROWS, DIM) for name in ("exp_avg", "exp_avg_sq")}
    with torch.no_grad():
        plain.weight[whole["ids"]] = torch.from_numpy(whole["values"])
    for name, state in states.items():
        state[whole["ids"]] = torch.from_numpy(whole[f"state.{name}"])
    theirs.state[plain.weight] = {"step": 100, **states}
    model.rows(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    optimizer.step()
    theirs.step()

    found = model.rows(ids[:3]).detach()
    assert torch.allclose(found, plain.weight[ids[:3]], rtol=1e-5, atol=1e-7)
    assert (found - torch.from_numpy(whole["values"])[[whole["ids"].tolist().index(3)]]).any()


def test_rows_begin_anew_with_a_number_of_steps(servers: Callable[[int], str]) -> None:
    """The rows that are not given have initial values again, and the others' states are dropped."""
    model = Clicks()
    optimizer = joined(servers(2), model)
    ids = torch.tensor([1, 2, 5000])
    before = model.rows(ids).detach()
    model.rows(ids).sum().backward()
    optimizer.step()
    assert (model.rows(ids) != before).any()

    fleet.load_arrays(tables={"rows": chunks(states=True)}, steps=10)

    assert torch.equal(model.rows(ids)[2], before[2])
    assert fleet.table_status()["rows"]["rows"] == ROWS - 1


@pytest.mark.parametrize("count", [0, 2])
def test_shows_clicks_and_times_come_along(servers: Callable[[int], str], count: int) -> None:
    """A row counts as touched now, so it does not outlive its time at once; a shrink keeps the
    rows whose clicks say so.
    """
    model = Clicks(ttl=3600, entry=ShowClickEntry("show", "click"))
    joined(servers(count) if count else "", model)
    counts = {"show": np.array([100.0, 0.0]), "click": np.array([50.0, 0.0])}
    values = np.ones((2, DIM), "f4")

    fleet.load_arrays(tables={"rows": {"ids": [1, 2], "values": values, **counts}})

    assert torch.equal(model.rows(torch.tensor([1, 2])), torch.ones(2, DIM))
    assert fleet.shrink(threshold=1.0) == {"rows": 1}
    assert (model.rows(torch.tensor([1, 2])) == 1).all(1).tolist() == [True, False]


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model in a job of one process."""
    found = Clicks(num_embeddings=ROWS)
    joined("", found)
    yield found


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in dense().items() if name not in names}


def rows(**changed: Any) -> dict[str, Any]:
    """A chunk of three rows, with changes; None: without the array."""
    chunk = {"ids": np.arange(1, 4), "values": np.ones((3, DIM), "f4"), **changed}
    return {"tables": {"rows": [{k: v for k, v in chunk.items() if v is not None}]}}


def put(name: str, array: Any) -> dict[str, Any]:
    return {"arrays": dense() | {name: array}}


NAN = dense()["top.bias"] * np.nan
STATE = np.zeros((3, DIM), "f4")
ONLY = "expected ids and values, all or none of lazy_adam's state.exp_avg and state.exp_avg_sq"
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"transpose": []},
        "'top.weight', array 'top.weight': expected shape [1, 4], got [4, 1]; its transpose fits: "
        "add 'top.weight' to transpose, or nn.Linear",
    ),
    (
        {"transpose": ["*"]},
        "'square.bias', array 'square.bias': expected 2 dimensions to transpose",
    ),
    ({"transpose": ["fc*"]}, "a pattern of variables' names, got 'fc*', which matches none"),
    ({"transpose": [nn.LSTM]}, "a class of the model's modules with a weight, got LSTM"),
    ({"transpose": nn.Linear}, "transpose: expected a list"),
    ({"transpose": [3]}, "transpose: expected names or classes of modules, got 3"),
    (put("top.weight", np.ones((1, DIM), "f4")), "got [1, 4] to transpose; it fits as it is"),
    (
        put("top.bias", np.ones(3, "f4")),
        "'top.bias', array 'top.bias': expected shape [1], got [3]",
    ),
    (put("top.bias", np.ones(1, "i4")), "expected torch.float32, got torch.int32"),
    (
        put("top.bias", np.ones(1, object)),
        "array 'top.bias': expected numbers, got an array of object",
    ),
    (put("top.bias", NAN), "expected finite torch.float32, got nan at [0], 1 such in all"),
    (put("top.bias", np.array([1e300])), "expected finite torch.float32, got 1e+300 at [0]"),
    (put("top.biass", NAN), "array 'top.biass': expected a variable of this name, got none; did"),
    ({"arrays": without("top.bias", "norm._mean")}, "'top.bias': expected an array, got none"),
    ({"arrays": without("top.bias", "norm._mean")}, "'norm.running_mean': expected an array"),
    ({"names": NAMES | {"nom": "norm.bias"}}, "names: expected an array 'nom', got none"),
    (
        {"names": NAMES | {"top.bias": "top.biases"}},
        "names: expected a variable of the model for 'top.bias', got 'top.biases'; did you mean",
    ),
    (
        {"names": NAMES | {"top.bias": "norm.bias"}},
        "'norm.bias': expected one array, got 'norm.bias' and 'top.bias'",
    ),
    ({"arrays": 3}, "expected a mapping of arrays, or the path of a file, got int"),
    ({"arrays": "dense.pdparams"}, "dense.pdparams: expected NAME.npz or NAME.safetensors"),
    ({"arrays": "torn.npz"}, "torn.npz: expected arrays, npz, got a file that cannot be read"),
    ({"arrays": None}, "names, transpose: expected arrays with them, got none"),
    ({"arrays": None, "names": None, "transpose": ()}, "expected arrays of parameters, or tables="),
    ({"strict": 1}, "strict: expected True or False"),
    ({"tables": {"emb": []}}, "tables: expected tables among rows, got 'emb'"),
    ({"tables": {}}, "table 'rows': expected rows, got none; strict=False keeps its rows"),
    ({"tables": {"rows": 3}}, "table 'rows': expected chunks, or paths of files, got int"),
    ({"steps": 3}, "steps: expected tables with it, got none"),
    (rows() | {"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
    (rows() | {"steps": 5}, "table 'rows': steps: expected chunks with states, got none"),
    (rows(ids=None), f"table 'rows', chunk 0: {ONLY}, got no ids"),
    (rows(other=STATE), f"{ONLY}, got other"),
    ({**rows(**{"state.exp_avg": STATE})}, f"{ONLY}, got no state.exp_avg_sq"),
    (
        rows(**{"state.exp_avg": STATE, "state.exp_avg_sq": STATE}),
        "expected steps=, the number of steps that have made these states: a step of lazy_adam",
    ),
    (rows(**{"state.exp_avg": STATE[:2], "state.exp_avg_sq": STATE}), "expected shape [3, 4]"),
    (rows(ids=np.array([1, 2, 1])), "chunk 0: ids: expected each id once, got 1 again"),
    (rows(ids=np.array([1, 2, ROWS])), "ids: expected 0 to 39, got 40 at position 2"),
    (rows(ids=np.array([1, -1, 2])), "ids: expected 0 to 39, got -1 at position 1"),
    (rows(ids=np.array([1, 2, 2**63], np.uint64)), "array 'ids': expected numbers of int64"),
    (rows(ids=np.ones(3)), "ids: expected int64 [n], got torch.float64 [3]"),
    (rows(values=np.ones((3, 5), "f4")), "values: expected shape [3, 4], got [3, 5]"),
    (rows(values=np.ones((2, 4), "f4")), "values: expected shape [3, 4], got [2, 4]"),
    (rows(values=np.ones((3, 4), "i8")), "values: expected torch.float32, got torch.int64"),
    (rows(values=STATE * np.nan), "values: expected finite torch.float32, got nan at [0, 0], 12"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=lambda each: str(each)[:40])
def test_what_does_not_fit_is_refused(
    model: nn.Module, given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """With what was expected and what was given, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    Path("torn.npz").write_bytes(b"PK\3\4torn")
    before = copy.deepcopy(model.state_dict())

    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        right = {"arrays": dense(), "names": NAMES, "transpose": [nn.Linear]}
        fleet.load_arrays(**(right | given))

    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_all_problems_of_dense_arrays_are_told_at_once(model: nn.Module) -> None:
    """So that a map of names is right after one round."""
    with pytest.raises(ValueError, match="do not fit") as raised:
        fleet.load_arrays(without("square.bias") | {"other": np.ones(2)}, names={"gone": "gone"})

    assert str(raised.value).count("\n") == 9


@pytest.mark.parametrize("kind", [list, iter])
def test_a_list_is_checked_whole_and_a_generator_chunk_by_chunk(
    model: nn.Module, kind: Any
) -> None:
    """Of a list nothing is loaded; a generator's error tells how many rows are."""
    first, second = chunks()
    second["ids"][-1] = first["ids"][0]
    said = f"table 'rows', chunk 1: ids: expected each id once, got {first['ids'][0]} again"

    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        fleet.load_arrays(tables={"rows": kind([first, second])})

    loaded = kind is iter
    assert ("; 30 rows of earlier chunks are loaded" in str(raised.value)) == loaded
    assert fleet.table_status()["rows"]["rows"] == (30 if loaded else 0)


def test_not_strict_leaves_out_and_says_so(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables without an array keep their values, arrays without a variable are not used."""
    before = model.top.bias.detach().clone()
    given = without("top.bias") | {"other": np.ones(2)}

    fleet.load_arrays(given, names=NAMES, transpose=["*.weight"][:0] + [nn.Linear], strict=False)

    assert torch.equal(model.top.bias, before)
    assert torch.equal(model.norm.bias, torch.from_numpy(dense()["norm.bias"]))
    assert "without an array, and unchanged: top.bias" in caplog.text
    assert "arrays without a variable: other" in caplog.text


def test_states_of_rows_that_trainers_step_are_refused(servers: Callable[[int], str]) -> None:
    """In the k-step modes servers step no rows."""
    joined(servers(2), Clicks(num_embeddings=ROWS), strategy_of("geo"))

    with pytest.raises(ValueError, match="in this mode each trainer steps its rows by itself"):
        fleet.load_arrays(tables={"rows": chunks(states=True)}, steps=10)


def test_a_job_that_continues_keeps_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script calls the same as at the beginning, and what was trained stays."""
    weights, ids = [], torch.arange(1, 9)
    for _ in range(2):
        model = Clicks(num_embeddings=ROWS)
        fleet.init(checkpoint=str(tmp_path / "saves"), every=1e-6)
        fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.load_arrays(dense(), names=NAMES, transpose=[nn.Linear], tables={"rows": chunks()})
        weights.append(copy.deepcopy(model.state_dict()))
        if len(weights) == 1:
            for _ in range(4):
                F.mse_loss(model(ids), torch.ones(8, 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        fleet.finish()

    assert not torch.equal(weights[0]["square.weight"], weights[1]["square.weight"])
    assert "left out, as the job has continued from a checkpoint" in caplog.text


def test_trainers_without_servers_have_the_weights(tmp_path: Path) -> None:
    """In a world of one, by the same call."""
    model = nn.Linear(3, 2)
    fleet.init(is_collective=True)
    fleet.distributed_model(model)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    weight = np.arange(6, dtype="f8").reshape(3, 2)

    fleet.load_arrays(
        {"w": weight, "bias": np.ones(2)}, names={"w": "weight"}, transpose=["weight"]
    )

    assert torch.equal(model.weight, torch.from_numpy(weight).float().T)


def test_a_table_takes_the_halves_of_another_system(servers: Callable[[int], str]) -> None:
    """Values of any floating point; the table rounds them as its own."""
    model = Clicks(num_embeddings=ROWS, dtype=torch.bfloat16)
    joined(servers(2), model)
    values = np.random.default_rng(1).normal(size=(3, DIM)).astype("f2")

    fleet.load_arrays(tables={"rows": {"ids": np.array([1, 2, 3]), "values": values}})

    halves = torch.from_numpy(values).float().bfloat16().float()
    assert torch.equal(model.rows(torch.tensor([1, 2, 3])), halves)
