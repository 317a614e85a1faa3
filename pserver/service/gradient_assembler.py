"""The gradients of one step as they arrive over one stream: part by part, compressed or not, whole
or refused.  Pure bookkeeping.

Buffers are kept from step to step, so that their pages stay mapped; a stream that is opened again
has others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pserver.dense.compression import decode, layout
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import CorruptFrame, Unprepared
from pserver.wire_pb2 import Frame, Part


class GradientAssembler:
    """See the module's docstring.

    Args:
        entries: the slices whose gradients may come, by name.
    """

    def __init__(self, entries: Mapping[str, SliceUpdate]) -> None:
        self._entries = entries
        travels = {
            name: layout(name, entry.value, entry.compression) for name, entry in entries.items()
        }
        # slice -> its tensors' names on the wire
        self._parts = {name: tuple(tensors) for name, tensors in travels.items()}
        self._layout = {
            name: form for tensors in travels.values() for name, form in tensors.items()
        }
        self._buffers: dict[str, torch.Tensor] = {}  # by name on the wire
        self._gradients: dict[str, torch.Tensor] = {}  # decoded, by slice
        self._received: dict[str, int] = {}  # bytes, by name on the wire
        self._step = 0  # that those belong to

    def begin(self, step: int) -> None:
        """A frame of a step has come.

        Raises:
            CorruptFrame: another step is under way.
        """
        if self._received and step != self._step:
            raise CorruptFrame(
                f"gradients of step {step} among those of step {self._step}, which is not committed"
            )
        self._step = step

    def destination(self, part: Part) -> torch.Tensor:
        """Where a part goes.

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

    def note(self, header: Frame) -> None:
        """A frame's parts have been copied to their places.

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
            self._received[part.name] = begin + part.size

    def complete(self, step: int, absent: Collection[str]) -> dict[str, torch.Tensor]:
        """The step's gradients by slice, in their slices' dtypes; the next step may begin.

        Args:
            absent: the slices that have none in this step.

        Raises:
            Unprepared: a slice that is not updated here.
            CorruptFrame: a gradient is not whole, and not said to be absent.
        """
        unknown = set(absent) - set(self._entries)
        if unknown:
            raise Unprepared(
                f"slice {min(unknown)!r}, absent in step {step}, is not updated in this lane of "
                "this server"
            )
        gradients = {
            name: self._decoded(name)
            for name, entry in self._entries.items()
            if self._has_arrived(name, entry, step, name in absent)
        }
        self._received = {}
        return gradients

    def _has_arrived(self, name: str, entry: SliceUpdate, step: int, absent: bool) -> bool:
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
        entry = self._entries[name]
        if not entry.compression:
            return self._buffers[name]
        if name not in self._gradients:
            self._gradients[name] = torch.empty_like(entry.value)
        return decode(name, self._buffers, entry.compression, self._gradients[name])
