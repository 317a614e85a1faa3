"""Sends the script's external writes to the servers: in-place writes to parameters outside of
``optimizer.step()``.

[Note: what a script writes]  Parameters are the script's: it loads the best model, clamps weights,
swaps averages in and out.  The servers step, so its writes must reach them.  No event marks a
write; it is detected by the change of a parameter since its values were last received:

::

    counted      torch counts in-place operations on a tensor (``_version``)
    uncounted    writes through ``.data`` and numpy: 1,024 sampled elements of each tensor; all of
                 them in steps 1 to 3 and every 1,000th, and always once such a write has been seen

A tensor that may have been written is compared with its last received values, bit by bit; an equal
tensor sends nothing.  Differences are assigned on the servers, by the trainer's next step and
before its gradients; optimizer states stay.  Until then a tensor that differs receives no values:
an average that was swapped in for an evaluation stays, and when it is swapped out again the tensor
equals its received values.

The last received values are found so: a lane that receives values beside the parameters keeps the
memory that they are in.  In a sync lane the servers have them until the next step: their checksums
show what differs.  A lane that receives values in the parameters themselves, which other trainers
update meanwhile, keeps a copy of the received values each time once a first write has been seen;
for that first write the servers' values are taken, which are the last received ones if no trainer
has stepped since.

Elements of tensors on a GPU are compared there.  A sync lane asks for the result when it closes the
step, before which nothing depends on it: so the host runs ahead of a backward whose gradients leave
early.  A lane that receives values beside the parameters asks in the next step.  Values that come
meanwhile are written where there was no external write, which the device decides; and a step whose
look has found one waits in the queue until the script's thread has compared.  The other lanes wait
for the device, once a step.

In the k-step modes the script's own optimizer steps, and external writes are sent as a part of the
changes: see :class:`WritesBetween`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pserver.transport.arrays import Assignment
from trainer.device_copies import is_on_gpu, pinned
from trainer.senders.parameters import ParameterSlices

# ---- sampled elements ----
#
# Some elements of each of many tensors, always the same ones, by which writes are detected.
#
# A tensor counts the operations that write to it; writes through ``.data`` and through numpy are in
# no counter.  Reading every tensor whole at every step takes too long, so 1,024 of its elements are
# read, at fixed pseudo-random places.  A tensor of fewer elements is read whole.  The time goes
# into memory that is in no cache, a line at a time, so four elements lie side by side.


SAMPLED = 1024  # elements of a tensor
BESIDE = 4  # of them side by side
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class _OnHost:
    """The sampled elements of one tensor in main memory.

    Attributes:
        pointer, strides: of the memory.
        memory: integers, 1-D: from the tensor's first element to its last.
        whole: whether these are all of its elements, in their order, and all are sampled.
        noted: the elements as they were noted.
    """

    __slots__ = ("_array", "_now", "_offsets", "memory", "noted", "pointer", "strides", "whole")

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        self.pointer, self.strides = tensor.data_ptr(), tensor.stride()
        self.memory = _memory(tensor)
        self.whole = tensor.is_contiguous() and len(positions) == len(self.memory)
        self._array = self.memory.numpy()
        self._offsets = _offsets(tensor, positions)
        self._now, self.noted = (np.empty(len(positions), self._array.dtype) for _ in range(2))

    def note(self) -> None:
        """Notes the elements as they are now."""
        self._array.take(self._offsets, out=self.noted, mode="clip")  # which copies once

    def changed(self) -> bool:
        """Whether an element has changed since it was noted."""
        self._array.take(self._offsets, out=self._now, mode="clip")
        return not (self._now == self.noted).all()


class _Together:
    """Small tensors in main memory, all of whose elements are sampled: they are noted, and looked
    at, in one call.

    Args:
        members: by number; elements of one size.

    Attributes:
        numbers: of the tensors.
    """

    def __init__(self, members: Mapping[int, _OnHost]) -> None:
        self.numbers = list(members)
        self._memories = [each.memory for each in members.values()]
        self._noted = torch.cat([torch.from_numpy(each.noted) for each in members.values()])
        self._now = torch.empty_like(self._noted)
        parts = torch.split(self._noted, [len(each) for each in self._memories])
        for sample, part in zip(members.values(), parts, strict=True):
            sample.noted = part.numpy()

    def note(self) -> None:
        """Notes the elements as they are now."""
        torch.cat(self._memories, out=self._noted)

    def changed(self) -> bool:
        """Whether an element of some tensor has changed since it was noted."""
        torch.cat(self._memories, out=self._now)
        return not torch.equal(self._now, self._noted)


class _OnDevice:
    """The sampled elements of one tensor on a device; the host waits for none of these calls.

    Attributes:
        pointer, strides: of the memory.
        noted: the elements as they were noted.
    """

    __slots__ = ("_memory", "_offsets", "noted", "pointer", "strides")

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        self.pointer, self.strides = tensor.data_ptr(), tensor.stride()
        self._memory = _memory(tensor)
        self._offsets = torch.from_numpy(_offsets(tensor, positions)).to(tensor.device)
        self.noted = self._memory.new_empty(len(positions))

    def note(self) -> None:
        """Notes the elements as they are now."""
        torch.take(self._memory, self._offsets, out=self.noted)

    def changed(self) -> bool:
        """Whether the host knows of a change: never."""
        return False

    def now(self) -> Tensor:
        """The elements as they are now."""
        return torch.take(self._memory, self._offsets)


class DeviceFlags:
    """Which of some tensors on one device have other elements than before; on its way to the host.

    Args:
        pairs: of each tensor its elements then and now.

    Attributes:
        differ: bool [tensors], on the device.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.differ = differ = torch.stack([(then != now).any() for then, now in pairs])
        self._made: torch.cuda.Event | None = None
        if is_on_gpu(differ):
            self._flags = pinned((len(pairs),), torch.bool)
            self._flags.copy_(differ, non_blocking=True)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._made.record(torch.cuda.current_stream(differ.device))
        else:
            self._flags = differ

    def wait(self) -> list[bool]:
        """Waits for the device, for all that it had to do before, and gives the flags."""
        if self._made is not None:
            self._made.synchronize()
        return [bool(each) for each in self._flags.tolist()]


