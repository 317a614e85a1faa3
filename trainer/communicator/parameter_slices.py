"""The slices of one lane as the trainer sees them: parts of live tensors, wherever those are.

[Note: landing]  A parameter that is contiguous main memory receives its slices in place.  One that
is not (on a GPU, or channels-last) receives them in buffers, and ``unload`` copies them to where
they belong when everything has arrived.  Buffers of a parameter on a GPU are pinned, and both ways
are those of :mod:`trainer.communicator.device_copy`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch

from pserver.dense.compression import Compressor
from pserver.transport.codec import DTYPES
from trainer.communicator.device_copy import DeviceCopy, PendingCopy, crosses, pinned
from transpiler.plan.plan import Placement, Slice

LARGE_BYTES = 2**20  # a buffer of its own pages wastes next to nothing of them


def kept_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor, with anything in it, that is kept for long: a large one has pages of its own, which
    go back when it is freed.
    """
    size = dtype.itemsize * torch.Size(shape).numel()
    if size < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype
    ).view(shape)


class ParameterSlices:
    """See the module's docstring.

    Args:
        placements: the variables; ``tensors``: all live tensors by variable name.
    """

    def __init__(self, placements: list[Placement], tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._placements = placements
        self._owners = {
            piece.name: (placement, piece) for placement in placements for piece in placement.slices
        }
        self._split = {placement.name: placement for placement in placements if placement.split}
        self.names = [
            piece.name
            for placement in placements
            if placement.group is not None
            for piece in placement.slices
        ]
        servers = {self._owners[name][1].server for name in self.names}
        self._order = {
            server: [name for name in self.names if self._owners[name][1].server == server]
            for server in servers
        }
        self._compressor = Compressor()
        self._buffers: dict[str, torch.Tensor] = {}  # kept from step to step
        self._landed: set[str] = set()  # slices whose buffer holds something new
        self._crossings: dict[torch.device, DeviceCopy] = {}
        self._unloading: list[PendingCopy] = []  # copies to a GPU that may not have been made yet

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    @property
    def bytes(self) -> int:
        """Of all updated variables."""
        return sum(
            self._tensors[placement.name].nbytes
            for placement in self._placements
            if placement.group is not None
        )

    def order(self, server: int) -> list[str]:
        """The updated slices on a server, in the order of the plan."""
        return self._order.get(server, [])

    def held(self, server: int) -> list[str]:
        """All slices on a server, those that are never updated too."""
        return [name for name, (_, piece) in self._owners.items() if piece.server == server]

    def on(self, server: int) -> set[str]:
        """The same, as a set."""
        return set(self.order(server))

    def server(self, name: str) -> int:
        """Who holds a slice."""
        return self._owners[name][1].server

    def owner(self, name: str) -> tuple[Placement, Slice]:
        """The variable that a slice belongs to, and the slice.

        Raises:
            KeyError: the lane has no such slice.
        """
        return self._owners[name]

    def read(self, name: str) -> torch.Tensor:
        """A slice as contiguous main memory: a view of the live tensor where it is that already."""
        placement, piece = self._owners[name]
        flat = self._tensors[placement.name].detach().contiguous().view(-1)
        return flat[piece.begin : piece.end].to("cpu").view(piece.shape)

    def encoded(self, name: str, gradient: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """A slice's gradient as it travels: its tensors by name on the wire."""
        return self._compressor.encode(name, gradient, self._owners[name][0].compression).items()

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Slices by name, of slices and of whole variables: views of them."""
        slices: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name in self._owners:
                slices[name] = tensor
            else:
                flat = tensor.view(-1)
                slices.update(
                    {p.name: flat[p.begin : p.end].view(p.shape) for p in self._split[name].slices}
                )
        return slices

    def blank(self, name: str) -> torch.Tensor:
        """New main memory for a slice, or for a whole variable."""
        whole = self._split.get(name)
        placement, shape = (
            (whole, whole.shape)
            if whole is not None
            else (self._owners[name][0], self._owners[name][1].shape)
        )
        make = pinned if crosses(self._tensors[placement.name]) else kept_buffer
        return make(shape, DTYPES[placement.dtype])

    def crossing(self, tensor: torch.Tensor) -> DeviceCopy:
        """The way between a tensor's device and main memory."""
        if tensor.device not in self._crossings:
            self._crossings[tensor.device] = DeviceCopy(tensor.device)
        return self._crossings[tensor.device]

    def join(self) -> None:
        """What the script does next on its GPUs happens after the copies that have begun."""
        for crossing in self._crossings.values():
            crossing.join()

    def landing(self, name: str) -> torch.Tensor:
        """Where a slice's value goes.  See [Note: landing]."""
        placement, piece = self._owners[name]
        tensor = self._tensors[placement.name].detach()
        if not crosses(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.view(-1)[piece.begin : piece.end].view(piece.shape)
        if name not in self._buffers:
            self._buffers[name] = self.blank(name)
        while self._unloading:
            self._unloading.pop().synchronize()
        self._landed.add(name)
        return self._buffers[name]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Puts a value where it belongs; ``unload`` follows when all slices have been written."""
        self.landing(name).copy_(value)

    def unload(self) -> None:
        """Copies what has landed in buffers to where it belongs."""
        for placement in self._placements if self._landed else ():
            if placement.slices[0].name in self._landed:
                self._unload(placement)
        self._landed.clear()

    def _unload(self, placement: Placement) -> None:
        tensor = self._tensors[placement.name].detach()
        parts = {piece: self._buffers[piece.name].view(-1) for piece in placement.slices}
        if crosses(tensor) and tensor.is_contiguous():
            flat, way = tensor.view(-1), self.crossing(tensor)
            self._unloading += [
                way.back(part, flat[piece.begin : piece.end]) for piece, part in parts.items()
            ]
        else:
            tensor.copy_(torch.cat(list(parts.values())).view(placement.shape))
