"""Propagates in-place parameter writes made outside of ``optimizer.step()``.

[Note: what a script writes]  Parameters are the script's: it loads the best model, clamps weights,
swaps averages in and out.  The servers step, so that what it writes must reach them.  Nothing says
when a script writes; it is noticed by what has changed since values last landed in a parameter:

::

    counted      torch counts in-place operations on a tensor (``_version``)
    uncounted    writes through ``.data`` and numpy: 1,024 sampled elements of each tensor; all of
                 them in steps 1 to 3 and every 1,000th, and always once such a write has been seen

A tensor that may have been written is compared with what last landed in it, bit by bit; equal sends
nothing.  What differs is assigned on the servers, by the trainer's next step and before its
gradients; states of optimizers stay.  Until then nothing lands on a tensor that differs: an average
that was swapped in for an evaluation stands, and swapped out again it equals what landed.

What last landed is known so: a lane whose values arrive beside the parameters keeps the memory that
they arrived in.  In a sync lane the servers have it until the next step: their checksums say what
differs.  A lane whose values arrive in the parameters themselves, and whose servers others step
meanwhile, keeps a copy of each landing once a first write has been seen; for that first write the
servers' values are taken, which are what landed if nobody has stepped since.

In the k-step modes the script's own optimizer steps, and what the script writes leaves as a part of
what has changed: see writes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trainer.senders.pipeline import GradientLane, LaneSender

# ---- samples ----
#
# Some elements of each of many tensors, always the same ones: has anything been written?
#
# A tensor counts the operations that write to it; writes through ``.data`` and through numpy are in
# no counter.  Reading every tensor whole takes too long for every step, so 1,024 of its elements
# are read, in places that look random and stay.  A tensor of fewer elements is read whole.  What
# takes time is memory that is in no cache, a line at a time, so that four elements lie side by
# side.


SAMPLED = 1024  # elements of a tensor
BESIDE = 4  # of them side by side
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class _Place:
    """Where a tensor's elements are."""

    __slots__ = ("_pointer", "_strides")

    def __init__(self, tensor: Tensor) -> None:
        self._pointer, self._strides = tensor.data_ptr(), tensor.stride()

    def moved(self, tensor: Tensor) -> bool:
        """Whether the tensor has other memory now."""
        return tensor.data_ptr() != self._pointer or tensor.stride() != self._strides


class _OnHost(_Place):
    """The sampled elements of one tensor in main memory."""

    __slots__ = ("_memory", "_noted", "_now", "_offsets")

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        super().__init__(tensor)
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


