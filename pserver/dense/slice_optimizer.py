"""A rule at work on slices of parameters: torch's own optimizers over chunks of a server's memory.

[Note: chunks]  The default (single-tensor) form of torch's optimizers makes several passes over
memory.  Over chunks that stay in the cache it is bit-equal and about three times faster, so a slice
is given to the optimizer as chunks of 64 K elements.  The fused form and plain SGD make one pass
anyway and see the whole slice.

[Note: ends of tensors]  torch's kernels take a tensor in vectors of some elements and what is left
at its end one by one.  Where both round alike a slice may end anywhere: so it is with the default
form in float32 and float64.  With 16-bit floats, and with the fused form, they round differently.
There an element must be taken in a slice as it would be in the whole tensor: what a slice has
beyond its last full vector is padded to a vector, unless it belongs to the end of the whole tensor.
(A whole tensor of more than GRAIN elements has such an end for every thread; what is reproduced
here is a run with one thread.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """Where a slice is cut into chunks, and which of them must be padded, if any.

    See [Note: ends of tensors].
    """
    count, unit = values.numel(), _unit(rule, values.dtype)
    fused, half = rule.flags.get("fused", False), values.dtype in (torch.bfloat16, torch.float16)
    one_pass = fused or (rule.type == "sgd" and not rule.hparams.get("weight_decay"))
    longest = GRAIN if half and not fused else max(count, 1) if one_pass else CHUNK

    def cut(stop: int) -> list[tuple[int, int]]:
        return [(at, min(at + longest, stop)) for at in range(0, stop, longest)]

    # How many of the slice's elements the whole tensor's vector loop takes, and how many of them
    # fill whole vectors here.
    vector = min(max(total - total % unit - begin, 0), count)
    full = vector - vector % unit
    if full == vector or not (fused or half):
        return cut(count) or [(0, 0)], None
    spans = [*cut(full), (full, vector)]
    return spans + ([(vector, count)] if vector < count else []), len(spans) - 1


class SliceUpdater:
    """A rule at work on one flat slice of a parameter, in place.

    Args:
        rule: the numbers it holds are those of the first step until a row says otherwise.
        values: 1-D, contiguous, on the CPU, any number of elements (0 too): the server's memory of
            the slice.
        begin, total: the slice's first element in the parameter, and the parameter's number of
            elements; without them the slice is the whole parameter.  See [Note: ends of tensors].
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
        """The slice's chunks: views, but for one that is padded with zeros to a full vector."""
        chunks = [flat[start:stop] for start, stop in self._spans]
        if self._padded is not None:
            short = chunks[self._padded]
            chunks[self._padded] = torch.cat(
                [short, short.new_zeros(_unit(self.rule, short.dtype) - short.numel())]
            )
        return chunks

    def _made(self, row: Mapping[str, Hparam]) -> torch.optim.Optimizer:
        """The optimizer, made at the first step: Adagrad, Rprop and ASGD take initial state from
        the present numbers.
        """
        if self._optimizer is None:
            rule = Rule(self.rule.type, {**self.rule.hparams, **row}, self.rule.flags)
            self._optimizer = make(rule, self._chunks)
        else:
            set_hparams(self._optimizer, row)
        return self._optimizer

    def update(self, grad: Tensor, row: Mapping[str, Hparam]) -> None:
        """One step with a flat gradient of the slice's size and dtype, and the step's numbers."""
        optimizer = self._made(row)
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
        """Whether the slice is one chunk, so that it may step together with others: see
        :class:`SmallSlices`.
        """
        return len(self._chunks) == 1 and self._padded is None

    def state(self) -> dict[str, Tensor]:
        """Copies of the states: flat and whole where shaped like the slice, 0-dim for scalars; none
        before the first step.
        """
        if self._optimizer is None:
            return {}
        names = self._optimizer.state.get(self._chunks[0], {})
        found = {key: self.read(key) for key in names}
        return {key: value for key, value in found.items() if value is not None}

    def read(self, key: str) -> Tensor | None:
        """A copy of one state, as :meth:`state` has it; None if there is none of this name
        (yet).
        """
        states = (
            []
            if self._optimizer is None
            else [self._optimizer.state.get(chunk, {}) for chunk in self._chunks]
        )
        parts: list[Tensor] = [state[key] for state in states if isinstance(state.get(key), Tensor)]
        if not parts or not parts[0].dim():
            return parts[0].clone() if parts else None
        return torch.cat(
            [part[: stop - start] for part, (start, stop) in zip(parts, self._spans, strict=True)]
        )

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over copies of what ``state`` or :func:`slice_state` returned; an empty mapping is
        the state before any step.

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
        """Bytes of the slice and of its states."""
        states = [] if self._optimizer is None else list(self._optimizer.state.values())
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (self.values, *held))


class SmallSlices:
    """Small slices of one rule that take a step in one call of one optimizer: most of such a step
    is its call.

    torch's optimizers take one tensor after the other, each by itself, so the result is that of a
    call for each.  Each slice's state stays its updater's own: the common optimizer holds the same
    dictionaries.

    Args:
        updaters: of one rule and one row, all :attr:`SliceUpdater.small`.
    """

    def __init__(self, updaters: Sequence[SliceUpdater]) -> None:
        self._updaters = list(updaters)
        self._own: list[torch.optim.Optimizer] = []  # whose states the common one shares
        self._common: torch.optim.Optimizer | None = None

    def update(self, grads: Mapping[SliceUpdater, Tensor], row: Mapping[str, Hparam]) -> None:
        """One step of the slices that have a gradient (flat, of the slice's size and dtype), with
        the step's numbers.
        """
        optimizer = self._shared(row)
        for updater, grad in grads.items():
            updater._chunks[0].grad = grad
        optimizer.step()
        for updater in grads:
            updater._chunks[0].grad = None

    def _shared(self, row: Mapping[str, Hparam]) -> torch.optim.Optimizer:
        own = [updater._optimizer for updater in self._updaters]
        if self._common is None or any(
            now is None or now is not then for now, then in zip(own, self._own, strict=True)
        ):
            # of new slices, and of those whose state was loaded
            self._own = [updater._made(row) for updater in self._updaters]
            chunks = [updater._chunks[0] for updater in self._updaters]
            rule = self._updaters[0].rule
            self._common = make(Rule(rule.type, {**rule.hparams, **row}, rule.flags), chunks)
            for chunk, optimizer in zip(chunks, self._own, strict=True):
                self._common.state[chunk] = optimizer.state[chunk]
        set_hparams(self._common, row)
        return self._common


def slice_state(
    optimizer: torch.optim.Optimizer, param: Tensor, begin: int, end: int
) -> dict[str, Tensor]:
    """The part of a resumed optimizer's state that belongs to elements [begin, end) of a parameter:
    copies on the CPU, flat.

    Scalars come whole; a parameter that has not been stepped yet gives an empty dictionary.

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
