"""The update of one slice: an optimize block of a server's program, by its lane's mode.

[Note: what arrives]  In the modes in which trainers step by themselves, what arrives is not a
gradient.  In "geo" it is a part of what the trainer changed, and the server adds it.  In "diloco"
it is the trainer's parameter itself: the server, which knows where every trainer started, subtracts
it.  So no bits are lost on the way, and one trainer that synchronises at every step under an outer
SGD with rate 1 trains as it would alone, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from pserver.dense.slice_optimizer import SliceUpdater, SmallSlices
from transpiler.ir.rules import Hparam

# Bytes of the slices that step in one call: so many that the call, and waking the trainers that
# receive the slices, cost little beside the arithmetic.
JOINT_BYTES = 2**22


@dataclass(slots=True)
class SliceUpdate:
    """How one slice is updated, with its memory.

    One caller at a time.

    Attributes:
        slice: the slice's name.
        parameter: the name of the parameter that it is of.
        group: index of the parameter group in the plan.
        lane: index of the lane in the plan.
        value: the slice's memory, in its shape.
        updater: applies the rule to that memory; None where changes are added.
        states: state name -> variable name.
        shaped: the states of the slice's own shape; the others are scalars.
        clip: the lower and upper limit of the merged gradient's values; None: there are none.
        scaled: which clipping coefficient of the commit multiplies the gradient: that of a
            parameter's name, "" for the global one; None: none does.
        compensation: the factor lambda of delay compensation; 0: there is none.
        compression: how gradients arrive; see compression.py.
        small_slices: the slices that take a step in one call, this one among them; None: it takes
            its steps by itself.
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
    compression: str = ""
    small_slices: SmallSlices | None = None

    def update(
        self,
        gradient: torch.Tensor,
        hparams: Mapping[str, Hparam],
        scale: Mapping[str, float] | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        """Updates the slice, in place.

        Args:
            gradient: merged, of the slice's shape and dtype; may be overwritten.
            hparams: of the slice's parameter group, at this step.
            scale: the commit's clipping coefficients, where ``scaled`` names one.
            before: the slice as the gradient's trainer last received it, where delays are
                compensated.
        """
        if self.updater is None:
            self.value.add_(gradient)
            return
        self.clip_gradient(gradient, scale)
        # Zheng et al.: Asynchronous SGD with delay compensation, 2017, eq. 10
        if self.compensation and before is not None:
            gradient.addcmul_(gradient * gradient, self.value - before, value=self.compensation)
        self.updater.update(gradient.view(-1), hparams)

    def clip_gradient(self, gradient: torch.Tensor, scale: Mapping[str, float] | None) -> None:
        """Clips a merged gradient, in place; ``scale``: as of :meth:`update`."""
        if self.clip is not None:
            gradient.clamp_(*self.clip)
        if self.scaled is not None and scale is not None:
            gradient.mul_(scale[self.scaled])

    def load(self, states: Mapping[str, torch.Tensor]) -> None:
        """Takes over copies of states, by state name."""
        if self.updater is not None:
            self.updater.load_state(
                {
                    key: state.view(-1) if key in self.shaped else state
                    for key, state in states.items()
                }
            )

    def read(self, state: str, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """A copy of one state, flat where it has the slice's shape; None before the first update.

        ``out``: flat, of its size and dtype: where the copy is made.
        """
        return None if self.updater is None else self.updater.read(state, out)

    def dtype_of(self, state: str) -> torch.dtype | None:
        """Of one state; None before the first update."""
        return None if self.updater is None else self.updater.dtype_of(state)

    @property
    def bytes_held(self) -> int:
        """Memory of the slice and its states, in bytes."""
        return self.value.nbytes if self.updater is None else self.updater.bytes_held


@dataclass(slots=True)
class OuterSliceUpdate(SliceUpdate):
    """How an outer optimizer updates one slice ("diloco").  See [Note: what arrives].

    Attributes:
        wide: float64 or complex128, flat: the memory that ``updater`` works on.
    """

    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    def update(
        self,
        gradient: torch.Tensor,
        hparams: Mapping[str, Hparam],
        scale: Mapping[str, float] | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        """As of :class:`SliceUpdate`, but that ``gradient`` is the mean of the trainers'
        parameters, and that the outer rule's hparams are those of the plan.
        """
        assert self.updater is not None
        self.wide.copy_(self.value.view(-1))
        change = self.wide - gradient.view(-1).to(self.wide.dtype)
        self.updater.update(change, self.updater.rule.hparams)
        self.value.view(-1).copy_(self.wide)

    @property
    def bytes_held(self) -> int:
        """Memory of the slice, of ``wide`` and of the states, in bytes."""
        assert self.updater is not None
        return self.value.nbytes + self.updater.bytes_held


def update_all(
    updates: Mapping[str, SliceUpdate],
    gradients: Mapping[str, torch.Tensor],
    hparams: Mapping[int, Mapping[str, Hparam]],
    scale: Mapping[str, float],
) -> None:
    """Updates every slice that has a merged gradient; small slices of one rule in one call.

    Args:
        updates: slice name -> update, of at least these slices.
        gradients: slice name -> merged gradient; may be overwritten.
        hparams: parameter group -> hparams of this step.
        scale: the commit's clipping coefficients.
    """
    joint: dict[SmallSlices, tuple[dict[SliceUpdater, torch.Tensor], Mapping[str, Hparam]]] = {}
    for name, gradient in gradients.items():
        update = updates[name]
        if update.small_slices is None or update.updater is None:
            update.update(gradient, hparams[update.group], scale)
        else:
            update.clip_gradient(gradient, scale)
            grads, _ = joint.setdefault(update.small_slices, ({}, hparams[update.group]))
            grads[update.updater] = gradient.view(-1)
    for small_slices, (grads, own) in joint.items():
        small_slices.update(grads, own)


def batches(updates: Mapping[str, SliceUpdate]) -> list[tuple[str, ...]]:
    """The names of all slices: those that step in one call together, every other by itself."""
    joint: dict[SmallSlices | str, list[str]] = {}
    for name, update in updates.items():
        joint.setdefault(update.small_slices or name, []).append(name)
    return [tuple(names) for names in joint.values()]


def join_small(updates: Iterable[SliceUpdate]) -> None:
    """Finds the small slices that share a rule, and joins as many as make ``JOINT_BYTES``: sets
    their ``small_slices``.
    """
    alike: dict[tuple[object, ...], list[tuple[SliceUpdate, SliceUpdater]]] = {}
    for update in updates:
        updater = update.updater
        if (
            updater is not None
            and updater.small
            and type(update) is SliceUpdate
            and not update.compensation
        ):
            key = (
                update.lane,
                update.group,
                updater.rule.type,
                tuple(sorted(updater.rule.flags.items())),
                update.value.dtype,
            )
            alike.setdefault(key, []).append((update, updater))
    for members in (some for all_alike in alike.values() for some in _split(all_alike)):
        small_slices = SmallSlices([updater for _, updater in members])
        for update, _ in members if len(members) > 1 else ():
            update.small_slices = small_slices


def _split(
    members: list[tuple[SliceUpdate, SliceUpdater]],
) -> list[list[tuple[SliceUpdate, SliceUpdater]]]:
    """Divides the slices that share a rule, in order, into lists of about ``JOINT_BYTES``."""
    ends = itertools.accumulate(update.value.nbytes for update, _ in members)
    paired = zip(ends, members, strict=True)
    return [
        [member for _, member in some]
        for _, some in itertools.groupby(paired, lambda pair: pair[0] // JOINT_BYTES)
    ]
