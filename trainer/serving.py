"""Lookups without servers: an exported table as an ordinary module, of torch alone.

::

    model.emb = load_embedding("model.pt", "emb", pooling="sum")
    # a file that torch loads without this package
    torch.export.save(torch.export.export(model.emb, (ids, offsets)), "emb.pt2")

See [Note: an exported table] in trainer/checkpoint/export.py for the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pserver.storage.single_file import file_to_read
from pserver.table.string_ids import rows_of, string_ids
from transpiler.files import bounded_json

POOLINGS = ("sum", "mean", "sqrtn")


def _signed(word: int) -> int:
    """The value of 64 bits as torch's int64."""
    return word - 2**64 if word >= 2**63 else word


GOLDEN, FIRST, SECOND = (
    _signed(0x9E3779B97F4A7C15),
    _signed(0xBF58476D1CE4E5B9),
    _signed(0x94D049BB133111EB),
)
OF_ID, OF_COLUMN = _signed(0xA0761D6478BD642F), _signed(0xD1B54A32D192ED03)


def _mix(value: Tensor) -> Tensor:
    """The bijection of 64 bits of pserver/table/ids.py; torch's shift keeps the sign, which a mask
    removes.
    """
    value = value + GOLDEN
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * FIRST
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * SECOND
    return value ^ ((value >> 31) & ((1 << 33) - 1))


