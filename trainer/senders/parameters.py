"""The slices of one lane as the trainer sees them: parts of live tensors, on any device.

[Note: destinations]  A parameter in contiguous main memory receives its slices in place.  Other
parameters (on a GPU, or channels-last) receive them in buffers, and ``flush_buffers`` copies them
into the parameter when everything has arrived.  Buffers of a parameter on a GPU are pinned, and are
copied both ways on a side stream.  Values for a parameter that is held back, because of an external
write, are received into a buffer and dropped.
"""

from __future__ import annotations

import logging
import math
import mmap
import zlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from pserver.client.replies import Reply
from pserver.dense.compression import Compressor
from pserver.transport.arrays import Assignment
from pserver.transport.frames import DTYPES, buffer_of
from trainer.device_copies import DeviceCopy, PendingCopy, is_on_gpu, pinned
from transpiler.plan.plan import Placement, Slice

# ---- initial values ----
#
# A trainer's own initial values, before the job's replace them: if the two differ, one warning says
# so.


log = logging.getLogger(__name__)


class InitialValues:
    """Checksums of a trainer's own values, taken before the servers' replace them.

    Args:
        names: the variables that the servers hold.
        tensors: the live tensors of all variables, by name, on any device.
    """

    def __init__(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = {name: _checksum(tensors[name]) for name in names}

    def warn(self, trainer_id: int) -> None:
        """Warns, in one line, if the received values differ; names the first such variable."""
        other = [
            name
            for name, before in self._before.items()
            if _checksum(self._tensors[name]) != before
        ]
        if other:
            log.warning(
                "trainer %d: %d of %d variables had another initial value than the job's, first "
                "%r; they have the job's now",
                *(trainer_id, len(other), len(self._before), other[0]),
            )


def take_over(
    placements: Iterable[Placement],
    tensors: Mapping[str, torch.Tensor],
    pull: Callable[[], Reply],
    trainer_id: int,
) -> None:
    """Receives the job's values; warns once if the trainer's own differed.

    Args:
        placements: the variables to compare; none if this trainer's values are the job's.
        tensors: the live tensors of all variables, by name.
        pull: receives the job's values.
    """
    own = InitialValues((placement.name for placement in placements), tensors)
    # at a later version the job's values have moved, and differ from every initial value
    if pull().version == 0:
        own.warn(trainer_id)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(buffer_of(tensor.detach().to("cpu").contiguous()))


# ---- parameter slices ----


LARGE_BYTES = 2**20  # larger buffers have pages of their own, and waste few of them


def kept_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor that is kept for long.

    A large tensor has pages of its own, which return to the system when it is freed.
    """
    size = dtype.itemsize * torch.Size(shape).numel()
    if size < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype
    ).view(shape)


@dataclass(slots=True)
class ScriptWrites:
    """The state of a script's external writes, in all lanes.  See [Note: what a script writes]
    in writes.py.

    Attributes:
        held_back: names of variables that receive no values, because of such a write.
        uncounted: whether a write has been seen that no counter shows.
    """

    held_back: set[str] = field(default_factory=set)
    uncounted: bool = False


class ParameterSlices:
    """Reads and writes the slices of some variables in the variables' live tensors.

    The script's thread reads, writes and flushes; ``destination`` is called in the channels'
    threads while the script's thread waits.  See [Note: destinations].

    Args:
        placements: the variables.
        tensors: all live tensors by variable name.
        script: the script's writes into all variables of the job; None: there are none.

    Attributes:
        script: as given.
        names: of the slices that servers update, in the order of the plan.
        servers: by slice, the index of the server that holds it.
        updated: names of the variables that servers update; others they only hold.
        compresses: whether gradients of some slice travel in another form than their own.
    """

    def __init__(
        self,
        placements: list[Placement],
        tensors: Mapping[str, torch.Tensor],
        script: ScriptWrites | None = None,
    ) -> None:
        self.script = script or ScriptWrites()
        self._tensors = tensors
        self._placements = placements
        self._owners = {
            slice_.name: (placement, slice_)
            for placement in placements
            for slice_ in placement.slices
        }
        self._by_variable = {placement.name: placement for placement in placements}
        self._split = {placement.name: placement for placement in placements if placement.split}
        self.names = [
            slice_.name
            for placement in placements
            if placement.group is not None
            for slice_ in placement.slices
        ]
        self.updated = frozenset(p.name for p in placements if p.group is not None)
        self.compresses = any(placement.compression for placement in placements)
        self.servers = {name: slice_.server for name, (_, slice_) in self._owners.items()}
        self._order = {
            server: [name for name in self.names if self.servers[name] == server]
            for server in {self.servers[name] for name in self.names}
        }
        self._compressor = Compressor()
        self._buffers: dict[str, torch.Tensor] = {}  # kept from step to step
        self._parts: dict[str, torch.Tensor] = {}  # new values on GPUs, of strided variables
        self._arrived: set[str] = set()  # slices of which one of these two holds a new value
        self._device_copies: dict[torch.device, DeviceCopy] = {}
        self._flushing: list[PendingCopy] = []  # copies to a GPU that may not have been made yet
        self._leaving: dict[int, PendingCopy] = {}  # likewise, by the address of their memory

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    @property
    def variables(self) -> dict[str, torch.Tensor]:
        """All of the variables, by name."""
        return {p.name: self._tensors[p.name] for p in self._placements}

    @property
    def trained(self) -> list[str]:
        """The variables that servers update."""
        return [p.name for p in self._placements if p.group is not None]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """The variables that servers update, by name."""
        return {name: self._tensors[name] for name in self.trained}

    @property
    def bytes(self) -> int:
        """The size of all updated variables, in bytes."""
        return sum(
            self._tensors[placement.name].nbytes
            for placement in self._placements
            if placement.group is not None
        )

    def order(self, server: int) -> list[str]:
        """The updated slices on a server, in the order of the plan."""
        return self._order.get(server, [])

    def held(self, server: int) -> list[str]:
        """All slices on a server, including those that are never updated."""
        return [name for name, (_, slice_) in self._owners.items() if slice_.server == server]

    def on(self, server: int) -> set[str]:
        """The updated slices on a server, as a set."""
        return set(self.order(server))

    def variable(self, name: str) -> str:
        """The variable that a slice belongs to; the name of a variable is returned as it is."""
        return self._owners[name][0].name if name in self._owners else name

    def held_back_slices(self) -> AbstractSet[str]:
        """The names of the variables that are held back, and of their slices."""
        held_back = self.script.held_back
        if not held_back:
            return held_back
        own = [name for name in held_back if name in self._by_variable]
        return held_back | set(self.slices_of(own))

    def slices_of(self, variables: Iterable[str]) -> list[str]:
        """The slices of these variables."""
        return [
            slice_.name for variable in variables for slice_ in self._by_variable[variable].slices
        ]

    def owner(self, name: str) -> tuple[Placement, Slice]:
        """The variable that a slice belongs to, and the slice.

        Raises:
            KeyError: the lane has no such slice.
        """
        return self._owners[name]

    def read(self, name: str) -> torch.Tensor:
        """A slice in contiguous main memory: a view of the live tensor if that is contiguous there
        already.
        """
        return self._contiguous(name).to("cpu")

    def part(self, name: str) -> torch.Tensor:
        """As :meth:`read`, but on a GPU if the variable is there: the host waits for nothing."""
        part = self._contiguous(name)
        return part if is_on_gpu(part) else part.to("cpu")

    def on_gpu(self, name: str) -> bool:
        """Whether a slice's variable is on a GPU."""
        return is_on_gpu(self._tensors[self._owners[name][0].name])

    def _contiguous(self, name: str) -> torch.Tensor:
        placement, slice_ = self._owners[name]
        flat = self._tensors[placement.name].detach().contiguous().view(-1)
        return flat[slice_.begin : slice_.end].view(slice_.shape)

    def placement(self, variable: str) -> Placement:
        """The placement of a variable."""
        return self._by_variable[variable]

    def by_server(self, names: Iterable[str]) -> dict[int, list[str]]:
        """These slices, by the index of the server that holds them."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self.servers[name], []).append(name)
        return found

    def here(self, server: int, assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
        """The assignments to slices on one server."""
        return {n: each for n, each in assignments.items() if self.servers[n] == server}

    def by_lane(
        self, gradients: Mapping[str, torch.Tensor]
    ) -> dict[int, list[tuple[Placement, torch.Tensor]]]:
        """Gradients of whole variables, by lane, each with its variable's placement."""
        found: dict[int, list[tuple[Placement, torch.Tensor]]] = {}
        for name, gradient in gradients.items():
            placement = self._by_variable[name]
            found.setdefault(placement.lane, []).append((placement, gradient))
        return found

    def encoded(self, name: str, gradient: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """A slice's encoded gradient: its tensors, by their names on the wire.

        :meth:`end_encoding` follows when all of a step are encoded.
        """
        return self._compressor.encode(name, gradient, self._owners[name][0].compression).items()

    def end_encoding(self, sent: bool = True) -> None:
        """Ends the encoding of a step's gradients.

        Args:
            sent: False: the step was withdrawn.
        """
        self._compressor.end(sent)

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Slices by name, as views of tensors that are slices or whole variables."""
        if not self._split:
            return dict(tensors)
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
        make = pinned if is_on_gpu(self._tensors[placement.name]) else kept_buffer
        return make(shape, DTYPES[placement.dtype])

    def device_copy(self, tensor: torch.Tensor) -> DeviceCopy:
        """The copies between a tensor's GPU and main memory."""
        if tensor.device not in self._device_copies:
            self._device_copies[tensor.device] = DeviceCopy(tensor.device)
        return self._device_copies[tensor.device]

    def join(self) -> None:
        """Makes the script's next work on its GPUs wait for the copies that have begun."""
        for device_copy in self._device_copies.values():
            device_copy.join()

    def destination(self, name: str) -> torch.Tensor:
        """The destination of a slice's value.  See [Note: destinations]."""
        placement, slice_ = self._owners[name]
        if placement.name in self.script.held_back:
            return self.blank(name)
        tensor = self._tensors[placement.name].detach()
        if not is_on_gpu(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.view(-1)[slice_.begin : slice_.end].view(slice_.shape)
        while self._flushing:
            self._flushing.pop().synchronize()
        self._arrived.add(name)
        return self.beside(name)

    def beside(self, name: str) -> torch.Tensor:
        """The buffer in which the values of a slice arrive where they do not in place.  A slice on
        a GPU may be copied to it before: that copy is behind those of earlier values.
        """
        if name not in self._buffers:
            self._buffers[name] = self.blank(name)
        return self._buffers[name]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes a slice; ``flush_buffers`` follows when all slices have been written."""
        self.destination(name).copy_(value)

    def write_from(
        self, values: Mapping[str, torch.Tensor], unless: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes slices; ``flush_buffers`` follows.  To a GPU they are copied from the memory in
        which they are, which :meth:`wait_for` makes free.

        Args:
            values: by slice; those of a GPU in pinned memory.
            unless: by variable, on its GPU: whether it is left as it is.
        """
        for name, value in values.items():
            placement, slice_ = self._owners[name]
            tensor = self._tensors[placement.name].detach()
            if is_on_gpu(tensor) and tensor.is_contiguous():
                part = tensor.view(-1)[slice_.begin : slice_.end]
                self._leave(value, part, unless.get(placement.name))
            else:
                self.write(name, value)

    def to_part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A received value where :meth:`part` has the slice: in new memory on a GPU, to which it is
        copied from the memory in which it is, which :meth:`wait_for` makes free; or as it is.
        """
        if not self.on_gpu(name):
            return value
        tensor = self._tensors[self._owners[name][0].name]
        there = torch.empty(value.shape, dtype=value.dtype, device=tensor.device)
        self._leave(value, there)
        return there

    def _leave(
        self, value: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
    ) -> None:
        """Begins to copy a value to a GPU."""
        way = self.device_copy(target)
        self._leaving[value.untyped_storage().data_ptr()] = way.to_device(
            value.view(-1), target.view(-1), unless
        )

    def write_part(self, name: str, value: torch.Tensor) -> None:
        """Writes a slice from where :meth:`part` has it; ``flush_buffers`` follows when all slices
        have been written.
        """
        placement, slice_ = self._owners[name]
        tensor = self._tensors[placement.name].detach()
        if not is_on_gpu(tensor):
            self.write(name, value)
        elif tensor.is_contiguous():
            tensor.view(-1)[slice_.begin : slice_.end].copy_(value.view(-1))
        else:
            self._parts[name] = value.clone()
            self._arrived.add(name)

    def wait_for(self, memory: Iterable[torch.Tensor]) -> None:
        """Waits for the copies to GPUs from this memory.  Any thread may call it."""
        for tensor in memory if self._leaving else ():
            copy = self._leaving.pop(tensor.untyped_storage().data_ptr(), None)
            if copy is not None:
                copy.synchronize()

    def flush_buffers(self) -> None:
        """Copies the values that arrived in buffers into their parameters."""
        for placement in self._placements if self._arrived else ():
            if placement.slices[0].name in self._arrived:
                self._flush(placement)
        self._arrived.clear()
        self._parts.clear()

    def _flush(self, placement: Placement) -> None:
        tensor = self._tensors[placement.name].detach()
        found = self._buffers | self._parts
        parts = {slice_: found[slice_.name].view(-1) for slice_ in placement.slices}
        if is_on_gpu(tensor) and tensor.is_contiguous():
            flat, way = tensor.view(-1), self.device_copy(tensor)
            self._flushing += [
                way.to_device(part, flat[slice_.begin : slice_.end])
                for slice_, part in parts.items()
            ]
        else:
            if is_on_gpu(tensor):
                parts = {slice_: self._there(slice_.name, part) for slice_, part in parts.items()}
            value = torch.cat(list(parts.values())).view(placement.shape)
            # elements that ``expand`` repeats once only: torch does not write to repeated elements
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[once].copy_(value[once])

    def _there(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A flat new value on the GPU of its variable, where it may be already."""
        if name in self._parts:
            return part
        tensor = self._tensors[self._owners[name][0].name]
        there = torch.empty(part.shape, dtype=part.dtype, device=tensor.device)
        self._flushing.append(self.device_copy(there).to_device(part, there))
        return there


def local_gradient(
    placement: Placement, name: str, gradient: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """A gradient of a slice, or of a whole variable, as lanes take it: contiguous, of this shape,
    on a GPU or in main memory.

    Raises:
        ValueError: it is sparse, or has another dtype or number of elements.
    """
    if gradient.is_sparse:
        raise ValueError(
            f"the gradient of {placement.name!r} is sparse; expected a dense one "
            "(nn.Embedding(sparse=False))"
        )
    same = gradient.shape == shape  # as most often
    if gradient.dtype is not DTYPES[placement.dtype] or not (
        same or gradient.numel() == math.prod(shape)
    ):
        dtype = str(gradient.dtype).removeprefix("torch.")
        raise ValueError(
            f"the gradient of {name!r}: expected {placement.dtype} of {math.prod(shape)} elements, "
            f"got {dtype} of {gradient.numel()}"
        )
    here = gradient.detach()
    if not here.is_cpu and not is_on_gpu(here):
        here = here.to("cpu")
    return here if same and here.is_contiguous() else here.contiguous().view(shape)