class PendingLook:
    """Tensors that have changed; of those on devices the devices compare the elements meanwhile.

    Args:
        here: the numbers of those that the host has found.
        on_devices: the numbers of the tensors on each device, and the flags of that device.

    Attributes:
        here: as given.
        waits: whether a device compares.
    """

    def __init__(
        self, here: list[int], on_devices: Sequence[tuple[list[int], DeviceFlags]] = ()
    ) -> None:
        self.here, self._on_devices, self.waits = here, on_devices, bool(on_devices)

    def found(self) -> list[int]:
        """Waits for the devices: the numbers of all that have changed."""
        if not self.waits:
            return self.here
        there = [
            number
            for numbers, flags in self._on_devices
            for number, differs in zip(numbers, flags.wait(), strict=True)
            if differs
        ]
        return sorted([*self.here, *there]) if there else self.here

    def flags(self) -> dict[int, Tensor]:
        """By the numbers of tensors on devices, whether they have changed: bool [], there."""
        return {
            number: flag
            for numbers, flags in self._on_devices
            for number, flag in zip(numbers, flags.differ.unbind(), strict=True)
        }


class Samples:
    """The sampled elements of some live tensors, as they were noted last.  :meth:`note` is called
    before :meth:`look`.  One thread uses it.

    Args:
        tensors: any devices, dtypes and strides; their memory may be exchanged.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._positions = [_positions(t.numel(), seed) for seed, t in enumerate(self._tensors)]
        self._sampled = [self._bound(number) for number in range(len(self._tensors))]
        self._together, self._alone = self._grouped()

    def _grouped(self) -> tuple[list[_Together], list[int]]:
        """The tensors that are looked at together, where all are, and the numbers of the others."""
        alike, alone = dict[torch.dtype, dict[int, _OnHost]](), list[int]()
        for number, sample in enumerate(self._sampled):
            if isinstance(sample, _OnHost) and sample.whole:
                alike.setdefault(sample.memory.dtype, {})[number] = sample
            else:
                alone.append(number)
        return [_Together(members) for members in alike.values()], alone

    def note(self, numbers: Collection[int]) -> None:
        """Notes these tensors' elements as they are now.

        Args:
            numbers: of the tensors, in their order.
        """
        if exchanged := self._exchanged(numbers):
            for number in exchanged:
                self._sampled[number] = self._bound(number)
            self._together, self._alone = self._grouped()
        every = len(numbers) == len(self._tensors)
        for together in self._together if every else ():
            together.note()
        for number in self._alone if every else numbers:
            self._sampled[number].note()

    def _exchanged(self, numbers: Iterable[int]) -> list[int]:
        """The tensors that have other memory than when they were noted."""
        tensors, sampled = self._tensors, self._sampled
        return [
            number
            for number in numbers
            if tensors[number].data_ptr() != sampled[number].pointer
            or tensors[number].stride() != sampled[number].strides
        ]

    def look(self, numbers: Collection[int]) -> PendingLook:
        """Looks for tensors of which an element has changed since it was noted, or whose memory has
        been exchanged, without waiting for a device.
        """
        here, there = self._exchanged(numbers), dict[torch.device, list[int]]()
        alone: Iterable[int] = numbers
        if len(numbers) == len(self._tensors):
            changed = [each.numbers for each in self._together if each.changed()]
            alone = [*chain.from_iterable(changed), *self._alone]
        exchanged = frozenset(here)
        for number in alone:
            sample = self._sampled[number]
            if number in exchanged:
                continue
            if sample.changed():
                here.append(number)
            elif isinstance(sample, _OnDevice) and len(sample.noted):
                there.setdefault(sample.noted.device, []).append(number)
        here.sort()
        return PendingLook(
            here, [(those, DeviceFlags(self._pairs(those))) for those in there.values()]
        )

    def changed(self, numbers: Collection[int]) -> list[int]:
        """The finding of :meth:`look`; the host waits for the devices, once for each."""
        return self.look(numbers).found()

    def _pairs(self, numbers: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
        found = [self._sampled[number] for number in numbers]
        return [(each.noted, each.now()) for each in found if isinstance(each, _OnDevice)]

    def _bound(self, number: int) -> _OnHost | _OnDevice:
        tensor, positions = self._tensors[number].detach(), self._positions[number]
        if tensor.device.type == "cpu" and not is_on_gpu(tensor):
            return _OnHost(tensor, positions)
        return _OnDevice(tensor, positions)


def _positions(count: int, seed: int) -> np.ndarray:
    """The positions of the sampled elements in a tensor of ``count`` elements, ascending: int64
    [n].
    """
    if count <= SAMPLED:
        return np.arange(count)
    # a run in each of 256 equal parts, at a pseudo-random place
    bounds = np.linspace(0, count // BESIDE, SAMPLED // BESIDE + 1).astype(np.int64)
    starts = np.random.default_rng(seed).integers(bounds[:-1], bounds[1:]) * BESIDE
    return np.asarray((starts[:, None] + np.arange(BESIDE)).reshape(-1))


def _memory(tensor: Tensor) -> Tensor:
    """A tensor's memory as integers, 1-D: from its first element to its last, with everything
    between; shared, not copied.
    """
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(_INTEGERS[tensor.itemsize])


def _offsets(tensor: Tensor, positions: np.ndarray) -> np.ndarray:
    """The offsets in :func:`_memory` of the elements at these positions.  Of an element of 16
    bytes, the first half and the second are sampled in turn.
    """
    offsets = np.zeros(len(positions), np.int64)
    left = positions
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offsets += left % extent * stride
        left = left // extent
    return offsets * 2 + np.arange(len(offsets)) % 2 if tensor.itemsize == 16 else offsets


# ---- writes in k-step lanes ----
#
# External writes since the script's last step, in the lanes whose steps the script's own optimizer
# takes.
#
# There an external write is sent with the next message, as a part of the changes.  Until the next
# step the parameter receives no values, and files with the servers' values lack the write.


class WritesBetween:
    """Finds external writes: compares counters and sampled elements with those at the last
    :meth:`note`.

    The script's thread calls it.

    Args:
        tensors: the live tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._samples = Samples(list(self._tensors.values()))
        self._versions: list[int] = []  # as noted; none before the first note

    def note(self) -> None:
        """Notes counters and elements, when a step is over or values have been received."""
        self._versions = [version(tensor) for tensor in self._tensors.values()]
        self._samples.note(range(len(self._tensors)))

    def names(self) -> list[str]:
        """The tensors that have been written since the last note.

        Writes that no counter shows are found only in sampled elements.
        """
        if not self._versions:
            return []
        changed = set(self._samples.changed(range(len(self._tensors))))
        return [
            name
            for number, (name, tensor) in enumerate(self._tensors.items())
            if number in changed or version(tensor) != self._versions[number]
        ]


