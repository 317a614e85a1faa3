"""Some elements of each of many tensors, always the same ones: has anything been written?

A tensor counts the operations that write to it; writes through ``.data`` and through numpy are in
no counter.  Reading every tensor whole takes too long for every step, so 1,024 of its elements are
read, in places that look random and stay.  A tensor of fewer elements is read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLED = 1024  # elements of a tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class _OnHost:
    """The sampled elements of one tensor in main memory.

    Attributes:
        pointer, strides: of the memory that is read.
    """

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        self.pointer, self.strides = tensor.data_ptr(), tensor.stride()
        self._memory = _memory(tensor).numpy()
        self._offsets = _offsets(tensor, positions)
        self._now, self._noted = (np.empty(len(positions), self._memory.dtype) for _ in range(2))

    def note(self) -> None:
        """Notes them as they are now."""
        self._memory.take(self._offsets, out=self._noted, mode="clip")  # which copies once

    def changed(self) -> bool:
        """Whether one is another than was noted."""
        self._memory.take(self._offsets, out=self._now, mode="clip")
        return not (self._now == self._noted).all()


class _OnDevice:
    """The sampled elements of one tensor on a device; as of :class:`_OnHost`."""

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        self.pointer, self.strides = tensor.data_ptr(), tensor.stride()
        self._memory = _memory(tensor)
        self._offsets = torch.from_numpy(_offsets(tensor, positions)).to(tensor.device)
        self._noted = self._memory.new_empty(len(positions))

    def note(self) -> None:
        """Notes them as they are now."""
        torch.take(self._memory, self._offsets, out=self._noted)

    def changed(self) -> bool:
        """Whether one is another than was noted; the host waits for the device."""
        return not torch.equal(torch.take(self._memory, self._offsets), self._noted)


class Samples:
    """The sampled elements of some live tensors, as they were noted last.  One thread uses it.

    Args:
        tensors: any devices, dtypes and strides; their memory may be exchanged.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._positions = [_positions(t.numel(), seed) for seed, t in enumerate(self._tensors)]
        self._sampled = [self._bound(number) for number in range(len(self._tensors))]

    def note(self, numbers: Iterable[int]) -> None:
        """Notes these tensors' elements as they are now.

        Args:
            numbers: of the tensors, in their order.
        """
        for number in numbers:
            if self._has_moved(number):
                self._sampled[number] = self._bound(number)
            self._sampled[number].note()

    def changed(self, numbers: Iterable[int]) -> list[int]:
        """Those of the tensors of which an element is another one than was noted, or whose memory
        has been exchanged.
        """
        return [n for n in numbers if self._has_moved(n) or self._sampled[n].changed()]

    def _has_moved(self, number: int) -> bool:
        sampled, tensor = self._sampled[number], self._tensors[number]
        return tensor.data_ptr() != sampled.pointer or tensor.stride() != sampled.strides

    def _bound(self, number: int) -> _OnHost | _OnDevice:
        tensor, positions = self._tensors[number].detach(), self._positions[number]
        return (_OnHost if tensor.device.type == "cpu" else _OnDevice)(tensor, positions)


def _positions(count: int, seed: int) -> np.ndarray:
    """Ascending positions of the sampled elements in a tensor of so many: int64 [n]."""
    if count <= SAMPLED:
        return np.arange(count)
    # one in each of 1,024 equal parts, at a place that looks random
    bounds = np.linspace(0, count, SAMPLED + 1).astype(np.int64)
    return np.asarray(np.random.default_rng(seed).integers(bounds[:-1], bounds[1:]))


def _memory(tensor: Tensor) -> Tensor:
    """A tensor's memory as integers, 1-D: from its first element to its last, whatever lies
    between; shared, not copied.
    """
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(_INTEGERS[tensor.itemsize])


def _offsets(tensor: Tensor, positions: np.ndarray) -> np.ndarray:
    """Where the elements at these positions lie in :func:`_memory`; of an element of 16 bytes its
    first half and its second one in turn.
    """
    offsets = np.zeros(len(positions), np.int64)
    left = positions
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offsets += left % extent * stride
        left = left // extent
    return offsets * 2 + np.arange(len(offsets)) % 2 if tensor.itemsize == 16 else offsets
