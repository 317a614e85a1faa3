"""Arrays on their way: rows of tables, assignments and norms, put together from parts.

[Note: norms of 32 bits]  A norm is summed in 32 bits, at the speed of memory; in 64 bits torch
takes fifty times as long, and what it is compared with is a factor.  Squares leave the range of 32
bits above 1e19: where the sum has, it is taken again in 64 bits, of elements divided by the
largest.  Squares below 1e-45 are 0.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pserver.errors import CorruptFrame, Refused, Unprepared
from pserver.table.gradient import RowGradient
from pserver.transport import frames
from pserver.transport.stream import LANDED, Buffer
from pserver.wire_pb2 import Frame, Part
from transpiler.ir.tables import ShowClickEntry, Table

# ---- array assembler ----
#
# Assembles the named arrays of one request as they arrive over a stream: rows of tables, whose
# number no plan knows.  Pure bookkeeping.
#
# A request may be sent again from the beginning, on another stream.  Each stream has an assembler
# of its own.


IDS, ROWS, STATISTICS, PLACES = "@ids", "@rows", "@statistics", "@places"
WIDEST = 16  # bytes of an element of the widest dtype


class ArrayAssembler:
    """The arrays of one request, of any shape, by name.  One thread uses it.

    Args:
        has: whether there may be an array of this name; others, which a peer may invent, are not
            kept.
        most_bytes: of the arrays of one request.
    """

    def __init__(
        self, has: Callable[[str], bool] = lambda name: True, most_bytes: int = 2**63
    ) -> None:
        self._has, self._most = has, most_bytes
        self._arrays: dict[str, torch.Tensor] = {}
        self._received: dict[str, int] = {}
        self._held = 0  # bytes of the arrays
        self._known: set[str] = set()  # names that were asked about

    def land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """The memory for a frame's payload, before it is read; None where it is out of place."""
        try:
            memory = self._memory(header, payload_bytes)
            return [memory] if memory else frames.targets(header, payload_bytes, self._destination)
        except Exception:  # whatever it is, it comes again when the payload is there
            return None

    def take_in(self, header: Frame, payload: Buffer) -> None:
        """Copies a frame's parts into their arrays, unless they have landed there.

        Raises:
            CorruptFrame: a part does not begin where the one before it of its name ended, or no
                tensor has its shape.
            Unprepared: there is no array of this name.
            Refused: the request is too large.
        """
        if payload is not LANDED:
            memory = self._memory(header, memoryview(payload).nbytes)
            if memory:
                frames.copy_bytes(memory, memoryview(payload))
            else:
                frames.scatter(header, payload, self._destination)
        for part in header.parts:
            self._received[part.name] += part.size

    def _memory(self, header: Frame, payload_bytes: int) -> memoryview | None:
        """One memory for the arrays of a frame that brings all of each, behind one another as they
        travel; None where it does not, and they are made one by one.
        """
        forms, total = dict[str, tuple[torch.dtype, list[int], int]](), 0
        for part in header.parts:
            name, shape, dtype = part.name, list(part.shape), frames.DTYPES.get(part.dtype)
            if dtype is None or name in forms or name in self._arrays or total % dtype.itemsize:
                return None
            size = math.prod(shape) * dtype.itemsize
            if size != part.size or part.offset:
                return None
            self._accept(part)
            forms[name] = dtype, shape, size
            total += size
        if not 0 < total == payload_bytes or self._held + total > self._most:
            return None
        whole = torch.empty(-(-total // WIDEST) * WIDEST, dtype=torch.uint8)
        views = {dtype: whole.view(dtype) for dtype in {form[0] for form in forms.values()}}
        begin, arrays = 0, dict[str, torch.Tensor]()
        try:
            for name, (dtype, shape, size) in forms.items():
                # one call for each array: many tables have many
                strides = [1] if len(shape) == 1 else _strides(shape)
                arrays[name] = views[dtype].as_strided(shape, strides, begin // dtype.itemsize)
                begin += size
        except (RuntimeError, TypeError):  # no tensor has such a shape
            return None
        self._arrays.update(arrays)
        self._received.update(dict.fromkeys(arrays, 0))
        self._held += total
        return frames.buffer_of(whole)[:total]

    def _accept(self, part: Part) -> None:
        """Returns if there may be an array of a part's name and form."""
        if part.name not in self._known:
            if not self._has(part.name):
                raise Unprepared(f"{part.name!r} belongs to no table of this lane")
            self._known.add(part.name)

    def _destination(self, part: Part) -> torch.Tensor:
        self._accept(part)
        if part.name not in self._arrays:
            size = self._held + frames.whole_bytes(part)
            if size > self._most:
                raise Refused(
                    f"expected a request of up to {self._most} bytes (--max-memory), got {size} "
                    f"with {part.name!r}"
                )
            self._arrays[part.name], self._held = frames.blank(part), size
            self._received[part.name] = 0
        if part.offset != self._received[part.name]:
            begin = self._received[part.name]
            raise CorruptFrame(
                f"{part.name!r}: expected bytes from {begin} on, got them from {part.offset}"
            )
        return self._arrays[part.name]

    def take_out(self) -> dict[str, torch.Tensor]:
        """All arrays, by name.  The next request may begin.

        Raises:
            CorruptFrame: one is not whole.
        """
        arrays, received = self._arrays, self._received
        self._arrays, self._received, self._held = {}, {}, 0
        for name, array in arrays.items():
            if received[name] != array.nbytes:
                raise CorruptFrame(
                    f"expected {array.nbytes} bytes of {name!r}, got {received[name]}"
                )
        return arrays


def _strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return strides


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
        whole, shorter = frames.DTYPES[table.computes_in], frames.DTYPES[table.gradients_in]
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


# ---- assignment ----
#
# What a script has written into variables, as it travels with a step: whole slices, or single
# elements.  Pure bookkeeping.
#
# A stream that is opened again has an assembler of its own.


ELEMENTS, VALUES = "@elements", "@values"


@dataclass(frozen=True, slots=True)
class Assignment:
    """New values of a slice, or of some of its elements.

    Attributes:
        values: of the slice's dtype: in its shape, or [n], one for each of ``elements``.
        elements: int64 [n], ascending: positions in the flat slice; None: ``values`` are all.
    """

    values: Tensor
    elements: Tensor | None = None

    def write(self, variable: Tensor) -> None:
        """Writes the values into a slice, contiguous and in main memory."""
        if self.elements is None:
            variable.copy_(self.values)
        else:
            variable.view(-1)[self.elements] = self.values

    def applied_to(self, variable: Tensor) -> Tensor:
        """A copy of a slice, with the values in it."""
        if self.elements is None:
            return self.values
        copy = variable.clone()
        self.write(copy)
        return copy

    def followed_by(self, later: Assignment) -> Assignment:
        """Both assignments of one slice as one; where they meet the later one counts."""
        if later.elements is None:
            return later
        if self.elements is None:
            return Assignment(later.applied_to(self.values))
        stays = ~torch.isin(self.elements, later.elements)
        elements, order = torch.cat([self.elements[stays], later.elements]).sort()
        return Assignment(torch.cat([self.values[stays], later.values])[order], elements)

    def parts(self, name: str) -> list[tuple[str, Tensor]]:
        """The named arrays that it travels as.

        Args:
            name: of the slice.
        """
        if self.elements is None:
            return [(name, self.values)]
        return [(name + ELEMENTS, self.elements), (name + VALUES, self.values)]


def checksum(tensor: Tensor) -> int:
    """BLAKE2b of a contiguous CPU tensor's bytes, 8 bytes long, as a number.

    Example:
        >>> checksum(torch.zeros(2)) == checksum(torch.zeros(2, dtype=torch.int32))
        True
    """
    digest = hashlib.blake2b(frames.buffer_of(tensor), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def whole_values(names: Iterable[str], assigned: Mapping[str, Assignment]) -> dict[str, Tensor]:
    """The values of slices that a step must assign whole, by name.

    Raises:
        CorruptFrame: one of them is missing, wholly or in part.
    """
    for name in names:
        if name not in assigned or assigned[name].elements is not None:
            raise CorruptFrame(f"expected values of the whole buffer {name!r}")
    return {name: assigned[name].values for name in names}


class AssignmentAssembler(ArrayAssembler):
    """The assignments of the step that arrives over one stream.  One thread uses it.

    Args:
        variables: what may be assigned: the memory of each slice, by its name.
    """

    def __init__(self, variables: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._variables = variables
        self._step = 0  # the step that the arrays belong to

    def take_in(self, header: Frame, payload: Buffer) -> None:
        """Copies a frame's parts into their arrays.

        Raises:
            Unprepared: a part is of no slice that may be assigned here.
            CorruptFrame: a part does not fit its slice, is out of order, or is of another step
                than those before it.
        """
        if self._arrays and header.step != self._step:
            raise CorruptFrame(
                f"assignments of step {header.step} among those of step {self._step}, which is "
                "not committed"
            )
        self._step = header.step
        super().take_in(header, payload)

    def _accept(self, part: Part) -> None:
        dtype, shape = self._expected(part)
        if frames.DTYPES.get(part.dtype) is not dtype or tuple(part.shape) != shape:
            raise CorruptFrame(
                f"{part.name!r}: expected {frames.NAMES[dtype]} {list(shape)}, got {part.dtype!r} "
                f"{list(part.shape)}"
            )

    def _expected(self, part: Part) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape that a part must have."""
        if part.name in self._variables:
            whole = self._variables[part.name]
            return whole.dtype, tuple(whole.shape)
        for ending in (ELEMENTS, VALUES):
            name = part.name.removesuffix(ending)
            if name != part.name and name in self._variables:
                variable = self._variables[name]
                # no more than the slice has: a stranger's number allocates nothing
                count = min(part.shape[0] if len(part.shape) == 1 else 0, variable.numel())
                return torch.int64 if ending == ELEMENTS else variable.dtype, (count,)
        raise Unprepared(f"{part.name!r} cannot be assigned in this lane of this server")

    def assignments(self, step: int) -> dict[str, Assignment]:
        """The step's assignments, by slice.  The next step may begin.

        Raises:
            CorruptFrame: one is not whole, is there in two ways, or names an element twice or one
                that its slice does not have; or they are of another step.
        """
        arrays = self.take_out()
        if arrays and step != self._step:
            raise CorruptFrame(f"assignments of step {self._step} before the commit of step {step}")
        found: dict[str, Assignment] = {}
        for name in sorted({_slice(name, self._variables) for name in arrays}):
            whole, elements, values = (
                arrays.get(name + ending) for ending in ("", ELEMENTS, VALUES)
            )
            if whole is not None and elements is None and values is None:
                found[name] = Assignment(whole)
            elif whole is None and elements is not None and values is not None:
                _check_elements(name, elements, values, self._variables[name].numel())
                found[name] = Assignment(values, elements)
            else:
                raise CorruptFrame(f"{name!r}: expected the whole slice, or elements with values")
        return found


def _slice(name: str, variables: Mapping[str, Tensor]) -> str:
    """The slice that an array is of."""
    return name if name in variables else name.removesuffix(ELEMENTS).removesuffix(VALUES)


def _check_elements(name: str, elements: Tensor, values: Tensor, count: int) -> None:
    if len(elements) != len(values):
        raise CorruptFrame(
            f"{name!r}: expected a value for each of {len(elements)} elements, got {len(values)}"
        )
    if len(elements) and not (
        0 <= int(elements[0]) and int(elements[-1]) < count and bool((elements.diff() > 0).all())
    ):
        raise CorruptFrame(f"{name!r}: expected ascending elements from 0 to {count - 1}")


# ---- push norms ----
#
# How large what a step brings of one parameter or table is; and what of it is far too large.


MOST_ROWS = 8  # ids of a table's largest rows that travel
NAMED = 3  # outliers that a message names


def l2_norm(tensor: torch.Tensor) -> float:
    """The root of the sum of squares.

    Args:
        tensor: floats of 16 to 64 bits, of any shape, in main memory.

    Returns:
        NaN or an infinity where an element is.

    Example:
        >>> l2_norm(torch.tensor([3.0, 4.0])), l2_norm(torch.tensor([3e30, 4e30]))
        (5.0, 5e+30)
    """
    norm = float(torch.linalg.vector_norm(tensor, dtype=_summed(tensor)))
    if math.isfinite(norm):
        return norm
    wide = tensor.double()
    largest = float(wide.abs().max())
    if not math.isfinite(largest):
        return largest
    return min(largest * float(torch.linalg.vector_norm(wide / largest)), sys.float_info.max)


def _summed(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which squares are summed.  See [Note: norms of 32 bits]."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class PushNorm:
    """The norm of a step's push of one parameter or table.

    Attributes:
        norm: L2 of a parameter's gradient (or change); of a table the root mean square of the L2
            norms of its rows, so that a step of more rows is no larger.
        rows: the ids of the largest rows, the largest first.
    """

    norm: float
    rows: tuple[int, ...] = ()

    @classmethod
    def of_rows(cls, ids: torch.Tensor, rows: torch.Tensor) -> PushNorm:
        """The norm of a table's push.

        Args:
            ids: int64 [u].
            rows: [u, dim].

        Example:
            >>> PushNorm.of_rows(torch.tensor([7, 8]), torch.tensor([[1.0], [7.0]]))
            PushNorm(norm=5.0, rows=(8, 7))
        """
        if not len(ids):
            return cls(0.0)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=_summed(rows))
        if not bool(norms.isfinite().all()):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        largest = ids[norms.topk(min(MOST_ROWS, len(ids))).indices]
        return cls(l2_norm(norms) / math.sqrt(len(ids)), tuple(largest.tolist()))

    def scaled(self, factor: float) -> PushNorm:
        """The same for a push that is so many times as large."""
        return PushNorm(self.norm * factor, self.rows)


@dataclass(frozen=True, slots=True)
class OutlierPush:
    """A norm in a trainer's step that is far beyond the history of this trainer and variable.

    Attributes:
        trainer, step: the trainer, and the step's number in the lane.
        variable: the parameter or table.
        norm: of the push.
        history: the expected norm.
    """

    trainer: int
    step: int
    variable: str
    norm: PushNorm
    history: float

    @property
    def found(self) -> str:
        """Norm, history and rows in words."""
        times = self.norm.norm / self.history
        text = f"the norm {self.norm.norm:.3g} of {self.variable!r}, {times:.3g} times its "
        text += f"history of {self.history:.3g}"
        return text + (f" (rows {', '.join(map(str, self.norm.rows))})" if self.norm.rows else "")


def listed(outliers: Collection[OutlierPush]) -> str:
    """The outliers of a step, the first few."""
    named = " and ".join(each.found for each in list(outliers)[:NAMED])
    more = len(outliers) - NAMED
    return named + (f" and {more} more" if more > 0 else "")


def described(outliers: Sequence[OutlierPush]) -> str:
    """The outliers of one trainer's step, at least one: ``step 3 of trainer 1 brings ...``."""
    first = outliers[0]
    return f"step {first.step} of trainer {first.trainer} brings {listed(outliers)}"
