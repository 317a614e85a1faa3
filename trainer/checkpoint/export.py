"""A trained model as one file that torch alone can read: names and tensors, without a trace of the
cluster that trained it.

[Note: an exported table]  A table of a declared range becomes what nn.Embedding has:
``NAME.weight`` [num_embeddings, dim]; rows that were never touched have their initial values there,
less what weights have decayed.
Where that would be larger than ``MAX_BYTES``, or where ids are any int64, the file has::

    NAME.ids       int64 [n], in ascending order
    NAME.weight    [n, dim], the row of each of these ids
    NAME.initial   uint8 [m], JSON in ASCII: how the rows of all other ids begin

Where rows are asked for as int8, ``NAME.weight`` is int8 and ``NAME.scale``, float32 [n], is what
each row is multiplied with.

A table whose ids are strings' has ``NAME.hash``, uint8 [m], JSON in ASCII: the hash, and what the
ids are remainders of.  What the module itself has in a state_dict (its proxy parameter, its
padding's row, rows of its own) is in neither.  trainer/serving.py looks rows up in both.  Rows are
gathered in files beside the target, so that no table has to fit into memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from pserver.storage.single_file import written
from trainer.checkpoint.row_forms import FORMS, check_form, written_as
from transpiler.files.files import shown, write_object, write_tensors
from transpiler.files.named_errors import naming
from transpiler.ir.tables import Table

MAX_BYTES = 1 << 32
_BLOCK = 1 << 16  # rows that are handled at a time


@dataclass(frozen=True, slots=True)
class TableRows:
    """A table to be exported.

    Attributes:
        chunks: that have all its rows, each once: "ids" int64 [m] and "values" [m, dim], as a
            lookup reads them.
        padding_idx: an id that reads ``padding_row`` ([dim], zeros where it is None) instead of a
            row.
        reader: reads rows of any ids, int64 [n], as [n, dim], where steps have moved rows that
            nobody touched; None: they are as they begin.
    """

    table: Table
    chunks: Iterable[Mapping[str, np.ndarray]]
    padding_idx: int | None = None
    padding_row: torch.Tensor | None = None
    reader: Callable[[np.ndarray], np.ndarray] | None = None

    def checked(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and values, the padding's among them.

        Raises:
            ValueError: rows of another width or dtype, or an id outside of the table's range.
        """
        table = self.table
        for chunk in self.chunks:
            ids, values = chunk["ids"], chunk["values"]
            if values.shape != (len(ids), table.dim) or values.dtype != table.computes_in:
                expected = f"{table.computes_in} [{len(ids)}, {table.dim}]"
                raise ValueError(
                    f"table {table.name!r}: expected rows {expected}, got {values.dtype} "
                    f"{list(values.shape)}"
                )
            if (
                table.rows is not None
                and len(ids)
                and not (0 <= ids.min() and ids.max() < table.rows)
            ):
                said = f"expected ids from 0 to {table.rows - 1}, got {ids.min()} to {ids.max()}"
                raise ValueError(f"table {table.name!r}: {said}")
            stays = ids != self.padding_idx
            yield (ids, values) if stays.all() else (ids[stays], values[stays])
        if self.padding_idx is not None:
            row = (
                np.zeros(table.dim)
                if self.padding_row is None
                else self.padding_row.detach().cpu().numpy()
            )
            yield np.array([self.padding_idx]), row[None].astype(table.computes_in)


