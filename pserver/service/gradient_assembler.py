"""Assembles the gradients of one step from the parts that arrive over one stream, compressed or
not.  Pure bookkeeping.

Buffers are kept from step to step, so that their pages stay mapped.  A stream that is opened again
has buffers of its own.  Where the stream can, large buffers are shared with the trainer, which
copies its gradients there: see [Note: free zones] in pserver/transport/zones.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from pserver.dense.compression import decode, layout, selected_layout
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import CorruptFrame, Unprepared
from pserver.finite import is_finite
from pserver.transport import frames
from pserver.transport.memory import ZONE_BYTES, Segment
from pserver.transport.stream import Offer
from pserver.wire_pb2 import Frame, Kind, Part

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Group:
    """Small tensors of one dtype that one frame brings, and that lie in one memory: they are read
    and looked at as one.

    Attributes:
        frame: with the parts that bring them.
        memory: theirs, in the order of the parts.
        sizes: bytes, by name on the wire.
    """

    frame: Frame
    memory: torch.Tensor
    sizes: Mapping[str, int]


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
        selected = {
            name: selected_layout(name, update.value, update.compression)
            for name, update in updates.items()
        }
        # the same for those of few elements, which come in the place of the others
        self._selected = {name: tuple(tensors) for name, tensors in selected.items() if tensors}
        # name on the wire -> dtype and the most elements
        self._sizes = {n: form for tensors in selected.values() for n, form in tensors.items()}
        # name on the wire -> dtype and shape
        self._layout = {
            name: form for tensors in layouts.values() for name, form in tensors.items()
        }
        self._buffers: dict[str, torch.Tensor] = {}  # by name on the wire
        self._groups: dict[str, _Group] = {}  # by the first tensor's name on the wire
        self._grouped: set[str] = set()  # names on the wire
        self._gradients: dict[str, torch.Tensor] = {}  # decompressed, by slice
        self._received: dict[str, int] = {}  # bytes, by name on the wire
        self._odd: set[str] = set()  # names on the wire: a value is not finite
        self._step = 0  # the step that those belong to
        self._segment: Segment | None = None  # that the trainer may write to

    def share(self, offer: Offer | None) -> None:
        """Lets the trainer write large gradients to their buffers, where the stream and the system
        can.

        Args:
            offer: the stream's.

        Raises:
            Unreachable: the peer is gone.
        """
        sizes = {
            name: size
            for name, (dtype, shape) in self._layout.items()
            if (size := dtype.itemsize * torch.Size(shape).numel()) >= ZONE_BYTES
        }
        if offer is None or not sizes:
            return
        try:
            self._segment = Segment(sizes)
        except OSError as error:
            log.warning("gradients take the longer way: %s", error)
            return
        for name in sizes:
            self._buffers[name] = self._segment.tensor(name, *self._layout[name])
        offer(Kind.GRADIENT, self._segment)

    def free(self) -> None:
        """Nothing reads the last step's gradients any more."""
        if self._segment is not None:
            self._segment.counts += 1

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
            CorruptFrame: it has a shape that none of its slice has.
        """
        if part.name in self._sizes:
            return self._selected_destination(part)
        if part.name not in self._layout:
            raise Unprepared(
                f"slice {part.name!r} is not updated in this lane of this server: a gradient for "
                "it belongs elsewhere"
            )
        if part.name not in self._buffers:
            dtype, shape = self._layout[part.name]
            self._buffers[part.name] = torch.empty(shape, dtype=dtype)
        return self._buffers[part.name]

    def _selected_destination(self, part: Part) -> torch.Tensor:
        """The same for a tensor that has another size in every step."""
        (dtype, most), shape = self._sizes[part.name], tuple(part.shape)
        buffer = self._buffers.get(part.name)
        if buffer is not None and shape == tuple(buffer.shape):
            return buffer
        if len(shape) != 1 or shape[0] > most or part.name in self._received:
            expected = f"up to {most}" if part.name not in self._received else "as many as before"
            raise CorruptFrame(
                f"gradient of {part.name!r}: expected one dimension of {expected} elements, got "
                f"shape {list(shape)}"
            )
        self._buffers[part.name] = torch.empty(shape, dtype=dtype)
        return self._buffers[part.name]

    def land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """Where a frame's payload goes before it has been read; None where it is out of place."""
        if self._received and header.step != self._step:
            return None
        group = self._group(header)
        if group is not None and group.memory.nbytes == payload_bytes:
            return [frames.buffer_of(group.memory)]
        return frames.land(header, payload_bytes, self.destination)

    def received(self, header: Frame) -> None:
        """Counts a frame's parts, which have been copied to their destinations, and looks whether
        they are finite, while they are in the cache.

        Raises:
            CorruptFrame: a part does not begin where the one before it ended.
        """
        group = self._group(header)
        if group is not None and self._received.keys().isdisjoint(group.sizes):
            self._received.update(group.sizes)
            if is_finite(group.memory):
                return
        else:
            self._count(header)
        for part in header.parts:
            buffer = self._buffers[part.name]
            # an element that two parts share is looked at with the second one
            first, last = (
                part.offset // buffer.itemsize,
                (part.offset + part.size) // buffer.itemsize,
            )
            if not is_finite(buffer.view(-1)[first:last]):
                self._odd.add(part.name)
        if group is None:
            self._make_group(header)

    def _count(self, header: Frame) -> None:
        for part in header.parts:
            begin = self._received.get(part.name, 0)
            if part.offset != begin:
                raise CorruptFrame(
                    f"gradient of {part.name!r}: expected bytes from {begin} on, got them from "
                    f"{part.offset}"
                )
            self._received[part.name] = begin + part.size

    # ---- small tensors that come together ----

    def _group(self, header: Frame) -> _Group | None:
        """The group of the tensors that a frame brings, if it brings just those."""
        group = self._groups.get(header.parts[0].name) if len(header.parts) > 1 else None
        return group if group is not None and group.frame.parts == header.parts else None

    def _make_group(self, header: Frame) -> None:
        """Gives tensors that came together, whole, one memory, where no other group has one of
        them.
        """
        names = [part.name for part in header.parts]
        buffers = [self._buffers[name] for name in names]
        whole = all(p.size == b.nbytes for p, b in zip(header.parts, buffers, strict=True))
        whole = whole and self._sizes.keys().isdisjoint(names)  # those have a size of their own
        one_dtype = len({buffer.dtype for buffer in buffers}) == 1
        if len(names) < 2 or not whole or not one_dtype or not self._grouped.isdisjoint(names):
            return
        memory = torch.cat([buffer.view(-1) for buffer in buffers])
        pieces = memory.split([each.numel() for each in buffers])  # type: ignore[no-untyped-call]  # torch's
        for name, buffer, piece in zip(names, buffers, pieces, strict=True):
            self._buffers[name] = piece.view(buffer.shape)
        self._grouped.update(names)
        sizes = {part.name: part.size for part in header.parts}
        self._groups[names[0]] = _Group(Frame(parts=header.parts), memory, sizes)

    # ---- the whole step ----

    def nonfinite(self) -> set[str]:
        """The slices in whose gradients, of the step that arrives, a value is not finite."""
        return {
            name
            for name, parts in self._parts.items()
            if not self._odd.isdisjoint((*parts, *self._selected.get(name, ())))
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
            name: self._decoded(name, parts)
            for name in self._updates
            if self._has_arrived(name, parts := self._form(name), step, name in absent)
        }
        self._received, self._odd = {}, set()
        return gradients

    def _form(self, name: str) -> tuple[str, ...]:
        """The tensors that a slice's gradient has come as, by their names on the wire.

        Raises:
            CorruptFrame: it has come in two forms.
        """
        selected = self._selected.get(name, ())
        if self._received.keys().isdisjoint(selected):
            return self._parts[name]
        if not self._received.keys().isdisjoint(self._parts[name]):
            raise CorruptFrame(
                f"gradient of {name!r}: expected it whole or its elements that are not 0, got both"
            )
        return selected

    def _has_arrived(self, name: str, parts: tuple[str, ...], step: int, absent: bool) -> bool:
        for part in parts:
            got = self._received.get(part)
            if absent and got is None:
                continue
            expected = self._bytes(part)
            if got != expected or absent or (self._step != step and self._received):
                raise CorruptFrame(
                    f"step {step}: expected {expected} bytes of the gradient of {part!r}, got "
                    f"{got or 0}"
                )
        return not absent

    def _bytes(self, part: str) -> int:
        if part in self._sizes:
            return self._buffers[part].nbytes if part in self._buffers else 0
        dtype, shape = self._layout[part]
        return dtype.itemsize * torch.Size(shape).numel()

    def _decoded(self, name: str, parts: tuple[str, ...]) -> torch.Tensor:
        update = self._updates[name]
        if not update.compression or (name in self._selected and parts == (name,)):
            return self._buffers[name]
        if name not in self._gradients:
            self._gradients[name] = torch.empty_like(update.value)
        came = {part: self._buffers[part] for part in parts}
        return decode(name, came, update.compression, self._gradients[name])
