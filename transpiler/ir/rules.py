"""torch.optim instances as update rules of programs, and rules as torch.optim instances over
slices.

What a rule does to one element must depend on that element's own parameter, gradient and state (and
on numbers common to all): only then may a parameter be cut anywhere.  ``RULES`` lists the classes
of which we know that.  No arithmetic is written here: a server runs the very class that the user
chose.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.decayed_adagrad import DecayedAdagrad
from transpiler.optim.ftrl import Ftrl
from transpiler.plan.plan import Hparam, Rule

CHUNK = 65536  # elements
GRAIN = 32768  # elements that torch never divides among threads


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One optimizer op: the class that implements it, the numbers a schedule may move, the flags
    that never change.

    Both are keys of a parameter group and keyword arguments of the class.
    """

    cls: type[torch.optim.Optimizer]
    hparams: tuple[str, ...]
    flags: tuple[str, ...] = ()


_SGD = RuleSpec(
    torch.optim.SGD,
    ("lr", "momentum", "dampening", "weight_decay"),
    ("nesterov", "maximize", "foreach", "fused"),
)
_ADAM_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_ADAM_FLAGS = ("amsgrad", "maximize", "foreach", "fused")
_PLAIN = ("maximize", "foreach")

RULES: Mapping[str, RuleSpec] = MappingProxyType(
    {
        "sgd": _SGD,
        "momentum": _SGD,  # the same class; a program shows whether there is a velocity
        "adam": RuleSpec(torch.optim.Adam, _ADAM_NUMBERS, (*_ADAM_FLAGS, "decoupled_weight_decay")),
        "adamw": RuleSpec(torch.optim.AdamW, _ADAM_NUMBERS, _ADAM_FLAGS),
        "adamax": RuleSpec(torch.optim.Adamax, _ADAM_NUMBERS, _PLAIN),
        "nadam": RuleSpec(
            torch.optim.NAdam,
            (*_ADAM_NUMBERS, "momentum_decay"),
            (*_PLAIN, "decoupled_weight_decay"),
        ),
        "radam": RuleSpec(torch.optim.RAdam, _ADAM_NUMBERS, (*_PLAIN, "decoupled_weight_decay")),
        "adagrad": RuleSpec(
            torch.optim.Adagrad,
            ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
            (*_PLAIN, "fused"),
        ),
        "adadelta": RuleSpec(torch.optim.Adadelta, ("lr", "rho", "eps", "weight_decay"), _PLAIN),
        "rmsprop": RuleSpec(
            torch.optim.RMSprop,
            ("lr", "alpha", "eps", "weight_decay", "momentum"),
            ("centered", *_PLAIN),
        ),
        "rprop": RuleSpec(torch.optim.Rprop, ("lr", "etas", "step_sizes"), _PLAIN),
        "asgd": RuleSpec(torch.optim.ASGD, ("lr", "lambd", "alpha", "t0", "weight_decay"), _PLAIN),
        "ftrl": RuleSpec(Ftrl, ("lr", "l1", "l2", "lr_power", "beta")),
        "decayed_adagrad": RuleSpec(DecayedAdagrad, ("lr", "decay", "eps")),
    }
)

_REFUSED = {
    torch.optim.LBFGS: "LBFGS evaluates the loss several times a step and its direction mixes all "
    "parameters",
    torch.optim.Adafactor: "Adafactor factors second moments over whole rows and columns, so a "
    "slice cannot be updated alone",
    torch.optim.Muon: "Muon orthogonalises whole matrices, so a slice cannot be updated alone",
    torch.optim.SparseAdam: "SparseAdam takes sparse gradients only, and dense parameters have "
    "dense ones; use Adam",
}


def _type_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """The op type for this group.

    Exact classes only: what a subclass changes, nobody here can know.
    """
    cls = type(optimizer)
    for op_type, spec in RULES.items():
        if spec.cls is cls:
            return "momentum" if op_type == "sgd" and group["momentum"] != 0 else op_type
    known = ", ".join(dict.fromkeys(spec.cls.__name__ for spec in RULES.values()))
    if cls in _REFUSED:
        raise ValueError(f"{_REFUSED[cls]}. Rules that can be cut into slices: {known}")
    base = next((spec.cls.__name__ for spec in RULES.values() if issubclass(cls, spec.cls)), None)
    why = (
        f"is a subclass of {base} whose step may differ"
        if base
        else "is not known to update each element by itself"
    )
    raise ValueError(
        f"optimizer {cls.__module__}.{cls.__qualname__} {why}. Rules that can be cut into slices: "
        f"{known}"
    )


def _number(key: str, value: Any) -> Hparam:
    if isinstance(value, tuple | list):
        return tuple(float(item) for item in value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: expected one number, got a tensor of shape {tuple(value.shape)}")
    return float(value)


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update rule of one of the optimizer's parameter groups, with the group's present numbers.

    A flag that the user left at None (``foreach``, ``fused``) is left out, which keeps torch's own
    choice.

    Raises:
        ValueError: the rule is not element-wise, or asks for capturable or differentiable steps;
            the message says why.
    """
    op_type = _type_of(optimizer, group)
    for key, why in (
        ("capturable", "CUDA graphs"),
        ("differentiable", "gradients through the step"),
    ):
        if group.get(key):
            raise ValueError(
                f"{type(optimizer).__name__}({key}=True): a parameter server's step does not "
                f"support {why}"
            )
    flags = {key: bool(group[key]) for key in RULES[op_type].flags if group.get(key) is not None}
    return Rule(op_type, hparams_of(op_type, group), flags)


def hparams_of(op_type: str, group: Mapping[str, Any]) -> dict[str, Hparam]:
    """The present numbers of a parameter group: what a step carries.  A number that is None is left
    out.

    A number that the user holds as a tensor becomes a float.  torch computes with a tensor in the
    tensor's precision and with a float in double, so the step may then differ from the user's
    optimizer's in the last bits.

    Raises:
        KeyError: ``op_type`` is not in ``RULES``.
    """
    hparams = RULES[op_type].hparams
    return {key: _number(key, group[key]) for key in hparams if group.get(key) is not None}


def state_of(rule: Rule) -> dict[str, bool]:
    """The names of a rule's states: True where the state has the parameter's shape, False for a
    scalar.

    Found by a step of the real class on a tiny tensor, so that it follows torch.  No random numbers
    are drawn.
    """
    probe = torch.zeros(2)
    probe.grad = torch.zeros(2)
    optimizer = make(rule, [probe])
    optimizer.step()
    return {
        key: value.shape == probe.shape
        for key, value in optimizer.state[probe].items()
        if isinstance(value, Tensor)
    }


def make(rule: Rule, params: list[Tensor]) -> torch.optim.Optimizer:
    """The rule's own torch.optim class over these tensors, as one group.  They need not require
    gradients: set ``.grad``.

    Raises:
        ValueError: the rule's type is unknown, or torch refuses one of its numbers.
    """
    if rule.type not in RULES:
        raise ValueError(f"expected an optimizer op among {', '.join(RULES)}, got {rule.type!r}")
    cls: Callable[..., torch.optim.Optimizer] = RULES[rule.type].cls
    return cls(params, **rule.hparams, **rule.flags)


def set_hparams(optimizer: torch.optim.Optimizer, row: Mapping[str, Hparam]) -> None:
    """Writes a step's numbers into every group of the optimizer."""
    for group in optimizer.param_groups:
        group.update(row)


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