def export(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    tables: Mapping[str, TableRows] | None = None,
    max_bytes: int = MAX_BYTES,
    rows: str | None = None,
) -> None:
    """Writes a state_dict to the file ``path``: whole, or not at all.

    Args:
        path: or a URL.  "NAME.safetensors" is written for ``safetensors.torch.load_file``, any
            other name for ``torch.load``.
        tables: by the name of their module.  See [Note: an exported table].
        max_bytes: of a table's weight that has all rows of its range; where it would be larger,
            its ids are listed.
        rows: in which numbers tables are written: "float32", "float64", "bfloat16", "float16" or
            "int8"; None: those in which they are computed.

    Raises:
        ValueError: ``rows`` is something else, a table's name is another tensor's, or an id is
            outside of its table's range.
        OSError: the file cannot be written; the one that was there stays.
    """
    check_form(rows)
    wanted = {
        name: tensor for name, tensor in tensors.items() if not _of_module(name, tables or {})
    }
    plain = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in wanted.items()
    }
    with written(path) as file:
        for index, (name, table) in enumerate((tables or {}).items()):
            place = file.parent / str(index)
            for key, tensor in _tensors_of(table, place, max_bytes, rows).items():
                full = _prefix(name) + key
                if full in plain:
                    raise ValueError(
                        f"{shown(path)}: {full}: expected one tensor of this name, got a table's "
                        "and another"
                    )
                plain[full] = tensor
        if file.suffix == ".safetensors":
            write_tensors(plain, file)
        else:
            write_object(plain, file)


def _prefix(module: str) -> str:
    return f"{module}." if module else ""


def _of_module(name: str, tables: Iterable[str]) -> bool:
    """Whether a tensor is what an embedding itself has in a state_dict."""
    own = [
        name.removeprefix(_prefix(module)) for module in tables if name.startswith(_prefix(module))
    ]
    return any(key in ("proxy", "padding_row") or key.startswith("table.") for key in own)


def _tensors_of(
    rows: TableRows, scratch: Path, max_bytes: int, form: str | None
) -> dict[str, torch.Tensor]:
    table = rows.table
    itemsize = FORMS[form or table.computes_in].itemsize
    if table.rows is not None and table.rows * table.dim * itemsize <= max_bytes:
        found = {"weight": _whole(rows, table.rows, scratch)}
    else:
        found = _listed(rows, scratch)

    def made(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return _mapped(scratch.with_suffix(f".{name}"), shape, dtype)

    return {**found, **written_as(found["weight"], form, made)}


def _whole(rows: TableRows, count: int, scratch: Path) -> torch.Tensor:
    """All rows of the range."""
    from pserver.table.rows import initial_values  # imports numba, which few exports need

    table = rows.table
    weight = _mapped(scratch.with_suffix(".weight"), (count, table.dim), table.computes_in)
    values = weight.numpy()
    for begin in range(0, count, _BLOCK):
        ids = np.arange(begin, min(begin + _BLOCK, count))
        if rows.reader is None:
            initial_values(table, ids, values[begin : begin + _BLOCK])
        else:
            values[begin : begin + _BLOCK] = rows.reader(ids)
    for ids, held in rows.checked():
        values[ids] = held
    return weight


def _listed(rows: TableRows, scratch: Path) -> dict[str, torch.Tensor]:
    """The rows that there are, in the order of their ids."""
    table, count = rows.table, 0
    with (
        naming(scratch),
        scratch.with_suffix(".ids").open("wb") as ids_file,
        scratch.with_suffix(".rows").open("wb") as rows_file,
    ):
        for ids, values in rows.checked():
            count += len(ids)
            ids_file.write(ids.tobytes())
            rows_file.write(values.tobytes())
    unordered = _mapped(scratch.with_suffix(".ids"), (count,), "int64").numpy()
    gathered = _mapped(scratch.with_suffix(".rows"), (count, table.dim), table.computes_in).numpy()
    order = np.argsort(unordered)
    weight = _mapped(scratch.with_suffix(".weight"), (count, table.dim), table.computes_in)
    for begin in range(0, count, _BLOCK):
        weight.numpy()[begin : begin + _BLOCK] = gathered[order[begin : begin + _BLOCK]]
    said = asdict(table.initial) | {"seed": table.seed, "held": table.dtype}
    initial = json.dumps(said).encode()
    return {
        "ids": torch.from_numpy(unordered[order]),
        "weight": weight,
        "initial": torch.frombuffer(bytearray(initial), dtype=torch.uint8),
    }


def _mapped(path: Path, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor whose memory is a file, allocated whole: a full disk raises here and not at a later
    write.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with naming(path), path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, count * getattr(torch, dtype).itemsize)
    return torch.from_file(str(path), shared=True, size=count, dtype=getattr(torch, dtype)).view(
        shape
    )
