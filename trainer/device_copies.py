"""Copies between a GPU and pinned main memory, on a CUDA stream of their own, while it computes.

[Note: what waits for what]

::

    to_host    the side stream waits for what the gradient's stream has been given, and copies.
               The host waits for the copy's event before it reads the buffer.  The gradient's
               memory is kept for the copy when the script lets go of the gradient
               (``record_stream``).  Where the script may write to the gradient, ``join`` makes the
               script's stream wait for the copies.
    to_device  the side stream waits for the script's stream, which may still read the parameter,
               and copies; the script's stream waits for the copy.  The host waits for the copy's
               event before it writes to the buffer again; a copy to the host that goes there is
               behind it on the same stream.  Where a flag on the device says that the script has
               written, nothing is copied.
    fresh      the side stream copies at once into memory that nobody has yet; the script's stream
               waits for the copy.  The host waits for nothing: torch keeps a pinned buffer that is
               let go of until the copies out of it have been made.

This was written on a machine without a GPU, and has not run on a GPU yet.  Its tests on a GPU are
in tests/trainer/communicator/test_gpu.py, test_device_copies.py, test_kstep_devices.py and
tests/trainer/embedding (marked ``gpu``).  The last three also test the same order of events without
a GPU, with copies that are made when they are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

GPUS = ("cuda",)  # types of devices with pinned memory and streams
ALIGNMENT = 16  # bytes, of a tensor in a block: a multiple of the widest element's


class PendingCopy(Protocol):
    """A copy that has begun: a ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Waits, on the host, until the copy has been made."""

    def query(self) -> bool:
        """Whether it has been made."""


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return tensor.is_cuda


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized pinned memory, which a GPU copies from and to by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized pinned memory of a tensor's shape and dtype."""
    return pinned(tuple(tensor.shape), tensor.dtype)


class DeviceCopy:
    """The side stream of one GPU, on which copies from and to pinned memory run.

    See [Note: what waits for what].

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        """Begins to copy from the device to pinned memory."""
        source.record_stream(self.stream)
        return self._copy(source, target)

    def to_device(
        self, source: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
    ) -> PendingCopy:
        """Begins to copy from pinned memory to the device; later work on the script's stream sees
        the new values.

        Args:
            unless: bool [], on the device: where it holds, nothing is copied.
        """
        event = self._copy(source, target, unless)
        self.join()
        return event

    def fresh(self, source: torch.Tensor) -> torch.Tensor:
        """A new tensor on the device, of the pinned ``source``, for later work on the script's
        stream; it is copied beside what that stream has been given so far.
        """
        with torch.cuda.stream(self.stream):
            made = source.to(self.device, non_blocking=True)
        self.join()
        made.record_stream(torch.cuda.current_stream(self.device))
        return made

    def join(self) -> None:
        """Makes the script's stream wait for all copies that have begun."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
    ) -> PendingCopy:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if unless is None:
                target.copy_(source, non_blocking=True)
            else:
                arrived = torch.empty_like(target).copy_(source, non_blocking=True)
                target.copy_(torch.where(unless, target, arrived))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            event.record(self.stream)
        return event


@cache
def copies_of(device: torch.device) -> DeviceCopy:
    """The side stream on which the ids and the rows of tables cross."""
    return DeviceCopy(device)


class Leaving:
    """Tensors of one GPU on their way to pinned memory; the host waits where it needs them.

    Args:
        tensors: at least one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        way = copies_of(tensors[0].device)
        self._arrived = [pinned_like(tensor) for tensor in tensors]
        pairs = zip(tensors, self._arrived, strict=True)
        self._copies = [way.to_host(tensor, target) for tensor, target in pairs]

    def wait(self) -> list[torch.Tensor]:
        """Waits until all have been copied, and returns them."""
        for copy in self._copies:
            copy.synchronize()
        return self._arrived


def on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of contiguous tensors of main memory on a device.  To a GPU they cross together, and
    the host waits for nothing.
    """
    if device.type not in GPUS:
        return [tensor.to(device) for tensor in tensors]
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    block = pinned((end,), torch.uint8)
    for tensor, begin in zip(tensors, begins, strict=True):
        _part(block, begin, tensor).copy_(tensor)
    there = copies_of(device).fresh(block)
    return [_part(there, begin, each) for each, begin in zip(tensors, begins, strict=True)]


def _part(block: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """The part of a block of bytes that holds a tensor."""
    return block[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
