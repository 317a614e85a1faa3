"""What a script has written into variables, as it travels with a step: whole slices, or single
elements.  Pure bookkeeping.

A stream that is opened again has an assembler of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pserver.errors import CorruptFrame, Unprepared
from pserver.transport import codec
from pserver.transport.array_assembler import ArrayAssembler
from pserver.transport.stream import Buffer
from pserver.wire_pb2 import Frame, Part

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

    def written(self, variable: Tensor) -> Tensor:
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
            return Assignment(later.written(self.values))
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
    digest = hashlib.blake2b(codec.buffer_of(tensor), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def whole_values(names: Iterable[str], assigned: Mapping[str, Assignment]) -> dict[str, Tensor]:
    """The values of slices that a step must assign whole, by name.

    Raises:
        CorruptFrame: one of them is not there, or in part.
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

    def _destination(self, part: Part) -> Tensor:
        dtype, shape = self._expected(part)
        if codec.DTYPES.get(part.dtype) is not dtype or tuple(part.shape) != shape:
            raise CorruptFrame(
                f"{part.name!r}: expected {codec.NAMES[dtype]} {list(shape)}, got {part.dtype!r} "
                f"{list(part.shape)}"
            )
        return super()._destination(part)

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