def version(tensor: Tensor) -> int:
    """The number of operations that have written to a tensor, as torch counts them."""
    return 0 if tensor.is_inference() else tensor._version


# ---- received values ----
#
# The last received values of a lane's parameters: a parameter that differs from them has been
# written by the script since.
#
# A lane that receives values in memory of its own keeps the memory of the last ones, which costs no
# time.  A lane that receives values in the parameters themselves keeps copies on request.


class ReceivedCopies:
    """The last received values of some variables, by slice, in main memory.  The script's thread
    uses it.

    Args:
        slices: of the lane.

    Attributes:
        slices: as given.
    """

    def __init__(self, slices: ParameterSlices) -> None:
        self.slices = slices
        self._values: dict[str, Tensor] = {}  # by slice
        self._memory: dict[str, Tensor] = {}  # given by callers, by slice or by variable

    def holds(self, variables: Iterable[str]) -> bool:
        """Whether it has the last received values of all of these variables."""
        return self._values.keys() >= set(self.slices.slices_of(variables))

    def copy(self, variables: Iterable[str]) -> None:
        """Notes the variables' present values."""
        for name in self.slices.slices_of(variables):
            if name not in self._values:
                self._values[name] = self.slices.blank(name)
            self._values[name].copy_(self.slices.read(name))

    def note(self, values: Mapping[str, Tensor]) -> None:
        """Notes received values, by slice; their memory must not change from now on."""
        self._values.update(values)

    def replace(
        self, values: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Notes values that are being received, without copying them.

        Args:
            values: by slice.
            memory: the memory of the values, by slice or by variable; it must not change from now
                on.

        Returns:
            The memory of earlier values, by the same names, which is free now; and the memory of
            values for variables that are held back.
        """
        held = self.slices.held_back_slices()
        free: dict[str, Tensor] = {}
        for key, tensor in memory.items():
            if key in held:
                free[key] = tensor
                continue
            if key in self._memory:
                free[key] = self._memory[key]
            self._memory[key] = tensor
        self._values.update({name: each for name, each in values.items() if name not in held})
        return free

    def forget(self) -> None:
        """Drops all kept values."""
        self._values.clear()
        self._memory.clear()

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Writes assignments into the kept values, by slice, so that an external write is sent
        once.
        """
        for name, assignment in assignments.items():
            if name in self._values:
                assignment.write(self._values[name])

    def differences(self, variables: Collection[str]) -> dict[str, Assignment]:
        """The differences of these variables from their last received values, by slice: elements,
        or the whole slice if more than half of it differs.
        """
        return {
            name: found
            for name in self.slices.slices_of(variables)
            if (found := difference(self.slices.read(name), self._values[name])) is not None
        }


def difference(now: Tensor, before: Tensor) -> Assignment | None:
    """The elements of a slice whose bits have changed; None if there are none.

    Args:
        now, before: contiguous, in main memory, of one dtype and shape.

    Returns:
        Copies of the elements that differ, or of the whole slice if more than half of it differs.
    """
    integers = _INTEGERS[now.itemsize]
    mine, theirs = now.detach().reshape(-1), before.detach().reshape(-1)
    mine, theirs = mine.view(integers), theirs.view(integers)
    if torch.equal(mine, theirs):
        return None
    unlike = mine != theirs
    if now.itemsize == 16:
        unlike = unlike.view(-1, 2).any(1)
    elements = unlike.nonzero().view(-1)
    if 2 * len(elements) > now.numel():
        return Assignment(now.detach().clone())
    return Assignment(now.detach().reshape(-1)[elements], elements)


# ---- external writes ----


log = logging.getLogger(__name__)

EARLY_STEPS, EVERY = 3, 1000  # the steps in which everything is compared


@dataclass(frozen=True, slots=True)
class Suspects:
    """Variables of a lane that may have been written.

    Attributes:
        counted, uncounted: those whose counters have changed, and those whose samples have.
        held_back: those that receive no values until they have been compared.
        compared: those to compare with their last received values.
        everything: whether these are all that receive values.
    """

    counted: Sequence[str]
    uncounted: Sequence[str]
    held_back: Sequence[str]
    compared: Sequence[str]
    everything: bool


class ExternalWrites:
    """Finds the script's external writes in a lane whose servers step.  See [Note: what a script
    writes].

    The lane's sender compares what is suspected, and makes the differences a part of its step::

        suspects = writes.look(...)
        found = ...                       # how suspects.compared differ from their received values
        writes.settle(suspects, found)

    The script's thread calls it; with ``overlap`` also autograd's.

    Args:
        slices: of the lane.
        received: the last received values.
        trainer: this trainer's number, for messages.
        keeps_copies: whether ``received`` is to get copies; otherwise the sender gives it the
            values' memory.

    Attributes:
        looks: those for whose devices nobody has waited.
    """

    def __init__(
        self, slices: ParameterSlices, received: ReceivedCopies, trainer: int, keeps_copies: bool
    ) -> None:
        self._slices, self._received, self._trainer = slices, received, trainer
        self._keeps_copies, self._script = keeps_copies, slices.script
        variables = slices.variables
        self._names, self._tensors = list(variables), list(variables.values())
        # that receive values after a step
        self._received_names = [name for name in self._names if name in slices.updated]
        self._forms = [(tensor.shape, tensor.dtype) for tensor in self._tensors]
        self._samples = Samples(self._tensors)
        # whether torch counts the operations that write to it
        self._counted = [not tensor.is_inference() for tensor in self._tensors]
        self._versions = [version(tensor) for tensor in self._tensors]
        self._step = 1  # that is under way, or the next one
        self.looks: tuple[PendingLook, ...] = ()
        self._earlier = 0  # how many of them looked at elements that were noted before
        self._late: list[str] = []  # found there, and not settled
        self._compared = 0  # the last step in which everything was compared

    # ---- steps ----

    def look(self, waits: bool) -> Suspects | None:
        """Looks for external writes; the next step brings them.

        Args:
            waits: whether to wait for devices, which compare the elements of their tensors;
                otherwise :meth:`complete` and :meth:`resolve` do.

        Returns:
            What has to be compared, and then settled; None: nothing.

        Raises:
            ValueError: a parameter's shape or dtype differs from the job's.
        """
        counted, pending = self._changed()
        if not (counted or pending.here or self._script.held_back or self._compares_everything()):
            if not pending.waits:
                return None
            if not waits:
                self._add(pending)
                return None
        return self._suspects(self._checked(counted), self._checked(pending.found()))

    def complete(self) -> Suspects | None:
        """Finds the writes that devices have compared meanwhile; called before the step is
        closed.
        """
        if self.looks:
            self.resolve()
        return self._suspects([], []) if self._late else None

    def defer(self) -> bool:
        """Lets devices compare the elements of their tensors, where nothing else has been found:
        :attr:`flags` has the result, and :meth:`resolve` waits for it.

        Returns:
            Whether values may be received now, as the flags say.
        """
        counted, pending = self._changed()
        if counted or pending.here or self._script.held_back or self._compares_everything():
            return False
        if pending.waits:
            self._add(pending)
        return True

    def _add(self, look: PendingLook) -> None:
        """Notes a look, in place of those at the same elements."""
        self.looks = (*self.looks[: self._earlier], look)

    @property
    def flags(self) -> dict[str, Tensor]:
        """By the names of variables on devices, whether they were written, bool [], there: where
        devices compare.
        """
        found: dict[str, Tensor] = {}
        for look in self.looks:
            for number, flag in look.flags().items():
                name = self._names[number]
                found[name] = found[name] | flag if name in found else flag
        return found

    def resolve(self) -> None:
        """Waits for what devices compare.  Variables that were written are held back from now on,
        until :meth:`complete` or the next look gives them to be settled.
        """
        looks, self.looks, self._earlier = self.looks, (), 0
        self._late += self._checked(sorted({number for look in looks for number in look.found()}))
        self._script.held_back.update(self._late)

    def _suspects(self, counted: list[str], uncounted: list[str]) -> Suspects:
        uncounted, self._late = [*self._late, *uncounted], []
        held_back = self._script.held_back
        held_back.update(counted, uncounted)
        suspects = [name for name in self._names if name in held_back] if held_back else []
        compared = suspects
        everything = self._compares_everything() and self._received.holds(self._received_names)
        if everything and _is_regular(self._step):
            compared = self._names
        elif everything:  # comparing parameters that servers only hold takes long
            compared = list(dict.fromkeys([*self._received_names, *suspects]))
        return Suspects(counted, uncounted, suspects, compared, everything)

    def settle(self, suspects: Suspects, found: Mapping[str, Assignment]) -> None:
        """Notes how suspected variables differ from their last received values: that is a part of
        the step now, and they may receive values.

        Args:
            found: by slice.
        """
        if found:
            self._note_uncounted({self._slices.variable(name) for name in found}, suspects)
        self._script.held_back.difference_update(suspects.held_back)
        if suspects.held_back or found:
            self._note(range(len(self._names)))
        if suspects.everything:
            self._compared = self._step

    def end_step(self, copies: bool = False) -> None:
        """Notes the values that the lane's step has brought.

        Args:
            copies: whether to keep copies of received values after every step.
        """
        self._step += 1
        self._keep(copies)
        self._note(range(len(self._names)))

    def start(self, copies: bool = False) -> None:
        """Starts anew after the servers' values have been received into all variables."""
        self.looks, self._late = (), []
        self._script.held_back.difference_update(self._names)
        self._keep(copies)
        self._note(range(len(self._names)))

    def _keep(self, always: bool) -> None:
        """Keeps copies of received values, if the next comparison will need them."""
        if self._keeps_copies and (always or self._compares_everything()):
            self._received.copy(self._received_names)
        elif self._keeps_copies:
            self._received.forget()

    def _compares_everything(self) -> bool:
        return self._script.uncounted or _is_regular(self._step)

    # ---- between steps ----

    def hold_back(self, everything: bool) -> list[str]:
        """Keeps values that are received without a step off the script's writes.

        Args:
            everything: whether all elements are to be compared where the last received values are
                known; otherwise only counters and samples show a write, except in the steps in
                which everything is compared.

        Returns:
            The variables to compare, for :meth:`held_back`.
        """
        held_back, received = self._script.held_back, self._received_names
        counted, pending = self._changed()
        held_back.update(self._checked([*counted, *pending.found()]))
        if (everything or self._compares_everything()) and self._received.holds(received):
            return received
        return [name for name in received if name in held_back]

    def held_back(self, compared: Sequence[str], found: Mapping[str, Assignment]) -> None:
        """Lets those of the compared variables receive values that do not differ.

        Args:
            found: how they differ from their last received values, by slice.
        """
        self._script.held_back.difference_update(compared)
        self._script.held_back.update(self._slices.variable(name) for name in found)

    def note_free(self, copies: bool) -> None:
        """Notes the values of the variables that are not held back.

        Args:
            copies: whether they were received into the variables' own memory.
        """
        held_back = self._script.held_back
        free = [name for name in self._received_names if name not in held_back]
        if copies and self._received.holds(free):
            self._received.copy(free)
        self._note(n for n, name in enumerate(self._names) if name not in held_back)

    def suspected(self) -> set[str]:
        """The variables that may have been written since the last step; some of them have not."""
        if self._script.uncounted:
            return set(self._names)
        counted, pending = self._changed()
        found = self._checked([*counted, *pending.found()])
        return {*found, *self._script.held_back.intersection(self._names)}

    # ---- detection ----

    def _note(self, numbers: Iterable[int]) -> None:
        listed = list(numbers)
        for number in listed:
            if self._counted[number]:
                self._versions[number] = self._tensors[number]._version
        self._samples.note(listed)
        self._earlier = len(self.looks)

    def _changed(self) -> tuple[list[int], PendingLook]:
        """The numbers of the variables whose counters have changed, and a look at the samples of
        the others.
        """
        versions, tensors, counts = self._versions, self._tensors, self._counted
        numbers = range(len(tensors))
        counted = [n for n in numbers if counts[n] and tensors[n]._version != versions[n]]
        return counted, self._samples.look(
            [n for n in numbers if n not in counted] if counted else numbers
        )

    def _checked(self, numbers: Iterable[int]) -> list[str]:
        """The names of variables that may have been written.

        Raises:
            ValueError: one has another shape or dtype than the job's.
        """
        listed = list(numbers)
        for number in listed:
            self._check_form(number)
        return [self._names[number] for number in listed]

    def _check_form(self, number: int) -> None:
        tensor, (shape, dtype) = self._tensors[number], self._forms[number]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{self._names[number]!r}: expected {dtype} {list(shape)}, as the servers have it, "
                f"got {tensor.dtype} {list(tensor.shape)}: a parameter keeps its shape and dtype "
                "in a job"
            )

    def _note_uncounted(self, written: set[str], suspects: Suspects) -> None:
        """Notes that there are writes that no counter shows; warns if only the comparison of all
        elements has found one.
        """
        late = sorted(written.difference(suspects.counted, suspects.uncounted))
        if late or written.intersection(suspects.uncounted):
            self._script.uncounted = True
        since = self._compared + 1
        if late and since < self._step:
            log.warning(
                "trainer %d, step %d: %s was written through .data or numpy, in few elements, "
                "which only the comparison of everything has noticed; it takes effect now, and "
                "from now on everything is compared at each step.  What was written so in steps "
                "%d to %d may be lost",
                self._trainer,
                self._step,
                ", ".join(late),
                since,
                self._step - 1,
            )


def _is_regular(step: int) -> bool:
    """Whether all elements are compared in a step, whatever has been seen."""
    return step <= EARLY_STEPS or step % EVERY == 0
