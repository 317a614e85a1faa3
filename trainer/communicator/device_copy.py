"""Copies between a GPU and pinned main memory, on a CUDA stream of their own, which run while the
GPU computes.

[Note: what waits for what]

::

    to_host    the side stream waits for what the gradient's stream has been given, and copies.
               The host waits for the copy's event before it reads the buffer.  The gradient's
               memory is kept for the copy when the script lets go of the gradient
               (``record_stream``).  Where the script may write to the gradient, ``join`` makes the
               script's stream wait for the copies.
    to_device  the side stream waits for the script's stream, which may still read the parameter,
               and copies; the script's stream waits for the copy.  The host waits for the copy's
               event before it writes to the buffer again.

This was written where there is no GPU, and has not run on one yet.  Its tests on a GPU are in
tests/trainer/communicator/test_gpu.py and test_device_copies.py (marked ``gpu``).  The same order
of events is tested in the latter without one, with copies that are made when they are waited for.
"""

from __future__ import annotations

from typing import Protocol

import torch


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
    """Main memory that a GPU copies from and to by itself, with anything in it."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


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

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        """Begins to copy from pinned memory to the device; what the script's stream is given from
        now on sees the new values.
        """
        event = self._copy(source, target)
        self.join()
        return event

    def join(self) -> None:
        """Makes the script's stream wait for all copies that have begun."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            event.record(self.stream)
        return event
