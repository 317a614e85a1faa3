"""How one slice is updated: the optimize block of a server's program, by the mode of the slice's
lane.  Pure arithmetic.

[Note: what arrives]  In the modes in which trainers step by themselves, what arrives is no
gradient.  In "geo" it is a part of what the trainer changed, and is added.  In "diloco" it is the
trainer's parameter itself, from which the server, which knows where everybody started, takes the
change: so no bits are lost on the way, and one trainer that synchronises at every step under an
outer SGD with rate 1 trains as it would alone, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from pserver.dense.slice_optimizer import SliceUpdater, SmallSlices
from transpiler.ir.rules import Hparam

# of slices that step in one call: enough for its cost, and for waking who receives them, not to
# count
JOINT_BYTES = 2**22


@dataclass(slots=True)
class SliceUpdate:
    """One slice's update.

    Attributes:
        slice: its name; ``parameter``: that it belongs to; ``group`` and ``lane``: their indices in
            the plan.
        value: the slice's memory, in its shape.
        updater: the rule at work; None where changes are added.
        states: state name -> variable name; ``shaped``: the states of the slice's own shape, the
            others are scalars.
        clip: limits of the merged gradient's values.
        scaled: the coefficient of the commit to multiply with: a parameter's name, "" for the
            global one, None for none.
        compensation: the factor lambda of delay compensation.
        together: the small slices that may take a step in one call, this one among them.
        compression: how gradients arrive; see compression.py.
    """

    slice: str
    parameter: str
    group: int
    lane: int
    value: torch.Tensor
    updater: SliceUpdater | None
    states: Mapping[str, str] = field(default_factory=dict)
    shaped: frozenset[str] = frozenset()
    clip: tuple[float, float] | None = None
    scaled: str | None = None
    compensation: float = 0.0
    together: SmallSlices | None = None
    compression: str = ""

    def update(
        self,
        gradient: torch.Tensor,
        row: Mapping[str, Hparam],
        scale: Mapping[str, float] | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        """Runs the block, in place.

        Args:
            gradient: merged, of the slice's shape and dtype; may be overwritten.
            row: the present numbers of the slice's parameter group.
            scale: the commit's clipping coefficients, where the block asks for one.
            before: the slice as the gradient's trainer last received it, where delays are
                compensated.
        """
        if self.updater is None:
            self.value.add_(gradient)
            return
        self._clip(gradient, scale)
        # Zheng et al.: Asynchronous SGD with delay compensation, 2017, eq. 10
        if self.compensation and before is not None:
            gradient.addcmul_(gradient * gradient, self.value - before, value=self.compensation)
        self.updater.update(gradient.view(-1), row)

    def _clip(self, gradient: torch.Tensor, scale: Mapping[str, float] | None) -> None:
        if self.clip is not None:
            gradient.clamp_(*self.clip)
        if self.scaled is not None and scale is not None:
            gradient.mul_(scale[self.scaled])

    def load(self, states: Mapping[str, torch.Tensor]) -> None:
        """Takes over states by name."""
        if self.updater is not None:
            self.updater.load_state(
                {
                    key: state.view(-1) if key in self.shaped else state
                    for key, state in states.items()
                }
            )

    def read(self, state: str) -> torch.Tensor | None:
        """One state, flat where it has the slice's shape; None before the first update."""
        return None if self.updater is None else self.updater.read(state)

    @property
    def bytes_held(self) -> int:
        """The slice and its states, in bytes."""
        return self.value.nbytes if self.updater is None else self.updater.bytes_held


@dataclass(slots=True)
class OuterEntry(SliceUpdate):
    """An outer optimizer's slice: ``updater`` works on ``wide``, in double precision.

    See [Note: what arrives].
    """

    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    def update(
        self,
        gradient: torch.Tensor,
        row: Mapping[str, Hparam],
        scale: Mapping[str, float] | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        """``gradient`` is the mean of the trainers' parameters; the outer rule's numbers are those
        of the plan.
        """
        assert self.updater is not None
        self.wide.copy_(self.value.view(-1))
        self.updater.update(self.wide - gradient.view(-1).double(), self.updater.rule.hparams)
        self.value.view(-1).copy_(self.wide)

    @property
    def bytes_held(self) -> int:
        """The slice, its double and the states, in bytes."""
        assert self.updater is not None
        return self.value.nbytes + self.updater.bytes_held


def update_all(
    entries: Mapping[str, SliceUpdate],
    gradients: Mapping[str, torch.Tensor],
    rows: Mapping[int, Mapping[str, Hparam]],
    scale: Mapping[str, float],
) -> None:
    """Runs the block of every slice that has a merged gradient, by name; small slices of one rule
    step in one call.
    """
    joint: dict[SmallSlices, tuple[dict[SliceUpdater, torch.Tensor], Mapping[str, Hparam]]] = {}
    for name, gradient in gradients.items():
        entry = entries[name]
        if entry.together is None or entry.updater is None:
            entry.update(gradient, rows[entry.group], scale)
        else:
            entry._clip(gradient, scale)
            joint.setdefault(entry.together, ({}, rows[entry.group]))[0][entry.updater] = (
                gradient.view(-1)
            )
    for together, (grads, row) in joint.items():
        together.update(grads, row)


def batches(entries: Mapping[str, SliceUpdate]) -> list[tuple[str, ...]]:
    """The names of all slices: those that step in one call together, every other by itself."""
    joint: dict[SmallSlices | str, list[str]] = {}
    for name, entry in entries.items():
        joint.setdefault(entry.together or name, []).append(name)
    return [tuple(names) for names in joint.values()]


def join_small(entries: Iterable[SliceUpdate]) -> None:
    """Finds the small slices that share a rule, and lets as many of them step together as make
    ``JOINT_BYTES``.
    """
    alike: dict[tuple[object, ...], list[tuple[SliceUpdate, SliceUpdater]]] = {}
    for entry in entries:
        updater = entry.updater
        if (
            updater is not None
            and updater.small
            and type(entry) is SliceUpdate
            and not entry.compensation
        ):
            key = (
                entry.lane,
                entry.group,
                updater.rule.type,
                tuple(sorted(updater.rule.flags.items())),
                entry.value.dtype,
            )
            alike.setdefault(key, []).append((entry, updater))
    for members in (some for all_alike in alike.values() for some in _split(all_alike)):
        together = SmallSlices([updater for _, updater in members])
        for entry, _ in members if len(members) > 1 else ():
            entry.together = together


def _split(
    members: list[tuple[SliceUpdate, SliceUpdater]],
) -> list[list[tuple[SliceUpdate, SliceUpdater]]]:
    ends = itertools.accumulate(entry.value.nbytes for entry, _ in members)
    paired = zip(ends, members, strict=True)
    return [
        [member for _, member in some]
        for _, some in itertools.groupby(paired, lambda pair: pair[0] // JOINT_BYTES)
    ]
