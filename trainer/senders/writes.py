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
early.  Other lanes wait for the device, once a step: values may come at any time.

In the k-step modes the script's own optimizer steps, and external writes are sent as a part of the
changes: see :class:`WritesBetween`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trainer.senders.parameters import is_on_gpu, pinned
from trainer.senders.pipeline import GradientLane, LaneSender

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
    """

    __slots__ = ("_memory", "_noted", "_now", "_offsets", "pointer", "strides")

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        self.pointer, self.strides = tensor.data_ptr(), tensor.stride()
        self._memory = _memory(tensor).numpy()
        self._offsets = _offsets(tensor, positions)
        self._now, self._noted = (np.empty(len(positions), self._memory.dtype) for _ in range(2))

    def note(self) -> None:
        """Notes the elements as they are now."""
        self._memory.take(self._offsets, out=self._noted, mode="clip")  # which copies once

    def changed(self) -> bool:
        """Whether an element has changed since it was noted."""
        self._memory.take(self._offsets, out=self._now, mode="clip")
        return not (self._now == self._noted).all()


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
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        differ = torch.stack([(then != now).any() for then, now in pairs])
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

    def note(self, numbers: Iterable[int]) -> None:
        """Notes these tensors' elements as they are now.

        Args:
            numbers: of the tensors, in their order.
        """
        sampled = self._sampled
        for number in numbers:
            tensor, sample = self._tensors[number], sampled[number]
            if tensor.data_ptr() != sample.pointer or tensor.stride() != sample.strides:
                sampled[number] = sample = self._bound(number)
            sample.note()

    def look(self, numbers: Iterable[int]) -> PendingLook:
        """Looks for tensors of which an element has changed since it was noted, or whose memory has
        been exchanged, without waiting for a device.
        """
        here, there = list[int](), dict[torch.device, list[int]]()
        for number in numbers:
            tensor, sample = self._tensors[number], self._sampled[number]
            if tensor.data_ptr() != sample.pointer or tensor.stride() != sample.strides:
                here.append(number)
            elif sample.changed():
                here.append(number)
            elif isinstance(sample, _OnDevice) and len(sample.noted):
                there.setdefault(sample.noted.device, []).append(number)
        return PendingLook(
            here, [(those, DeviceFlags(self._pairs(those))) for those in there.values()]
        )

    def changed(self, numbers: Iterable[int]) -> list[int]:
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


# ---- external writes ----


log = logging.getLogger(__name__)

EARLY_STEPS, EVERY = 3, 1000  # the steps in which everything is compared


class ExternalWrites:
    """Finds the script's external writes.  See [Note: what a script writes].

    The script's thread calls it; with ``overlap`` also autograd's.

    Args:
        lanes: all lanes; only those whose servers step are used.
        names: the variables of each lane, by its index.
        tensors: the live tensors by name.
        held_back: names of variables that receive no values; this object changes the set.
        trainer: this trainer's number, for messages.
    """

    def __init__(
        self,
        lanes: Sequence[LaneSender],
        names: Mapping[int, list[str]],
        tensors: Mapping[str, torch.Tensor],
        held_back: set[str],
        trainer: int,
    ) -> None:
        self._lanes = {i: lane for i, lane in enumerate(lanes) if isinstance(lane, GradientLane)}
        self._trainer = trainer
        self._names = [name for index in self._lanes for name in names[index]]
        self._tensors = [tensors[name] for name in self._names]
        self._forms = [(tensor.shape, tensor.dtype) for tensor in self._tensors]
        numbers = {name: number for number, name in enumerate(self._names)}
        self._of_lane = {index: [numbers[name] for name in names[index]] for index in self._lanes}
        self._samples = Samples(self._tensors)
        # whether torch counts the operations that write to it
        self._counted = [not tensor.is_inference() for tensor in self._tensors]
        self._versions = [version(tensor) for tensor in self._tensors]
        self._held_back = held_back
        self._steps = dict.fromkeys(self._lanes, 0)  # begun, by lane
        self._begun: set[int] = set()  # lanes whose step is not over
        self._looking: dict[int, PendingLook] = {}  # by lane, what devices compare
        self._compared = dict.fromkeys(
            self._lanes, 0
        )  # the last step in which everything was compared
        self._uncounted = False  # whether a write has been seen that no counter shows

    # ---- steps ----

    def begin(self, lane: int) -> None:
        """Makes external writes a part of a lane's step; called before anything of the step is
        sent.  Until the step is over later calls do nothing.

        Raises:
            ValueError: a parameter's shape or dtype differs from the job's.
        """
        if lane in self._lanes and lane not in self._begun:
            self._begun.add(lane)
            self._steps[lane] += 1
            self._look(lane)

    def look_again(self) -> None:
        """Finds later writes, before steps are closed whose gradients were sent during backward."""
        for lane in self._begun:
            self._look(lane)

    def complete(self, lane: int) -> None:
        """Finds the writes that devices have compared meanwhile; called before the step is
        closed.
        """
        if lane in self._looking and (found := self._looking.pop(lane).found()):
            self._assign(lane, [], self._checked(found))

    def _look(self, lane: int) -> None:
        """Finds the writes of a lane, but those that :meth:`complete` finds."""
        counted, pending = self._suspects(lane)
        if not (
            counted
            or pending.here
            or self._held_back
            or self._compares_everything(self._steps[lane])
        ):
            if not pending.waits:
                return
            if not self._lanes[lane].received.between_steps:
                self._looking[lane] = pending
                return
        self._looking.pop(lane, None)
        self._assign(lane, self._checked(counted), self._checked(pending.found()))

    def _assign(self, lane: int, counted: list[str], uncounted: list[str]) -> None:
        """Makes the differences of suspected variables a part of the lane's step."""
        step, received = self._steps[lane], self._lanes[lane].received
        self._held_back.update(counted, uncounted)
        suspects = (
            [name for name in self._all_names(lane) if name in self._held_back]
            if self._held_back
            else []
        )
        everything = self._compares_everything(step) and received.holds(self._received_names(lane))
        asked = suspects
        if everything and _is_regular(step):
            asked = self._all_names(lane)
        elif everything:  # comparing parameters that servers only hold takes long
            asked = list(dict.fromkeys([*self._received_names(lane), *suspects]))
        found = received.differing(asked) if asked else {}
        if found:
            self._lanes[lane].assign(found)
            written = {received.slices.variable(name) for name in found}
            self._seen(lane, written, counted, uncounted)
        self._held_back.difference_update(suspects)
        if suspects or found:
            self._note(self._of_lane[lane])
        if everything:
            self._compared[lane] = step

    def note_received(self, lane: int) -> None:
        """Notes the received values after a lane's step."""
        if lane in self._lanes:
            self._begun.discard(lane)
            self._keep(lane)
            self._note(self._of_lane[lane])

    def _compares_everything(self, step: int) -> bool:
        return self._uncounted or _is_regular(step)

    def _keep(self, lane: int) -> None:
        """Keeps copies of a lane's received values, if the next comparison will need them."""
        received = self._lanes[lane].received
        if received.keeps_memory:
            return
        if received.keeps_copies or self._compares_everything(self._steps[lane] + 1):
            received.copy(self._received_names(lane))
        else:
            received.forget()

    # ---- between steps ----

    @contextmanager
    def receiving(self, lane: int | None = None, pulled: bool = False) -> Iterator[None]:
        """Protects external writes from values that are received inside, without a step.

        Args:
            lane: the lane that receives values, which happens so often that only counters and
                samples are compared; None: any lane may receive values, and all elements are
                compared with the last received values where those are known.
            pulled: whether values are received into the parameters themselves, in every lane.
        """
        chosen = [
            index
            for index, sender in self._lanes.items()
            if sender.received.between_steps
            and (lane is None or (index == lane and sender.arrived))
        ]
        for index in chosen:
            self._hold_back(index, everything=lane is None)
        yield
        for index in chosen:
            received = self._lanes[index].received
            free = [name for name in self._received_names(index) if name not in self._held_back]
            if received.holds(free) and (pulled or not received.keeps_memory):
                received.copy(free)
            self._note(
                number
                for number in self._of_lane[index]
                if self._names[number] not in self._held_back
            )

    def _hold_back(self, lane: int, everything: bool) -> None:
        """Keeps received values off a lane's external writes."""
        self._held_back.update(self._suspected(lane))
        received, asked = self._lanes[lane].received, self._received_names(lane)
        if not (everything and received.holds(asked)):
            asked = [name for name in asked if name in self._held_back]
        found = received.differing(asked) if asked else {}
        self._held_back.difference_update(asked)
        self._held_back.update(received.slices.variable(name) for name in found)

    def suspected(self) -> set[str]:
        """The variables that may have been written since their lane's last step; some of them have
        not.
        """
        if self._uncounted:
            return set(self._names)
        found = set(self._held_back)
        for lane in self._lanes:
            found.update(self._suspected(lane))
        return found

    def start(self) -> None:
        """Starts anew after the servers' values have been received into all variables."""
        self.release()
        for lane in self._lanes:
            self.note_received(lane)

    def release(self) -> None:
        """Lets all variables receive values again."""
        self._held_back.clear()

    # ---- detection ----

    def _all_names(self, lane: int) -> list[str]:
        return [self._names[number] for number in self._of_lane[lane]]

    def _received_names(self, lane: int) -> list[str]:
        """The variables of a lane that receive values after a step."""
        updated = self._lanes[lane].received.slices.updated
        return [name for name in self._all_names(lane) if name in updated]

    def _note(self, numbers: Iterable[int]) -> None:
        listed = list(numbers)
        for number in listed:
            if self._counted[number]:
                self._versions[number] = self._tensors[number]._version
        self._samples.note(listed)

    def _suspects(self, lane: int) -> tuple[list[int], PendingLook]:
        """The numbers of the variables of a lane that may have been written: those whose counters
        have changed, and a look at the samples of the others.
        """
        versions, tensors, numbers = self._versions, self._tensors, self._of_lane[lane]
        counts = self._counted
        counted = [n for n in numbers if counts[n] and tensors[n]._version != versions[n]]
        return counted, self._samples.look(
            [n for n in numbers if n not in counted] if counted else numbers
        )

    def _suspected(self, lane: int) -> list[str]:
        """The variables of a lane that may have been written; the host waits for the devices."""
        counted, pending = self._suspects(lane)
        return self._checked([*counted, *pending.found()])

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

    def _seen(
        self, lane: int, written: set[str], counted: Iterable[str], uncounted: Iterable[str]
    ) -> None:
        """Notes that there are writes that no counter shows; warns if only the comparison of all
        elements has found one.
        """
        late = sorted(written.difference(counted, uncounted))
        self._uncounted = self._uncounted or bool(late or written.intersection(uncounted))
        step, since = self._steps[lane], self._compared[lane] + 1
        if late and since < step:
            log.warning(
                "trainer %d, step %d: %s was written through .data or numpy, in few elements, "
                "which only the comparison of everything has noticed; it takes effect now, and "
                "from now on everything is compared at each step.  What was written so in steps "
                "%d to %d may be lost",
                self._trainer,
                step,
                ", ".join(late),
                since,
                step - 1,
            )


def _is_regular(step: int) -> bool:
    """Whether all elements are compared in a step, whatever has been seen."""
    return step <= EARLY_STEPS or step % EVERY == 0