class InitialRows(nn.Module):
    """The initial values of rows, as in pserver/table/rows.py; logarithms and cosines are
    torch's, so a float64's last bits may differ.

    Args:
        kind, low, high: of the table's :class:`transpiler.ir.tables.Initial`.
        seed: of the table.
        dim, dtype: of a row.
        held: the dtype in which the table held rows, to which initial values are rounded; None:
            that of a row.
    """

    def __init__(
        self,
        kind: str,
        low: float,
        high: float,
        seed: int,
        dim: int,
        dtype: torch.dtype,
        held: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.held: torch.dtype = dtype if held is None else held
        self.kind, self.low, self.high, self.dim = kind, low, high, dim
        self.rows_dtype: torch.dtype = dtype
        self.seed = int(_mix(torch.tensor(_signed(seed % 2**64))))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, dim]."""
        return self._drawn(ids).to(self.rows_dtype).to(self.held).to(self.rows_dtype)

    def _drawn(self, ids: Tensor) -> Tensor:
        if self.kind == "constant":
            return torch.full(
                (ids.shape[0], self.dim), self.low, dtype=self.rows_dtype, device=ids.device
            )
        count = self.dim + self.dim % 2 if self.kind == "normal" else self.dim
        columns = torch.arange(count, device=ids.device) * OF_COLUMN
        keys = _mix(_mix(ids ^ OF_ID) ^ self.seed)
        hashed = _mix(keys.unsqueeze(1) + columns) >> 11
        uniform = (hashed & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
        if self.kind == "uniform":
            return self.low + (self.high - self.low) * uniform
        length = torch.sqrt(-2.0 * torch.log(1.0 - uniform[:, 0::2])) * self.high
        angle = 2.0 * math.pi * uniform[:, 1::2]
        pairs = torch.stack(
            [self.low + length * torch.cos(angle), self.low + length * torch.sin(angle)], 2
        )
        return pairs.flatten(1)[:, : self.dim]


class LookupModule(nn.Module):
    """Rows of an exported table.  They are buffers: ``to`` and ``state_dict`` have them;
    ``torch.export`` takes the module.

    Args:
        weight: [n, dim].
        ids: int64 [n] in ascending order, the id of each row; None: 0 to n - 1.
        initial: the rows of other ids; None: zeros.
        pooling: None: a row for each id; "sum", "mean" or "sqrtn": one for each bag, as
            DistributedEmbedding pools.
        padding_idx: an id that is left out of bags.
        scale: float32 [n], the factor of each row; None: 1.  With it, and where rows are of 16
            bits, looked-up rows are float32.
        hash: of strings to ids, as in a file; None: ids are numbers.

    Attributes:
        described: the file's descriptions of the table, as JSON, by their keys there.  So
            ``load_state_dict`` takes a file of the same table as it is.

    Raises:
        ValueError: ids are not in order or not as many as rows, or no such pooling.
    """

    ids: Tensor
    weight: Tensor
    scale: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        ids: Tensor | None = None,
        initial: InitialRows | None = None,
        pooling: str | None = None,
        padding_idx: int | None = None,
        scale: Tensor | None = None,
        hash: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.hashed = hash is not None
        self.hashed_rows = None if hash is None else rows_of(hash)
        if pooling is not None and pooling not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise ValueError(f"pooling: expected None or one of {known}, got {pooling!r}")
        if ids is not None and (
            ids.dtype != torch.int64
            or ids.shape != weight.shape[:1]
            or bool((ids[1:] <= ids[:-1]).any())
        ):
            raise ValueError(
                f"ids: expected int64 [{len(weight)}] in ascending order, got {ids.dtype} "
                f"{list(ids.shape)}"
            )
        self.listed = ids is not None
        self.dim = weight.shape[1]
        self.zeros = initial is None
        self.short = weight.itemsize < 4
        self.rows_dtype = torch.float32 if self.short else weight.dtype
        self.initial = initial or InitialRows("constant", 0.0, 0.0, 0, self.dim, self.rows_dtype)
        self.pooling, self.padding_idx = pooling, padding_idx
        self.empty = ids is not None and not len(ids)
        if self.empty:  # one row always, so that every search finds a place
            ids = torch.zeros(1, dtype=torch.int64)
            weight, scale = self.initial(ids), None
        self.register_buffer("scale", scale)
        places = torch.empty(0, dtype=torch.int64) if ids is None else ids
        self.register_buffer("ids", places, persistent=self.listed)
        self.register_buffer("weight", weight)
        self.described: dict[str, bytes] = {}
        self.register_load_state_dict_pre_hook(_as_in_the_file)  # type: ignore[no-untyped-call]  # torch's own

    def forward(
        self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Rows, or pooled rows.

        Args:
            ids: int64, of any shape; with pooling [bags, size], or [n] with offsets.  Strings, too,
                where the table was trained on them.
            offsets: int64 [bags], where each bag begins.
            per_sample_weights: float, of ids' shape; with pooling.

        Returns:
            [*ids.shape, dim]; with pooling [bags, dim].

        Raises:
            TypeError: ids are not whole numbers.
            ValueError: shapes do not fit.
            IndexError: an id is outside of the declared range.
        """
        if self.hashed and not isinstance(ids, Tensor):
            ids = string_ids(ids, self.hashed_rows).to(self.weight.device)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError("ids: expected int64")
        flat = ids.reshape(-1).to(torch.int64)
        if self.pooling is None:
            if offsets is not None or per_sample_weights is not None:
                raise ValueError("offsets and per_sample_weights are for a table with pooling")
            return self.rows(flat).view(ids.shape + (self.dim,))
        if offsets is None:
            if ids.dim() != 2:
                raise ValueError("expected ids [bags, size], or [n] with offsets")
            starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
        else:
            if ids.dim() != 1:
                raise ValueError("expected ids [n] with offsets")
            starts = offsets.to(torch.int64)
        weights = None
        if per_sample_weights is not None:
            weights = per_sample_weights.reshape(-1).to(self.rows_dtype)
        if self.padding_idx is not None:
            stays = flat != self.padding_idx
            before = F.pad(stays.cumsum(0), (1, 0))  # how many ids stay before each
            starts = before[starts]
            flat = flat[stays]
            if weights is not None:
                weights = weights[stays]
        return self.pooled(self.rows(flat), starts, weights)

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, dim]."""
        if not self.listed:
            return self._rows_at(ids)
        places = torch.searchsorted(self.ids, ids).clamp(max=self.ids.shape[0] - 1)
        known = self.ids[places] == ids
        found = self._rows_at(places)
        if self.zeros:
            return found.masked_fill(~known.unsqueeze(1), 0.0)
        # a program that is captured has no such branch
        if not torch.compiler.is_compiling() and bool(known.all()):
            return found
        return torch.where(known.unsqueeze(1), found, self.initial(ids))

    def _rows_at(self, places: Tensor) -> Tensor:
        found = F.embedding(places, self.weight)
        found = found.to(self.rows_dtype) if self.short else found
        return found if self.scale is None else found * self.scale[places].unsqueeze(1)

    def pooled(self, rows: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
        """The pooled rows of each bag: [n, dim] -> [bags, dim]; zeros for an empty one."""
        each = torch.arange(rows.shape[0], device=rows.device)
        if weights is None and self.pooling != "sqrtn":
            return F.embedding_bag(each, rows, starts, mode=self.pooling or "sum")
        sums = F.embedding_bag(each, rows, starts, mode="sum", per_sample_weights=weights)
        if self.pooling == "sum":
            return sums
        bag_of = torch.searchsorted(starts, each, right=True) - 1
        weights = torch.ones_like(each, dtype=rows.dtype) if weights is None else weights
        counted = weights if self.pooling == "mean" else weights * weights
        total = torch.zeros_like(starts, dtype=rows.dtype).index_add(0, bag_of, counted)
        # an empty bag, or one of zeros
        total = torch.where(total == 0, torch.ones_like(total), total)
        return sums / (total if self.pooling == "mean" else total.sqrt()).unsqueeze(1)


def _as_in_the_file(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Lets a module load a file's other entries: descriptions, or a table without rows."""
    assert isinstance(module, LookupModule)
    if module.empty and len(state.get(prefix + "ids", module.ids)) == 0:
        state |= {prefix + "ids": module.ids, prefix + "weight": module.weight}
        state.pop(prefix + "scale", None)
    for key, said in module.described.items():
        given = state.pop(prefix + key, None)
        if given is not None and bytes(given.tolist()) != said:
            errors.append(
                f"{prefix}{key}: expected {said.decode()}, which the module was made of, got "
                f"{bytes(given.tolist()).decode()}"
            )


