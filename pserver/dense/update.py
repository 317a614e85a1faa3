"""Update rules at work on slices: torch's own optimizers over a server's memory.

A server updates a slice of a parameter by the optimizer class that the user chose.  The result is
equal to the bit to that of the class over the whole parameter in one process: the two notes below
say what that takes.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transpiler.ir.rules import Hparam, Rule, make, rule_of, set_hparams, state_of

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

    @property
    def small(self) -> bool:
        """Whether the slice is one chunk, so that it may be one of :class:`SmallSlices`."""
        return len(self._chunks) == 1 and self._padded is None

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
        """Of one state; None if there is none of this name (yet)."""
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
    """Small slices of one rule, whose steps are one call of one optimizer: the call costs more than
    the arithmetic.

    torch's optimizers update one tensor after the other, each by itself, so the result is that of a
    call for each.  Each slice's state stays its updater's own: the common optimizer holds the same
    dictionaries.

    One caller at a time.

    Args:
        updaters: of one rule and one parameter group, all :attr:`SliceUpdater.small`.
    """

    def __init__(self, updaters: Sequence[SliceUpdater]) -> None:
        self._updaters = list(updaters)
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
        if self._common is None or any(
            now is None or now is not then for now, then in zip(own, self._own, strict=True)
        ):
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
