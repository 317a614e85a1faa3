"""Assembles the named arrays of one request as they arrive over a stream: rows of tables, whose
number no plan knows.  Pure bookkeeping.

A request may be sent again from the beginning, on another stream.  Each stream has an assembler of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pserver.errors import CorruptFrame, Refused, Unprepared
from pserver.table.gradient import RowGradient
from pserver.transport import codec
from pserver.transport.stream import Buffer
from pserver.wire_pb2 import Frame, Part
from transpiler.ir.tables import ShowClickEntry, Table

IDS, ROWS, STATISTICS = "@ids", "@rows", "@statistics"


class ArrayAssembler:
    """The arrays of one request, of any shape, by name.  One thread uses it.

    Args:
        has: whether there may be an array of this name; what a peer invents is not kept.
        most_bytes: of the arrays of one request.
    """

    def __init__(
        self, has: Callable[[str], bool] = lambda name: True, most_bytes: int = 2**63
    ) -> None:
        self._has, self._most = has, most_bytes
        self._arrays: dict[str, torch.Tensor] = {}
        self._received: dict[str, int] = {}

    def take_in(self, header: Frame, payload: Buffer) -> None:
        """Copies a frame's parts into their arrays.

        Raises:
            CorruptFrame: a part does not begin where the one before it of its name ended, or no
                tensor has its shape.
            Unprepared: there is no array of this name.
            Refused: the request is too large.
        """
        codec.scatter(header, payload, self._destination)
        for part in header.parts:
            self._received[part.name] += part.size

    def _destination(self, part: Part) -> torch.Tensor:
        if part.name not in self._arrays:
            if not self._has(part.name):
                raise Unprepared(f"{part.name!r} belongs to no table of this lane")
            self._check_room(part)
            self._arrays[part.name] = codec.blank(part)
            self._received[part.name] = 0
        if part.offset != self._received[part.name]:
            begin = self._received[part.name]
            raise CorruptFrame(
                f"{part.name!r}: expected bytes from {begin} on, got them from {part.offset}"
            )
        return self._arrays[part.name]

    def _check_room(self, part: Part) -> None:
        held = sum(array.nbytes for array in self._arrays.values())
        size = codec.whole_bytes(part)
        if held + size > self._most:
            raise Refused(
                f"expected a request of up to {self._most} bytes (--max-memory), got "
                f"{held + size} with {part.name!r}"
            )

    def take_out(self) -> dict[str, torch.Tensor]:
        """All arrays, by name.  The next request may begin.

        Raises:
            CorruptFrame: one is not whole.
        """
        arrays, received = self._arrays, self._received
        self._arrays, self._received = {}, {}
        for name, array in arrays.items():
            if received[name] != array.nbytes:
                raise CorruptFrame(
                    f"expected {array.nbytes} bytes of {name!r}, got {received[name]}"
                )
        return arrays


def row_parts(
    name: str, gradient: RowGradient, dtype: torch.dtype | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The named arrays that a table's gradient travels as.

    Args:
        dtype: of its rows on the way; None: as they are.
    """
    rows = gradient.rows if dtype is None else gradient.rows.to(dtype)
    parts = [(name + IDS, gradient.ids), (name + ROWS, rows)]
    return (
        parts if gradient.statistics is None else [*parts, (name + STATISTICS, gradient.statistics)]
    )


def row_gradients(
    arrays: Mapping[str, torch.Tensor], tables: Sequence[Table]
) -> dict[str, RowGradient]:
    """The row gradients that the arrays of one step hold, by table.

    Raises:
        Unprepared: an array belongs to no table of this lane.
        CorruptFrame: a gradient lacks an array, or one has another dtype or shape than its table.
    """
    found: dict[str, RowGradient] = {}
    left = dict(arrays)
    for table in tables:
        ids = left.pop(table.name + IDS, None)
        if ids is None:
            continue
        rows, statistics = (
            left.pop(table.name + ROWS, None),
            left.pop(table.name + STATISTICS, None),
        )
        count = len(ids) if ids.dim() == 1 else -1
        counts = isinstance(table.entry, ShowClickEntry)
        _expect(table.name + IDS, ids, torch.int64, (count,))
        whole, shorter = codec.DTYPES[table.computes_in], codec.DTYPES[table.gradients_in]
        short = rows is not None and rows.dtype == shorter
        _expect(table.name + ROWS, rows, shorter if short else whole, (count, table.dim))
        if counts or statistics is not None:
            _expect(
                table.name + STATISTICS, statistics, torch.float32, (count, 2) if counts else None
            )
        assert rows is not None
        found[table.name] = RowGradient(ids, rows.to(whole), statistics)
    if left:
        raise Unprepared(f"{min(left)!r} belongs to no table of this lane")
    return found


def _expect(
    name: str, array: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> None:
    if array is None or shape is None or array.dtype != dtype or tuple(array.shape) != shape:
        expected = "none" if shape is None else f"{dtype} {list(shape)}"
        got = "none" if array is None else f"{array.dtype} {list(array.shape)}"
        raise CorruptFrame(f"{name!r}: expected {expected}, got {got}")
