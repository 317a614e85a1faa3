"""Merging and updating slices: the mean over trainers, and torch's own optimizers over a server's
memory.

[Note: chunks]  The default (single-tensor) form of torch's optimizers makes several passes over
memory.  Over chunks that stay in the cache it is bit-equal and about three times faster, so the
optimizer gets a slice as chunks of 64 K elements.  The fused form and plain SGD make one pass
anyway and get the whole slice.

[Note: ends of tensors]  torch's kernels update a tensor in vectors of some elements, and the
elements after the last full vector one by one.  Where both round alike, a slice may end anywhere:
so it is with the default form in float32 and float64.  With 16-bit floats, and with the fused form,
they round differently.  There an element of a slice must be updated as it would be in the whole
tensor: the elements after a slice's last full vector are padded to a vector, unless they are at the
end of the whole tensor, too.  (torch divides a whole tensor of more than GRAIN elements among
threads, and each thread's part has such an end; the slices reproduce a run with one thread.)

[Note: merge order]  Floating-point sums depend on their order.  A server sums gradients in the
order of their trainers, not of their arrival, and then divides by the number of trainers that
committed the step.  So a run repeats to the bit; and a parameter for which a trainer has no
gradient counts as zero there, as it would in the gradient of the concatenated batch.

[Note: sums of halves]  Gradients of bfloat16 or float16 are summed in float32, and rounded once.
Summed in their own dtype they would be rounded once for each further trainer and once more by the
division: a relative error (root mean square) of 0.0025 with 4 trainers in bfloat16 and 0.0031 with
8, instead of 0.0017 with any number; and a sum of float16 may overflow where the mean does not.
With two trainers nothing changes in bfloat16: one sum is rounded once either way, and halving is
exact.  It costs no time: a chunk's sum stays in the cache.

[Note: what arrives]  In the modes in which trainers step by themselves, what arrives is not a
gradient.  In "geo" it is a part of what the trainer changed, and the server adds it.  In "diloco"
it is the trainer's parameter itself: the server, which knows where every trainer started, subtracts
it.  So no bits are lost on the way, and one trainer that synchronises at every step under an outer
SGD with rate 1 trains as it would alone, to the bit.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from transpiler.ir.rules import Clip, Hparam, Rule, make, rule_of, set_hparams, state_of

# ---- slice optimizer ----
#
# Update rules at work on slices: torch's own optimizers over a server's memory.
#
# A server updates a slice of a parameter by the optimizer class that the user chose.  The result is
# equal to the bit to that of the class over the whole parameter in one process: the two notes below
# say what that takes.


CHUNK = 65536  # elements
GRAIN = 32768  # elements that torch never divides among threads


def _unit(rule: Rule, dtype: torch.dtype) -> int:
    """Elements of a kernel's vector loop.  See [Note: ends of tensors]."""
    return (32 if rule.flags.get("fused") else 64) // dtype.itemsize


def _spans(
    rule: Rule, values: Tensor, begin: int, total: int
) -> tuple[list[tuple[int, int]], int | None]:
    """The chunks of a slice, as pairs (begin, end), and which of them must be padded, if any.

    See [Note: ends of tensors].
    """
    count, unit = values.numel(), _unit(rule, values.dtype)
    if rule.update is not None or rule.whole:
        return [(0, count)], None  # a RuleOptimizer cuts by itself, so that ends never matter
    fused, half = rule.flags.get("fused", False), values.dtype in (torch.bfloat16, torch.float16)
    one_pass = fused or (rule.type == "sgd" and not rule.hparams.get("weight_decay"))
    longest = GRAIN if half and not fused else max(count, 1) if one_pass else CHUNK

    def cut(stop: int) -> list[tuple[int, int]]:
        return [(at, min(at + longest, stop)) for at in range(0, stop, longest)]

    # How many of the slice's elements the whole tensor's vector loop updates, and how many of them
    # fill whole vectors here.
    vector = min(max(total - total % unit - begin, 0), count)
    full = vector - vector % unit
    if full == vector or not (fused or half):
        return cut(count) or [(0, 0)], None
    spans = [*cut(full), (full, vector)]
    return spans + ([(vector, count)] if vector < count else []), len(spans) - 1


