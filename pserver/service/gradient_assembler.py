"""Assembles the gradients of one step from the parts that arrive over one stream, compressed or
not.  Pure bookkeeping.

Buffers are kept from step to step, so that their pages stay mapped.  A stream that is opened again
has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pserver.dense.compression import decode, layout
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import CorruptFrame, Unprepared
from pserver.finite import is_finite
from pserver.wire_pb2 import Frame, Part


class GradientAssembler:
    """The gradients of the step that arrives over one stream.  One thread uses it.

    Args:
        updates: the slices whose gradients may arrive, by slice name.
    """

    def __init__(self, updates: Mapping[str, SliceUpdate]) -> None:
        self._updates = updates
        layouts = {
            name: layout(name, update.value, update.compression) for name, update in updates.items()
        }
        # slice -> its tensors' names on the wire
        self._parts = {name: tuple(tensors) for name, tensors in layouts.items()}
        # name on the wire -> dtype and shape
        self._layout = {
            name: form for tensors in layouts.values() for name, form in tensors.items()
        }
        self._buffers: dict[str, torch.Tensor] = {}  # by name on the wire
        self._gradients: dict[str, torch.Tensor] = {}  # decompressed, by slice
        self._received: dict[str, int] = {}  # bytes, by name on the wire
        self._odd: set[str] = set()  # names on the wire: a value is not finite
        self._step = 0  # the step that those belong to

    def begin(self, step: int) -> None:
        """A frame of a step has arrived.

        Raises:
            CorruptFrame: another step is in progress.
        """
        if self._received and step != self._step:
            raise CorruptFrame(
                f"gradients of step {step} among those of step {self._step}, which is not committed"
            )
        self._step = step

    def destination(self, part: Part) -> torch.Tensor:
        """The buffer that a part is copied into, of the whole tensor's dtype and shape.

        Raises:
            Unprepared: no such gradient is expected here.
        """
        if part.name not in self._layout:
            raise Unprepared(
                f"slice {part.name!r} is not updated in this lane of this server: a gradient for "
                "it belongs elsewhere"
            )
        if part.name not in self._buffers:
            dtype, shape = self._layout[part.name]
            self._buffers[part.name] = torch.empty(shape, dtype=dtype)
        return self._buffers[part.name]

    def received(self, header: Frame) -> None:
        """Counts a frame's parts, which have been copied to their destinations, and looks whether
        they are finite, while they are in the cache.

        Raises:
            CorruptFrame: a part does not begin where the one before it ended.
        """
        for part in header.parts:
            begin = self._received.get(part.name, 0)
            if part.offset != begin:
                raise CorruptFrame(
                    f"gradient of {part.name!r}: expected bytes from {begin} on, got them from "
                    f"{part.offset}"
                )
            self._received[part.name] = end = begin + part.size
            buffer = self._buffers[part.name]
            # an element that two parts share is looked at with the second one
            first, last = begin // buffer.itemsize, end // buffer.itemsize
            if not is_finite(buffer.view(-1)[first:last]):
                self._odd.add(part.name)

    def nonfinite(self) -> set[str]:
        """The slices in whose gradients, of the step that arrives, a value is not finite."""
        return {
            name for name, parts in self._parts.items() if any(part in self._odd for part in parts)
        }

    def complete(self, step: int, absent: Collection[str]) -> dict[str, torch.Tensor]:
        """The step's gradients by slice, in their slices' dtypes.  The next step may begin.

        Args:
            absent: the slices without a gradient in this step.

        Raises:
            Unprepared: a slice that is not updated here.
            CorruptFrame: a gradient is not whole, and not named as absent.
        """
        unknown = set(absent) - set(self._updates)
        if unknown:
            raise Unprepared(
                f"slice {min(unknown)!r}, absent in step {step}, is not updated in this lane of "
                "this server"
            )
        gradients = {
            name: self._decoded(name)
            for name in self._updates
            if self._has_arrived(name, step, name in absent)
        }
        self._received, self._odd = {}, set()
        return gradients

    def _has_arrived(self, name: str, step: int, absent: bool) -> bool:
        for part in self._parts[name]:
            dtype, shape = self._layout[part]
            expected, got = dtype.itemsize * torch.Size(shape).numel(), self._received.get(part)
            if absent and got is None:
                continue
            if got != expected or absent or (self._step != step and self._received):
                raise CorruptFrame(
                    f"step {step}: expected {expected} bytes of the gradient of {part!r}, got "
                    f"{got or 0}"
                )
        return not absent

    def _decoded(self, name: str) -> torch.Tensor:
        update = self._updates[name]
        if not update.compression:
            return self._buffers[name]
        if name not in self._gradients:
            self._gradients[name] = torch.empty_like(update.value)
        return decode(name, self._buffers, update.compression, self._gradients[name])
