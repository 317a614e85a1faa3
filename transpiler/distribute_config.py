"""What the user may choose about transpiling, checked at every assignment."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transpiler.plan.placement import Dispatcher, RoundRobin
from transpiler.plan.plan import Lane


class UnknownField(AttributeError, ValueError):
    """A name that the configuration does not have: an AttributeError as Python has it, a ValueError
    as all mistakes of a user.
    """


@dataclass(frozen=True, slots=True)
class _Field:
    """A field's default, what it may be in words, whether a value has the type, and whether it is
    in range.
    """

    default: Any
    words: str
    typed: Callable[[Any], bool]
    valid: Callable[[Any], bool] = lambda value: True


def _switch(default: bool) -> _Field:
    return _Field(default, "True or False", lambda value: isinstance(value, bool))


def _count(default: int, least: int) -> _Field:
    def typed(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    return _Field(
        default, f"a whole number of at least {least}", typed, lambda value: value >= least
    )


def _choice(default: str | None, *words: str) -> _Field:
    names = ", ".join(map(repr, (*words, *([None] if default is None else []))))
    return _Field(
        default,
        f"one of {names}",
        lambda value: isinstance(value, str) or (value is None and default is None),
        lambda value: value is None or value in words,
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
    "mode": _choice("pserver", "pserver", "nccl2", "collective"),
    "enable_dc_asgd": _switch(False),
    "print_log": _switch(False),
    "wait_port": _switch(True),
    "runtime_split_send_recv": _switch(False),
    "sync_mode": _switch(True),
    "half_async": _switch(False),
    "completely_not_async": _switch(False),
    "geo_sgd_mode": _switch(False),
    "geo_sgd_need_push_nums": _count(100, 1),
    "nccl_comm_num": _count(1, 1),
    "use_hierarchical_allreduce": _switch(False),
    "hierarchical_allreduce_inter_nranks": _count(0, 0),
    "collective_mode": _choice(None, "grad_allreduce", "local_sgd"),
}

_OF_SERVERS = (
    *(
        "slice_var_up",
        "split_method",
        "min_block_size",
        "enable_dc_asgd",
        "runtime_split_send_recv",
    ),
    *("half_async", "completely_not_async", "geo_sgd_mode", "geo_sgd_need_push_nums"),
)
_OF_RINGS = ("nccl_comm_num", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
_WITHOUT_EFFECT = {
    "pserver": (*_OF_RINGS, "collective_mode"),
    "nccl2": (*_OF_SERVERS, "collective_mode"),
    "collective": _OF_SERVERS,
}
_EXCLUDE = (
    ("geo_sgd_mode", "half_async"),
    ("geo_sgd_mode", "enable_dc_asgd"),
    ("geo_sgd_mode", "completely_not_async"),
    ("geo_sgd_mode", "runtime_split_send_recv"),
    ("half_async", "enable_dc_asgd"),
    ("completely_not_async", "enable_dc_asgd"),
)
_NOT_SYNC = (
    "half_async",
    "enable_dc_asgd",
    "completely_not_async",
)  # by these a job runs over a queue; see runtime_split_send_recv


class DistributeTranspilerConfig:
    """How a program is split.  The order of assignments never matters; what contradicts is found by
    ``transpile``.

    Attributes:
        slice_var_up: cut large variables into slices, so that several servers share one.
        split_method: who gets which slice: RoundRobin, HashName, SizeBalanced, or a class of the
            same interface.
        min_block_size: least number of elements of a slice.  Raising it means fewer and larger
            messages, and less even servers.
        sync_mode: servers wait for all trainers at every step.  ``transpile(sync_mode=...)``
            decides where it is given.
        wait_port: trainers wait, with a deadline, until the servers answer.
        print_log: ``transpile`` logs the plan (logger ``transpiler``, level INFO).
        half_async: a trainer waits for the result of its own step and for no other trainer.
        geo_sgd_mode: trainers step by themselves; every ``geo_sgd_need_push_nums`` steps what
            changed is added on the servers.
        enable_dc_asgd: asynchronous, with delay compensation (lambda 1). These three say the mode
            themselves: ``sync_mode`` need not be assigned, and must not be True.
        completely_not_async: sync, whatever ``sync_mode`` and ``half_async`` say: the result is
            that of ``sync_mode=True``.
        runtime_split_send_recv: no split and concat ops: send and recv carry the sections.  Not
            with ``sync_mode=True``.
        mode: "pserver"; or without servers: "collective", whose programs share by themselves, and
            "nccl2", whose trainer program is the single-node one, for ``ParallelExecutor``.  What
            has no effect in a mode must be left alone there.
        collective_mode: of "collective": "grad_allreduce" averages gradients at every step,
            "local_sgd" parameters after it.
        nccl_comm_num: how many process groups ("rings") buckets of gradients take in turn.
        use_hierarchical_allreduce: reduce within each host, then between hosts (``comm_rings.py``).
        hierarchical_allreduce_inter_nranks: trainers in a row that reduce among themselves first; 0
            or 1: those of each host.

    Raises:
        AttributeError and ValueError (:class:`UnknownField`): an unknown name; the message has the
        closest known ones. TypeError: a value of another type. ValueError: a value out of range.
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
            raise TypeError(
                f"{name}: expected {field.words}, got {value!r} ({type(value).__name__})"
            )
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
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"the fields are {', '.join(_FIELDS)}"
        )
        return UnknownField(f"DistributeTranspilerConfig has no field {name!r}; {hint}")

    def is_set(self, name: str) -> bool:
        """Whether the field was assigned, be it to its default."""
        return name in vars(self)

    def lane(self, sync_mode: bool | None = None) -> Lane:
        """The one lane of a job that is transpiled with this configuration.

        Args:
            sync_mode: what ``transpile`` was given; None is as the configuration says.

        Raises:
            TypeError: ``sync_mode`` is no bool.
            ValueError: two fields contradict each other, or one has no effect because of another;
                the message names both.
        """
        if sync_mode is not None and not isinstance(sync_mode, bool):
            raise TypeError(f"sync_mode: expected True, False or None, got {sync_mode!r}")
        if sync_mode is not None and self.is_set("sync_mode") and sync_mode != self.sync_mode:
            raise ValueError(
                f"sync_mode: the configuration says {self.sync_mode} and transpile says {sync_mode}"
            )
        said = (
            sync_mode
            if sync_mode is not None
            else self.sync_mode
            if self.is_set("sync_mode")
            else None
        )
        self._check_combination(said)
        if self.geo_sgd_mode:
            return Lane("geo", k_steps=self.geo_sgd_need_push_nums)
        if self.completely_not_async:
            return Lane("sync")
        if self.half_async:
            return Lane("half_async")
        if self.enable_dc_asgd:
            return Lane("async", merge="auto", dc_asgd=1.0)
        return Lane("async", merge="auto") if said is False else Lane("sync")

    def _check_combination(self, sync_mode: bool | None) -> None:
        """Raises where two fields contradict each other; ``sync_mode`` is None where nobody has
        said it.
        """
        for one, other in _EXCLUDE:
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one}=True contradicts {other}=True: switch one of them off")
        for name in ("half_async", "geo_sgd_mode", "enable_dc_asgd", "runtime_split_send_recv"):
            if getattr(self, name) and sync_mode:
                raise ValueError(f"{name}=True contradicts sync_mode=True: assign sync_mode=False")
        if (
            self.geo_sgd_need_push_nums != _FIELDS["geo_sgd_need_push_nums"].default
            and not self.geo_sgd_mode
        ):
            raise ValueError(
                f"geo_sgd_need_push_nums={self.geo_sgd_need_push_nums} has no effect with "
                "geo_sgd_mode=False: switch it on"
            )
        if (
            self.runtime_split_send_recv
            and sync_mode is None
            and not any(getattr(self, name) for name in _NOT_SYNC)
        ):
            raise ValueError(
                "runtime_split_send_recv=True contradicts sync_mode=True, its default: assign "
                "sync_mode=False"
            )

    def check_effects(self) -> None:
        """Raises where a field has no effect in this mode, or the mode lacks one.

        Raises:
            ValueError: naming the field.
        """
        for name in _WITHOUT_EFFECT[self.mode]:
            default = _FIELDS[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with mode={self.mode!r}: leave "
                    f"it at {default!r}"
                )
        if self.mode == "collective" and self.collective_mode is None:
            raise ValueError(
                "collective_mode=None: expected 'grad_allreduce' or 'local_sgd' with "
                "mode='collective'"
            )
        if self.mode != "pserver" and not self.sync_mode:
            raise ValueError(
                f"sync_mode=False contradicts mode={self.mode!r}: trainers without servers step "
                "together"
            )
        inner = self.hierarchical_allreduce_inter_nranks
        if inner and not self.use_hierarchical_allreduce:
            raise ValueError(
                f"hierarchical_allreduce_inter_nranks={inner} has no effect with "
                "use_hierarchical_allreduce=False: switch it on"
            )