class _OnDevice(_Place):
    """The sampled elements of one tensor on a device."""

    __slots__ = ("_memory", "_noted", "_offsets")

    def __init__(self, tensor: Tensor, positions: np.ndarray) -> None:
        super().__init__(tensor)
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
    """The sampled elements of some live tensors, as they were noted last; :meth:`note` comes first.
    One thread uses it.

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
        tensors, sampled = self._tensors, self._sampled
        for number in numbers:
            if sampled[number].moved(tensors[number]):
                sampled[number] = self._bound(number)
            sampled[number].note()

    def changed(self, numbers: Iterable[int]) -> list[int]:
        """Those of the tensors of which an element is another one than was noted, or whose memory
        has been exchanged.
        """
        tensors, sampled = self._tensors, self._sampled
        return [n for n in numbers if sampled[n].moved(tensors[n]) or sampled[n].changed()]

    def _bound(self, number: int) -> _OnHost | _OnDevice:
        tensor, positions = self._tensors[number].detach(), self._positions[number]
        return (_OnHost if tensor.device.type == "cpu" else _OnDevice)(tensor, positions)


def _positions(count: int, seed: int) -> np.ndarray:
    """Ascending positions of the sampled elements in a tensor of so many: int64 [n]."""
    if count <= SAMPLED:
        return np.arange(count)
    # a run in each of 256 equal parts, at a place that looks random
    bounds = np.linspace(0, count // BESIDE, SAMPLED // BESIDE + 1).astype(np.int64)
    starts = np.random.default_rng(seed).integers(bounds[:-1], bounds[1:]) * BESIDE
    return np.asarray((starts[:, None] + np.arange(BESIDE)).reshape(-1))


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


# ---- writes between ----
#
# Whether a script has written into some parameters since its last step: in the lanes whose steps
# the script's own optimizer takes.
#
# There what is written leaves with the next message, as a part of what has changed.  Until the next
# step nothing lands on it, and files that have the servers' values lack it.


class WritesBetween:
    """Compares counters and sampled elements with those at the last :meth:`note`.

    The script's thread calls it.

    Args:
        tensors: the live ones by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._samples = Samples(list(self._tensors.values()))
        self._versions: list[int] = []  # as noted; none before the first note

    def note(self) -> None:
        """A step is over, or values have landed."""
        self._versions = [version(tensor) for tensor in self._tensors.values()]
        self._samples.note(range(len(self._tensors)))

    def names(self) -> list[str]:
        """The tensors that have been written since the last note.

        Of writes that no counter tells of, those into sampled elements.
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
    """How many operations have written to a tensor, as torch counts them."""
    return 0 if tensor.is_inference() else tensor._version


# ---- written values ----


log = logging.getLogger(__name__)

EARLY_STEPS, EVERY = 3, 1000  # the steps in which everything is compared


class WrittenValues:
    """Finds what a script has written.  See [Note: what a script writes].

    The script's thread calls it; with ``overlap`` also autograd's.

    Args:
        lanes: all; those count whose servers step.
        names: the variables of each of them, by its index.
        tensors: the live ones by name.
        held_back: names of variables that nothing lands on, which it changes.
        trainer: this one's number, for messages.
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
        self._versions = [version(tensor) for tensor in self._tensors]
        self._held_back = held_back
        self._steps = dict.fromkeys(self._lanes, 0)  # begun, by lane
        self._begun: set[int] = set()  # lanes whose step is not over
        self._compared = dict.fromkeys(
            self._lanes, 0
        )  # the last step in which everything was compared
        self._uncounted = False  # a write has been seen that no counter tells of

    # ---- a step ----

    def begin(self, lane: int) -> None:
        """Before anything of a lane's step is sent: what has been written becomes a part of the
        step.  Until the step is over later calls do nothing.

        Raises:
            ValueError: a parameter's shape or dtype is another one than the job's.
        """
        if lane in self._lanes and lane not in self._begun:
            self._begun.add(lane)
            self._steps[lane] += 1
            self._look(lane)

    def look_again(self) -> None:
        """Before steps are closed of which gradients have left during backward: the script may have
        written since.
        """
        for lane in self._begun:
            self._look(lane)

    def _look(self, lane: int) -> None:
        step, landed = self._steps[lane], self._lanes[lane].landed
        counted, uncounted = self._suspects(lane)
        self._held_back.update(counted, uncounted)
        suspects = (
            [name for name in self._all_names(lane) if name in self._held_back]
            if self._held_back
            else []
        )
        everything = self._compares_everything(step) and landed.holds(self._landing(lane))
        asked = suspects
        if everything and _is_regular(step):
            asked = self._all_names(lane)
        elif everything:  # parameters that servers only hold are asked for, which takes long
            asked = list(dict.fromkeys([*self._landing(lane), *suspects]))
        found = landed.differing(asked) if asked else {}
        if found:
            self._lanes[lane].assign(found)
            written = {landed.slices.variable(name) for name in found}
            self._seen(lane, written, counted, uncounted)
        self._held_back.difference_update(suspects)
        if suspects or found:
            self._note(self._of_lane[lane])
        if everything:
            self._compared[lane] = step

    def landed(self, lane: int) -> None:
        """Notes the received values after a lane's step."""
        if lane in self._lanes:
            self._begun.discard(lane)
            self._keep(lane)
            self._note(self._of_lane[lane])

    def _compares_everything(self, step: int) -> bool:
        return self._uncounted or _is_regular(step)

    def _keep(self, lane: int) -> None:
        """Keeps copies of what has landed in a lane, where the next comparison will need them."""
        landed = self._lanes[lane].landed
        if landed.keeps_memory:
            return
        if landed.keeps_copies or self._compares_everything(self._steps[lane] + 1):
            landed.copy(self._landing(lane))
        else:
            landed.forget()

    # ---- between steps ----

    @contextmanager
    def landing(self, lane: int | None = None, pulled: bool = False) -> Iterator[None]:
        """While it lasts something lands without a step: not on what has been written.

        Args:
            lane: what has arrived there lands, which is so often that only counters and samples are
                looked at; None: anything may land, and where it is known what landed before, all of
                it is compared.
            pulled: it lands in the parameters themselves, in every lane.
        """
        chosen = [
            index
            for index, sender in self._lanes.items()
            if sender.landed.between_steps and (lane is None or (index == lane and sender.arrived))
        ]
        for index in chosen:
            self._hold_back(index, everything=lane is None)
        yield
        for index in chosen:
            landed = self._lanes[index].landed
            free = [name for name in self._landing(index) if name not in self._held_back]
            if landed.holds(free) and (pulled or not landed.keeps_memory):
                landed.copy(free)
            self._note(
                number
                for number in self._of_lane[index]
                if self._names[number] not in self._held_back
            )

    def _hold_back(self, lane: int, everything: bool) -> None:
        """Keeps received values off a lane's external writes."""
        counted, uncounted = self._suspects(lane)
        self._held_back.update(counted, uncounted)
        landed, asked = self._lanes[lane].landed, self._landing(lane)
        if not (everything and landed.holds(asked)):
            asked = [name for name in asked if name in self._held_back]
        found = landed.differing(asked) if asked else {}
        self._held_back.difference_update(asked)
        self._held_back.update(landed.slices.variable(name) for name in found)

    def suspected(self) -> set[str]:
        """The variables that may have been written since their lane's last step, some of which have
        not.
        """
        if self._uncounted:
            return set(self._names)
        found = set(self._held_back)
        for lane in self._lanes:
            counted, uncounted = self._suspects(lane)
            found.update(counted, uncounted)
        return found

    def start(self) -> None:
        """The servers' values have landed in all variables."""
        self.release()
        for lane in self._lanes:
            self.landed(lane)

    def release(self) -> None:
        """All variables receive values again."""
        self._held_back.clear()

    # ---- noticing ----

    def _all_names(self, lane: int) -> list[str]:
        return [self._names[number] for number in self._of_lane[lane]]

    def _landing(self, lane: int) -> list[str]:
        """The variables of a lane in which values land after a step."""
        landed = self._lanes[lane].landed
        return [name for name in self._all_names(lane) if landed.slices.trains(name)]

    def _note(self, numbers: Iterable[int]) -> None:
        listed = list(numbers)
        for number in listed:
            self._versions[number] = version(self._tensors[number])
        self._samples.note(listed)

    def _suspects(self, lane: int) -> tuple[list[str], list[str]]:
        """The variables of a lane that may have been written: those whose counters say so, and
        others whose samples do.
        """
        versions, tensors, numbers = self._versions, self._tensors, self._of_lane[lane]
        counted = [n for n in numbers if version(tensors[n]) != versions[n]]
        uncounted = self._samples.changed(
            [n for n in numbers if n not in counted] if counted else numbers
        )
        for number in (*counted, *uncounted):
            self._check_form(number)
        return [self._names[n] for n in counted], [self._names[n] for n in uncounted]

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
        """Notes that there are writes that no counter tells of; warns where only the comparison of
        everything has noticed one.
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
    """Whether everything is compared in a step whatever has been seen."""
    return step <= EARLY_STEPS or step % EVERY == 0