class SliceUpdater:
    """Updates one flat slice of a parameter by a rule, in place, and holds its optimizer state.

    One caller at a time.

    Args:
        rule: its hparams are those of a step that gives no others.
        values: 1-D, contiguous, on the CPU, of any number of elements (0 too): the server's memory
            of the slice.
        begin: the slice's first element in the parameter.  See [Note: ends of tensors].
        total: the parameter's number of elements; None: the slice is the whole parameter.

    Attributes:
        rule: as given.
        values: the same memory.
        small: the slice is one chunk, so that it may be one of :class:`SmallSlices`.
    """

    def __init__(
        self, rule: Rule, values: Tensor, begin: int = 0, total: int | None = None
    ) -> None:
        assert values.dim() == 1 and values.is_contiguous(), "a slice is flat"
        self.rule = rule
        self.values = values.detach()  # a leaf, as torch.optim wants it
        self._optimizer: torch.optim.Optimizer | None = None
        self._spans, self._padded = _spans(
            rule, self.values, begin, values.numel() if total is None else total
        )
        self._chunks = self._cut(self.values)
        self.small = len(self._chunks) == 1 and self._padded is None

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor's chunks: views, but for one that is padded with zeros to a full vector."""
        chunks = [flat[start:stop] for start, stop in self._spans]
        if self._padded is not None:
            short = chunks[self._padded]
            chunks[self._padded] = torch.cat(
                [short, short.new_zeros(_unit(self.rule, short.dtype) - short.numel())]
            )
        return chunks

    def _made(self, hparams: Mapping[str, Hparam]) -> torch.optim.Optimizer:
        """The optimizer, with these hparams.  It is made at the first step, as Adagrad, Rprop and
        ASGD take initial state from that step's hparams.
        """
        if self._optimizer is None:
            rule = replace(self.rule, hparams={**self.rule.hparams, **hparams})
            self._optimizer = make(rule, self._chunks)
        else:
            set_hparams(self._optimizer, hparams)
        return self._optimizer

    def update(self, grad: Tensor, hparams: Mapping[str, Hparam]) -> None:
        """Takes one step.

        Args:
            grad: flat, of the slice's size and dtype.
            hparams: of the step; one that is missing stays as it was.
        """
        optimizer = self._made(hparams)
        if self.small:
            self._chunks[0].grad = grad
        else:
            for chunk, part in zip(self._chunks, self._cut(grad), strict=True):
                chunk.grad = part
        if self._padded is None:
            optimizer.step()
        else:
            start, stop = self._spans[self._padded]
            padded = self._chunks[self._padded]
            padded[: stop - start].copy_(self.values[start:stop])
            optimizer.step()
            self.values[start:stop].copy_(padded[: stop - start])
        for chunk in self._chunks:
            chunk.grad = None

    def state(self) -> dict[str, Tensor]:
        """Copies of the states, by name; none before the first step.

        Returns:
            1-D tensors of the slice's size where the state has the parameter's shape, 0-D scalars.
        """
        if self._optimizer is None:
            return {}
        names = self._optimizer.state.get(self._chunks[0], {})
        found = {key: self.read(key) for key in names}
        return {key: value for key, value in found.items() if value is not None}

    def read(self, key: str, out: Tensor | None = None) -> Tensor | None:
        """A copy of one state, as :meth:`state` has it; None if there is none of this name
        (yet).

        ``out``: flat, of the state's size and dtype: where the copy is made.
        """
        parts = self._parts(key)
        if not parts:
            return None
        if not parts[0].dim():
            return parts[0].clone() if out is None else out.copy_(parts[0])
        parts = [
            part[: stop - start] for part, (start, stop) in zip(parts, self._spans, strict=True)
        ]
        if out is None:
            return torch.cat(parts)
        for part, (start, stop) in zip(parts, self._spans, strict=True):
            out[start:stop].copy_(part)
        return out

    def dtype_of(self, key: str) -> torch.dtype | None:
        """The dtype of one state; None if there is none of this name (yet)."""
        parts = self._parts(key)
        return parts[0].dtype if parts else None

    def _parts(self, key: str) -> list[Tensor]:
        states = (
            []
            if self._optimizer is None
            else [self._optimizer.state.get(chunk, {}) for chunk in self._chunks]
        )
        return [state[key] for state in states if isinstance(state.get(key), Tensor)]

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over copies of states.

        Args:
            state: what :meth:`state` or :func:`slice_state` returned; empty before any step.

        Raises:
            ValueError: a state has neither the slice's number of elements nor none; nothing is
                changed then.
        """
        for key, value in state.items():
            if value.dim() and value.shape != self.values.shape:
                raise ValueError(
                    f"state {key}: expected {self.values.numel()} elements or a scalar, got "
                    f"{tuple(value.shape)}"
                )
        self._optimizer = None
        if not state:
            return
        optimizer = self._made({})
        whole = {key: value.detach().clone() for key, value in state.items()}
        parts = {key: self._cut(value) for key, value in whole.items() if value.dim()}
        for index, chunk in enumerate(self._chunks):
            optimizer.state[chunk] = {
                key: parts[key][index] if value.dim() else value.clone()
                for key, value in whole.items()
            }

    @property
    def bytes_held(self) -> int:
        """Memory of the slice and of its states, in bytes."""
        states = [] if self._optimizer is None else list(self._optimizer.state.values())
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (self.values, *held))


class SmallSlices:
    """Small slices that are updated in one go, as each call costs more than its arithmetic: those
    of one rule in one call of one optimizer.

    torch's optimizers update one tensor after the other, each by itself, so the result is that of a
    call for each.  Each slice's state stays its updater's own: the common optimizer holds the same
    dictionaries.

    One caller at a time.

    Args:
        updaters: of one rule and one parameter group, all :attr:`SliceUpdater.small`; none: the
            slices are updated one after the other.

    Attributes:
        joint: whether a step of them is one call.
    """

    def __init__(self, updaters: Sequence[SliceUpdater] = ()) -> None:
        self._updaters = list(updaters)
        self.joint = bool(updaters)
        self._own: list[torch.optim.Optimizer] = []  # whose states the common one shares
        self._common: torch.optim.Optimizer | None = None

    def update(self, grads: Mapping[SliceUpdater, Tensor], hparams: Mapping[str, Hparam]) -> None:
        """Takes one step of those slices that have a gradient.

        Args:
            grads: for each such slice a flat gradient of its size and dtype.
            hparams: of the step; one that is missing stays as it was.
        """
        optimizer = self._shared(hparams)
        for updater, grad in grads.items():
            updater._chunks[0].grad = grad
        optimizer.step()
        for updater in grads:
            updater._chunks[0].grad = None

    def _shared(self, hparams: Mapping[str, Hparam]) -> torch.optim.Optimizer:
        """The common optimizer, made anew where a slice's own is new or was loaded."""
        own = [updater._optimizer for updater in self._updaters]
        if self._common is None or not all(map(operator.is_, own, self._own)):
            self._own = [updater._made(hparams) for updater in self._updaters]
            chunks = [updater._chunks[0] for updater in self._updaters]
            rule = self._updaters[0].rule
            self._common = make(replace(rule, hparams={**rule.hparams, **hparams}), chunks)
            for chunk, optimizer in zip(chunks, self._own, strict=True):
                self._common.state[chunk] = optimizer.state[chunk]
        set_hparams(self._common, hparams)
        return self._common


