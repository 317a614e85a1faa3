"""What a script writes into parameters beside its steps takes effect.

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
what has changed: see writes_between.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from trainer.communicator.lane import GradientLane, LaneSender
from trainer.communicator.samples import Samples
from trainer.communicator.writes_between import version

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
        """After a lane's step: notes what has landed."""
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
        """Nothing lands on what has been written in a lane."""
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