def load_embedding(
    path: str,
    name: str,
    pooling: str | None = None,
    padding_idx: int | None = None,
    unknown: str = "initial",
) -> LookupModule:
    """The table of module ``name`` in a file that ``fleet.export`` wrote.

    Args:
        path: of the file, or its URL.
        unknown: the values of ids without a row, where any int64 is an id: "initial" or "zeros".

    Raises:
        FileNotFoundError: there is no such file.
        KeyError: it has no such table.
        ValueError: an argument is out of its range.
    """
    if unknown not in ("initial", "zeros"):
        raise ValueError(f"unknown: expected 'initial' or 'zeros', got {unknown!r}")
    tensors = _read(path)
    prefix = f"{name}." if name else ""
    listed = {
        key.removesuffix("weight").rstrip(".")
        for key, value in tensors.items()
        if key.split(".")[-1] == "weight" and value.dim() == 2
    }
    if name not in listed:
        known = ", ".join(map(repr, sorted(listed))) or "nothing"
        raise KeyError(f"{path}: no table {name!r}; weights of rows are of {known}")
    weight, ids = tensors[prefix + "weight"], tensors.get(prefix + "ids")
    initial = None
    if ids is not None and unknown == "initial":
        said = bounded_json.loads(bytes(tensors[prefix + "initial"].tolist()))
        dtype = torch.float32 if weight.itemsize < 4 else weight.dtype
        held = getattr(torch, said["held"]) if "held" in said else None
        initial = InitialRows(
            said["kind"], said["low"], said["high"], said["seed"], weight.shape[1], dtype, held
        )
    scale = tensors.get(prefix + "scale")
    hashed = tensors.get(prefix + "hash")
    module = LookupModule(weight, ids, initial, pooling, padding_idx, scale, hashed)
    module.described = {
        key: bytes(tensors[prefix + key].tolist())
        for key in ("initial", "hash")
        if prefix + key in tensors
    }
    return module


def _read(path: str) -> Mapping[str, Any]:
    with file_to_read(path) as file:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        found: Mapping[str, Any] = torch.load(file, weights_only=True, mmap=True)
        return found
