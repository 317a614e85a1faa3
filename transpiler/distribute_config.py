"""What the user may choose about transpiling, checked at every assignment."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transpiler.placement import Dispatcher, RoundRobin


class UnknownField(AttributeError, ValueError):
    """A name that the configuration does not have: an AttributeError as Python has it, a ValueError as all mistakes of a user."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field's default, what it may be in words, whether a value has the type, and whether it is in range."""

    default: Any
    words: str
    typed: Callable[[Any], bool]
    valid: Callable[[Any], bool] = lambda value: True
    works: bool = True  # False: no value but the default has an effect yet, so transpile refuses it


def _switch(default: bool, works: bool = True) -> _Field:
    return _Field(default, "True or False", lambda value: isinstance(value, bool), works=works)


def _count(default: int, least: int, works: bool = True) -> _Field:
    def typed(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    return _Field(default, f"a whole number of at least {least}", typed, lambda value: value >= least, works)


def _choice(default: str | None, *words: str, works: bool = True) -> _Field:
    names = ", ".join(map(repr, (*words, *([None] if default is None else []))))
    return _Field(
        default,
        f"one of {names}",
        lambda value: isinstance(value, str) or (value is None and default is None),
        lambda value: value is None or value in words,
        works,
    )


_METHOD = _Field(
    RoundRobin,
    "a class with a method dispatch (RoundRobin, HashName, SizeBalanced, or your own)",
    inspect.isclass,
    lambda value: callable(getattr(value, "dispatch", None)),
)

_FIELDS: dict[str, _Field] = {
    "slice_var_up": _switch(True),
    "split_method": _METHOD,
    "min_block_size": _count(8192, 1),
    "mode": _choice("pserver", "pserver", "nccl2", "collective", works=False),
    "enable_dc_asgd": _switch(False, works=False),
    "print_log": _switch(False),
    "wait_port": _switch(True),
    "runtime_split_send_recv": _switch(False, works=False),
    "sync_mode": _switch(True),
    "half_async": _switch(False, works=False),
    "completely_not_async": _switch(False, works=False),
    "geo_sgd_mode": _switch(False, works=False),
    "geo_sgd_need_push_nums": _count(100, 1, works=False),
    "nccl_comm_num": _count(1, 1, works=False),
    "use_hierarchical_allreduce": _switch(False, works=False),
    "hierarchical_allreduce_inter_nranks": _count(0, 0, works=False),
    "collective_mode": _choice(None, "grad_allreduce", "local_sgd", works=False),
}


class DistributeTranspilerConfig:
    """How a program is split.  The order of assignments never matters; what contradicts is found by ``transpile``.

    Attributes:
        slice_var_up: cut large variables into slices, so that several servers share one.
        split_method: who gets which slice: RoundRobin, HashName, SizeBalanced, or a class of the same interface.
        min_block_size: least number of elements of a slice.  Raising it means fewer and larger messages, and less even servers.
        sync_mode: servers wait for all trainers at every step.  ``transpile(sync_mode=...)`` decides where it is given.
        wait_port: trainers wait, with a deadline, until the servers answer.
        print_log: ``transpile`` logs the plan (logger ``transpiler``, level INFO).
        mode, enable_dc_asgd, runtime_split_send_recv, half_async, completely_not_async, geo_sgd_mode, geo_sgd_need_push_nums,
        nccl_comm_num, use_hierarchical_allreduce, hierarchical_allreduce_inter_nranks, collective_mode: accepted names whose
            effect does not exist yet: ``transpile`` raises if one is set to anything but its default.

    Raises:
        AttributeError and ValueError (:class:`UnknownField`): an unknown name; the message has the closest known ones.
        TypeError: a value of another type.
        ValueError: a value out of range.
    """

    slice_var_up: bool
    split_method: type[Dispatcher]
    min_block_size: int
    mode: str
    enable_dc_asgd: bool
    print_log: bool
    wait_port: bool
    runtime_split_send_recv: bool
    sync_mode: bool
    half_async: bool
    completely_not_async: bool
    geo_sgd_mode: bool
    geo_sgd_need_push_nums: int
    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    collective_mode: str | None

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise self._unknown(name)
        field = _FIELDS[name]
        if not field.typed(value):
            raise TypeError(f"{name}: expected {field.words}, got {value!r} ({type(value).__name__})")
        if not field.valid(value):
            raise ValueError(f"{name}: expected {field.words}, got {value!r}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """The default of a field that was not assigned."""
        if name not in _FIELDS:
            raise self._unknown(name)
        return _FIELDS[name].default

    def __repr__(self) -> str:
        return f"DistributeTranspilerConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @staticmethod
    def _unknown(name: str) -> UnknownField:
        close = difflib.get_close_matches(name, _FIELDS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the fields are {', '.join(_FIELDS)}"
        return UnknownField(f"DistributeTranspilerConfig has no field {name!r}; {hint}")

    def is_set(self, name: str) -> bool:
        """Whether the field was assigned, be it to its default."""
        return name in vars(self)

    def check_effects(self) -> None:
        """Raises where a field asks for what does not exist yet.

        Raises:
            ValueError: naming the field.
        """
        for name, field in _FIELDS.items():
            if not field.works and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: this version has no such effect yet; leave it at {field.default!r}"
                )