def slice_state(
    optimizer: torch.optim.Optimizer, param: Tensor, begin: int, end: int
) -> dict[str, Tensor]:
    """The part of a resumed optimizer's state that belongs to a slice.

    Args:
        optimizer: has the parameter in one of its groups.
        param: the whole parameter.
        begin: the slice's first element.
        end: the element after its last.

    Returns:
        Copies on the CPU by name, flat; scalars are whole.  Empty before the parameter's first
        step.

    Raises:
        ValueError: the parameter is not the optimizer's, or the rule cannot be sliced.
    """
    group = next(
        (group for group in optimizer.param_groups if any(param is own for own in group["params"])),
        None,
    )
    if group is None:
        raise ValueError("slice_state: expected a parameter of this optimizer, got another tensor")
    shaped = state_of(rule_of(optimizer, group))
    found: dict[str, Tensor] = {}
    for key, value in optimizer.state.get(param, {}).items():
        if value is None:
            continue
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        tensor = tensor.reshape(-1)[begin:end] if shaped.get(key, False) else tensor.reshape(())
        found[key] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return found


# ---- merge ----
#
# The merged gradient of a sync update: the mean over trainers, and clipping coefficients.


CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def mean(gradients: Sequence[torch.Tensor], committed: int, averages: bool = True) -> torch.Tensor:
    """The sum of the gradients, in the order given, divided by the number of trainers that
    committed.

    Args:
        gradients: at least one contiguous tensor, all of one shape and dtype, in trainer order.
            The first one is overwritten.
        committed: trainers that committed the step, with or without this gradient.
        averages: False leaves the sum as it is.

    Returns:
        The first tensor, which now holds the result.
    """
    if committed > 1:
        chunks = (
            [gradient] if gradient.numel() <= CHUNK else torch.split(gradient.view(-1), CHUNK)
            for gradient in gradients
        )
        half = gradients[0].dtype in (torch.bfloat16, torch.float16)
        # a chunk stays in the cache from one operation to the next
        for first, *others in zip(*chunks, strict=True):
            total = first.float() if half else first  # see [Note: sums of halves]
            for other in others:
                total.add_(other)
            if averages:
                total.mul_(1.0 / committed)
            if half:
                first.copy_(total)
    return gradients[0]


