"""What last landed in the parameters of a lane: what a script has written since then is what
differs from it.

A lane whose values arrive in memory of its own keeps that of the last landing, which costs no time.
A lane whose values arrive in the parameters themselves keeps copies when it is told to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from pserver.transport.arrays import Assignment
from trainer.communicator.parameter_slices import ParameterSlices

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class LandedValues:
    """What last landed in some variables, by slice, in main memory.  The script's thread uses it.

    Args:
        slices: of the lane.

    Attributes:
        slices: as given.
    """

    def __init__(self, slices: ParameterSlices) -> None:
        self.slices = slices
        self._values: dict[str, Tensor] = {}  # by slice
        self._memory: dict[str, Tensor] = {}  # that others made, by slice or by variable

    def holds(self, variables: Iterable[str]) -> bool:
        """Whether it has what last landed in all of these variables."""
        return all(name in self._values for name in self.slices.slices_of(variables))

    def copy(self, variables: Iterable[str]) -> None:
        """Notes the variables' present values."""
        for name in self.slices.slices_of(variables):
            if name not in self._values:
                self._values[name] = self.slices.blank(name)
            self._values[name].copy_(self.slices.read(name))

    def note(self, values: Mapping[str, Tensor]) -> None:
        """Notes what has landed, by slice; the memory stays as it is from now on."""
        self._values.update(values)

    def replace(
        self, values: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Notes values that are landing, without copying them.

        Args:
            values: by slice.
            memory: that they are in, by slice or by variable; it stays as it is from now on.

        Returns:
            Memory of earlier values, by the same names, which is free now; and that of values for
            variables that nothing lands on.
        """
        free: dict[str, Tensor] = {}
        for key, tensor in memory.items():
            if self.slices.variable(key) in self.slices.held_back:
                free[key] = tensor
                continue
            if key in self._memory:
                free[key] = self._memory[key]
            self._memory[key] = tensor
        self._values.update(
            (name, value)
            for name, value in values.items()
            if self.slices.variable(name) not in self.slices.held_back
        )
        return free

    def forget(self) -> None:
        """Keeps nothing from now on."""
        self._values.clear()
        self._memory.clear()

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Writes into what it keeps, by slice: a script's writing is sent once."""
        for name, assignment in assignments.items():
            if name in self._values:
                assignment.write(self._values[name])

    def differences(self, variables: Collection[str]) -> dict[str, Assignment]:
        """What of these variables is not as it last landed, by slice: elements, or all of a slice
        of which more than half differ.
        """
        return {
            name: found
            for name in self.slices.slices_of(variables)
            if (found := difference(self.slices.read(name), self._values[name])) is not None
        }


def difference(now: Tensor, before: Tensor) -> Assignment | None:
    """What of a slice has other bits than before; None: nothing.

    Args:
        now, before: contiguous, in main memory, of one dtype and shape.

    Returns:
        Copies of the elements that differ, or of the whole slice where more than half do.
    """
    integers = _INTEGERS[now.itemsize]
    mine, theirs = (tensor.detach().reshape(-1).view(integers) for tensor in (now, before))
    if torch.equal(mine, theirs):
        return None
    unlike = mine != theirs
    if now.itemsize == 16:
        unlike = unlike.view(-1, 2).any(1)
    elements = unlike.nonzero().view(-1)
    if 2 * len(elements) > now.numel():
        return Assignment(now.detach().clone())
    return Assignment(now.detach().reshape(-1)[elements], elements)
