"""The choices of a user about transpiling, checked at every assignment."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

from transpiler.plan.lane_plan import AUTO
from transpiler.plan.lane_settings import A_SYNC_CONFIGS
from transpiler.plan.modes import ASYNC, GEO, HALF_ASYNC, SYNC
from transpiler.plan.placement import Dispatcher, RoundRobin
from transpiler.plan.plan import Lane
from transpiler.plan.setting import (
    Kind,
    Setting,
    count,
    flag,
    optional,
    refuse_name,
    refuse_range,
    refuse_type,
    table,
    text,
)

_WITH_SERVERS = ("pserver",)
_WITHOUT = ("nccl2", "collective")
_EVERY = (*_WITH_SERVERS, *_WITHOUT)


def _dispatcher() -> Kind:
    words = "a class with a method dispatch (RoundRobin, HashName, SizeBalanced, or your own)"

    def check(name: str, value: Any) -> type[Any]:
        if not inspect.isclass(value):
            refuse_type(name, words, value)
        if not callable(getattr(value, "dispatch", None)):
            refuse_range(name, words, value)
        return value

    return Kind("class", "with a method dispatch", check)


# What each field does: the attributes of DistributeTranspilerConfig.
FIELDS = table(
    Setting("slice_var_up", True, flag(), modes=_WITH_SERVERS),
    Setting("split_method", RoundRobin, _dispatcher(), modes=_WITH_SERVERS),
    Setting("min_block_size", 8192, count(most=math.inf), modes=_WITH_SERVERS),
    Setting("mode", "pserver", text(*_EVERY), modes=_EVERY),
    Setting("enable_dc_asgd", False, flag(), modes=_WITH_SERVERS),
    Setting("print_log", False, flag(), modes=_EVERY),
    Setting("wait_port", True, flag(), modes=_EVERY),
    Setting("runtime_split_send_recv", False, flag(), modes=_WITH_SERVERS),
    Setting("sync_mode", True, flag(), modes=_EVERY),
    Setting("half_async", False, flag(), modes=_WITH_SERVERS),
    Setting("completely_not_async", False, flag(), modes=_WITH_SERVERS),
    Setting("geo_sgd_mode", False, flag(), modes=_WITH_SERVERS),
    Setting("geo_sgd_need_push_nums", 100, count(), modes=_WITH_SERVERS),
    Setting("nonfinite", "auto", A_SYNC_CONFIGS["nonfinite"].kind, modes=_WITH_SERVERS),
    Setting("buffers", "trainer0", A_SYNC_CONFIGS["buffers"].kind, modes=_WITH_SERVERS),
    Setting("nccl_comm_num", 1, count(), modes=_WITHOUT),
    Setting("use_hierarchical_allreduce", False, flag(), modes=_WITHOUT),
    Setting("hierarchical_allreduce_inter_nranks", 0, count(least=0), modes=_WITHOUT),
    Setting(
        "collective_mode",
        None,
        optional(text("grad_allreduce", "local_sgd")),
        modes=("collective",),
    ),
)
_EXCLUDE = (
    ("geo_sgd_mode", "half_async"),
    ("geo_sgd_mode", "enable_dc_asgd"),
    ("geo_sgd_mode", "completely_not_async"),
    ("geo_sgd_mode", "runtime_split_send_recv"),
    ("half_async", "enable_dc_asgd"),
    ("completely_not_async", "enable_dc_asgd"),
)
# Each of these chooses how a job runs, so that sync_mode need not be assigned beside
# runtime_split_send_recv.
_NOT_SYNC = ("half_async", "enable_dc_asgd", "completely_not_async")


class DistributeTranspilerConfig:
    """How ``transpile`` splits a program: plain data, checked at every assignment.

    The order of assignments never matters; ``transpile`` finds fields that contradict each other.

    Attributes:
        slice_var_up: cut large variables into slices, so that several servers share one.
        split_method: which server gets which slice: RoundRobin, HashName, SizeBalanced, or a class
            of the same interface.
        min_block_size: least number of elements of a slice.  Raising it means fewer and larger
            messages, and less even servers.
        sync_mode: servers wait for all trainers at every step.  ``transpile(sync_mode=...)``
            decides where it is given.
        wait_port: trainers wait, up to the start timeout, until the servers answer.
        print_log: ``transpile`` logs the plan (logger ``transpiler``, level INFO).
        half_async: a trainer waits for the result of its own step and for no other trainer.
        geo_sgd_mode: trainers step by themselves; every ``geo_sgd_need_push_nums`` steps what
            changed is added on the servers.
        enable_dc_asgd: asynchronous, with delay compensation (lambda 1). These three say the mode
            themselves: ``sync_mode`` need not be assigned, and must not be True.
        completely_not_async: sync; ``sync_mode`` and ``half_async`` do not count.  The result is
            that of ``sync_mode=True``.
        runtime_split_send_recv: no split and concat ops: send and recv carry the sections.  Not
            with ``sync_mode=True``.
        nonfinite: what servers do with a step that has a NaN or an infinity in it: "refuse",
            "apply" or "stop"; "auto" applies it in sync mode and refuses it in the others.
        buffers: whose buffers (batch norm's running statistics) all trainers have: "trainer0",
            "mean" or "own".
        mode: "pserver"; or without servers: "collective", whose programs share by themselves, and
            "nccl2", whose trainer program is the single-node one, for ``ParallelExecutor``.  A
            field without effect in the mode must keep its default.
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
    nonfinite: str
    buffers: str
    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    collective_mode: str | None

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            refuse_name(type(self).__name__, name, FIELDS)
        super().__setattr__(name, FIELDS[name].kind.check(name, value))

    def __getattr__(self, name: str) -> Any:
        """The default of a field that was not assigned."""
        if name not in FIELDS:
            refuse_name(type(self).__name__, name, FIELDS)
        return FIELDS[name].default

    def __repr__(self) -> str:
        assigned = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"DistributeTranspilerConfig({assigned})"

    def is_set(self, name: str) -> bool:
        """Whether the field was assigned, if only to its default."""
        return name in vars(self)

    @property
    def has_servers(self) -> bool:
        """Whether the mode is one of a job with servers."""
        return self.mode in _WITH_SERVERS

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
            sync_mode if sync_mode is not None or not self.is_set("sync_mode") else self.sync_mode
        )
        self._check_combination(said)
        return replace(self._lane(said), nonfinite=self.nonfinite, buffers=self.buffers)

    def _lane(self, said: bool | None) -> Lane:
        """The lane of the mode, by ``sync_mode`` as it was said."""
        if self.geo_sgd_mode:
            return Lane(GEO.name, k_steps=self.geo_sgd_need_push_nums)
        if self.completely_not_async:
            return Lane(SYNC.name)
        if self.half_async:
            return Lane(HALF_ASYNC.name)
        if self.enable_dc_asgd:
            return Lane(ASYNC.name, merge=AUTO, dc_asgd=1.0)
        return Lane(ASYNC.name, merge=AUTO) if said is False else Lane(SYNC.name)

    def _check_combination(self, sync_mode: bool | None) -> None:
        """Raises where fields contradict each other; ``sync_mode`` is None where neither the
        configuration nor ``transpile`` was given one.
        """
        found = [
            f"{one}=True contradicts {other}=True: switch one of them off"
            for one, other in _EXCLUDE
            if getattr(self, one) and getattr(self, other)
        ]
        found += [
            f"{name}=True contradicts sync_mode=True: assign sync_mode=False"
            for name in ("half_async", "geo_sgd_mode", "enable_dc_asgd", "runtime_split_send_recv")
            if getattr(self, name) and sync_mode
        ]
        if (
            self.geo_sgd_need_push_nums != FIELDS["geo_sgd_need_push_nums"].default
            and not self.geo_sgd_mode
        ):
            found.append(
                f"geo_sgd_need_push_nums={self.geo_sgd_need_push_nums} has no effect with "
                "geo_sgd_mode=False: switch it on"
            )
        if (
            self.runtime_split_send_recv
            and sync_mode is None
            and not any(getattr(self, name) for name in (*_NOT_SYNC, "geo_sgd_mode"))
        ):
            found.append(
                "runtime_split_send_recv=True contradicts sync_mode=True, its default: assign "
                "sync_mode=False"
            )
        if found:
            raise ValueError("; ".join(found))

    def check_effects(self) -> None:
        """Raises where fields have no effect in this mode, or the mode lacks one.

        Raises:
            ValueError: naming all of these fields.
        """
        found = [
            f"{name}={getattr(self, name)!r} has no effect with mode={self.mode!r}, but with "
            f"{' or '.join(map(repr, field.modes))}: leave it at {field.default!r}"
            for name, field in FIELDS.items()
            if self.mode not in field.modes and getattr(self, name) != field.default
        ]
        if self.mode in FIELDS["collective_mode"].modes and self.collective_mode is None:
            found.append(
                "collective_mode=None: expected 'grad_allreduce' or 'local_sgd' with "
                "mode='collective'"
            )
        if not self.has_servers and not self.sync_mode:
            found.append(
                f"sync_mode=False contradicts mode={self.mode!r}: trainers without servers step "
                "together"
            )
        inner = self.hierarchical_allreduce_inter_nranks
        if inner and not self.use_hierarchical_allreduce and not self.has_servers:
            found.append(
                f"hierarchical_allreduce_inter_nranks={inner} has no effect with "
                "use_hierarchical_allreduce=False: switch it on"
            )
        if found:
            raise ValueError("; ".join(found))