def squared_norm(gradient: torch.Tensor) -> float:
    """The sum of squares, in double precision."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64).item()) ** 2


def clip_coefficients(clip: Clip, parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The factors that clip merged gradients, from the servers' partial squared norms.

    Args:
        clip: ``"norm"`` or ``"global_norm"``.
        parts: for each server, by server index: parameter name -> sum of squares over the slices
            that it holds.

    Returns:
        A coefficient <= 1 for each parameter name; for the global norm one under the name ``""``.
    """
    squared: dict[str, float] = {}
    for part in parts:
        for name in sorted(part):
            squared[name] = squared.get(name, 0.0) + part[name]
    if clip.kind == "global_norm":
        squared = {"": math.fsum(squared[name] for name in sorted(squared))}
    return {
        name: min(1.0, clip.high / (math.sqrt(value) + CLIP_EPSILON))
        for name, value in squared.items()
    }


# ---- slice update ----
#
# The update of one slice: an optimize block of a server's program, by its lane's mode.


# Bytes of the slices that step in one call: so many that the call, and waking the trainers that
# receive the slices, cost little beside the arithmetic.
JOINT_BYTES = 2**22


@dataclass(slots=True)
class SliceUpdate:
    """The update of one slice, with its memory.

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
        small_slices: the slices that are updated in one go, this one among them; None: it is
            updated by itself.
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
        """The dtype of one state; None before the first update."""
        return None if self.updater is None else self.updater.dtype_of(state)

    @property
    def bytes_held(self) -> int:
        """Memory of the slice and its states, in bytes."""
        return self.value.nbytes if self.updater is None else self.updater.bytes_held


@dataclass(slots=True)
class OuterSliceUpdate(SliceUpdate):
    """The update of one slice by an outer optimizer ("diloco").  See [Note: what arrives].

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
    scale: Mapping[str, float] | None = None,
    before: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Updates every slice that has a gradient; small slices of one rule in one call.

    Args:
        updates: slice name -> update, of at least these slices.
        gradients: slice name -> gradient, merged where trainers step together; may be overwritten.
        hparams: parameter group -> hparams of this step.
        scale, before: as of :meth:`SliceUpdate.update`; ``before`` by slice name.
    """
    joint: dict[SmallSlices, tuple[dict[SliceUpdater, torch.Tensor], Mapping[str, Hparam]]] = {}
    for name, gradient in gradients.items():
        update = updates[name]
        small_slices, updater = update.small_slices, update.updater
        if small_slices is None or updater is None or not small_slices.joint:
            update.update(gradient, hparams[update.group], scale, before.get(name))
        else:
            if update.clip is not None or update.scaled is not None:
                update.clip_gradient(gradient, scale)
            grads, _ = joint.setdefault(small_slices, ({}, hparams[update.group]))
            grads[updater] = gradient.view(-1)
    for small_slices, (grads, own) in joint.items():
        small_slices.update(grads, own)


def batches(updates: Mapping[str, SliceUpdate]) -> list[tuple[str, ...]]:
    """The names of all slices: those that are updated in one go together, every other by itself."""
    joint: dict[SmallSlices | str, list[str]] = {}
    for name, update in updates.items():
        joint.setdefault(update.small_slices or name, []).append(name)
    return [tuple(names) for names in joint.values()]


def join_small(updates: Iterable[SliceUpdate]) -> None:
    """Finds the small slices of a lane, those apart that share a rule, and joins as many as make
    ``JOINT_BYTES``: sets their ``small_slices``.
    """
    alike: dict[tuple[object, ...], list[SliceUpdate]] = {}
    for update in updates:
        rule = _joint_rule(update)
        if rule is not None:
            key = update.group, rule.type, *sorted(rule.flags.items()), update.value.dtype
            alike.setdefault((update.lane, *key), []).append(update)
        elif update.value.numel() <= CHUNK:
            alike.setdefault((update.lane,), []).append(update)
    for members in (some for all_alike in alike.values() for some in _split(all_alike)):
        joint = _joint_rule(members[0]) is not None
        updaters = [each.updater for each in members if each.updater is not None] if joint else ()
        small_slices = SmallSlices(updaters)
        for update in members if len(members) > 1 else ():
            update.small_slices = small_slices


def _joint_rule(update: SliceUpdate) -> Rule | None:
    """The rule of a slice that may take its step in one call with others; None: it may not."""
    updater = update.updater
    if updater is None or not updater.small or update.compensation:
        return None
    return updater.rule if type(update) is SliceUpdate else None


def _split(members: list[SliceUpdate]) -> list[list[SliceUpdate]]:
    """Divides slices, in order, into lists of about ``JOINT_BYTES``."""
    ends = itertools.accumulate(update.value.nbytes for update in members)
    paired = zip(ends, members, strict=True)
    return [
        [member for _, member in some]
        for _, some in itertools.groupby(paired, lambda pair: pair[0] // JOINT_BYTES)
    ]
