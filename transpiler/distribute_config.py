"""The user's settings for transpiling, checked at every assignment."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transpiler.plan.placement import Dispatcher, RoundRobin
from transpiler.plan.plan import COMPRESSIONS
from transpiler.plan.settings import (
    A_SYNC_CONFIGS,
    Setting,
    ValueKind,
    count,
    dict_from_patterns,
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


def _dispatcher() -> ValueKind:
    words = "a class with a method dispatch (RoundRobin, HashName, SizeBalanced, or your own)"

    def check(name: str, value: Any) -> type[Any]:
        if not inspect.isclass(value):
            refuse_type(name, words, value)
        if not callable(getattr(value, "dispatch", None)):
            refuse_range(name, words, value)
        return value

    return ValueKind("class", "with a method dispatch", check)


# Keys of a strategy that are fields of the same name.  Embeddings move before a model is captured.
LANE_FIELDS = tuple(key for key in A_SYNC_CONFIGS if key != "embeddings")
# Where a field's default is not the strategy's: without a strategy a program's steps wait for
# their own results.
_DEFAULTS = {"send_queue_size": 1}
_ALSO = {"k_steps": (*_WITH_SERVERS, "collective")}  # which some modes without servers read

# What each field does: the attributes of DistributeTranspilerConfig.
FIELDS = table(
    *(
        replace(
            A_SYNC_CONFIGS[key],
            default=_DEFAULTS.get(key, A_SYNC_CONFIGS[key].default),
            modes=_ALSO.get(key, _WITH_SERVERS),
            lane="",
        )
        for key in LANE_FIELDS
    ),
    Setting("slice_var_up", True, flag(), modes=_WITH_SERVERS),
    Setting("split_method", RoundRobin, _dispatcher(), modes=_WITH_SERVERS),
    Setting("min_block_size", 8192, count(most=math.inf), modes=_WITH_SERVERS),
    Setting("mode", "pserver", text(*_EVERY), modes=_EVERY),
    Setting("enable_dc_asgd", False, flag(), modes=_WITH_SERVERS),
    Setting("print_log", False, flag(), modes=_EVERY),
    Setting("wait_port", True, flag(), modes=_EVERY),
    Setting("sync_mode", True, flag(), modes=_EVERY),
    Setting("completely_not_async", False, flag(), modes=_WITH_SERVERS),
    Setting("geo_sgd_mode", False, flag(), modes=_WITH_SERVERS),
    Setting("geo_sgd_need_push_nums", 100, count(), modes=_WITH_SERVERS),
    Setting(
        "compression",
        MappingProxyType({}),
        dict_from_patterns(text(*COMPRESSIONS), "a dict from patterns of names to schemes"),
        modes=_WITH_SERVERS,
    ),
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
    ("geo_sgd_mode", "k_steps"),
    ("half_async", "enable_dc_asgd"),
    ("completely_not_async", "enable_dc_asgd"),
)
# Each of these chooses an asynchronous mode, so that sync_mode need not be assigned.
NOT_SYNC = ("geo_sgd_mode", "half_async", "enable_dc_asgd", "k_steps", "dc_asgd")


class DistributeTranspilerConfig:
    """The settings of ``transpile``: plain data, checked at every assignment.

    The order of assignments never matters; ``transpile`` finds fields that contradict each other.

    Attributes:
        slice_var_up: cut large variables into slices, so that several servers share one.
        split_method: chooses the server of each slice: RoundRobin, HashName, SizeBalanced, or a
            class of the same interface.
        min_block_size: least number of elements of a slice.  Raising it means fewer and larger
            messages, and less even servers.
        sync_mode: servers wait for all trainers at every step.  ``transpile(sync_mode=...)``
            decides where it is given.
        wait_port: trainers wait, up to the start timeout, until the servers answer.
        print_log: ``transpile`` logs the plan (logger ``transpiler``, level INFO).
        half_async: a trainer waits for the result of its own step and for no other trainer.
        geo_sgd_mode: trainers step by themselves; every ``geo_sgd_need_push_nums`` steps the
            servers add their changes.
        enable_dc_asgd: asynchronous, with delay compensation (lambda 1). Each of these three
            chooses the mode: ``sync_mode`` need not be assigned, and must not be True.
        completely_not_async: sync; ``sync_mode`` and ``half_async`` are ignored.  The result is
            that of ``sync_mode=True``.
        runtime_split_send_recv: no split and concat ops: send and recv carry the sections.  Not
            with ``sync_mode=True``.
        k_steps, staleness, nonfinite, ...: the keys of a strategy's ``a_sync_configs``, but for
            ``embeddings``, as there: see docs/strategy_keys.md.
            ``send_queue_size`` is 1 unless assigned: a step waits for its own result.  ``k_steps``
            and ``dc_asgd`` above 0 choose the mode.
        compression: how gradients travel, by pattern of parameter names: "bfloat16", "float16",
            "int8", "sparse" (the elements that are not 0), or "" for uncompressed.
        mode: "pserver"; or without servers: "collective", whose programs average by themselves, and
            "nccl2", whose trainer program is the single-node one, for ``ParallelExecutor``.  A
            field without effect in the mode must keep its default.
        collective_mode: of "collective": "grad_allreduce" averages gradients at every step,
            "local_sgd" parameters after it, or after every ``k_steps`` steps.
        nccl_comm_num: the number of process groups ("rings"), which buckets of gradients take in
            turn.
        use_hierarchical_allreduce: reduce within each host, then between hosts (``plan/plan.py``).
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
    k_steps: int
    max_merge_var_num: int
    send_queue_size: int
    independent_recv_thread: bool
    min_send_grad_num_before_recv: int
    thread_pool_size: int
    send_wait_times: int
    soft_wait_ms: int
    launch_barrier: bool
    merge: str
    staleness: int | None
    dc_asgd: float
    outer_optimizer: Mapping[str, Any] | None
    modes: Mapping[str, str]
    overlap: bool
    compression: Mapping[str, str]
    completely_not_async: bool
    geo_sgd_mode: bool
    geo_sgd_need_push_nums: int
    nonfinite: str
    outlier_push: str
    outlier_factor: float
    lost_trainer: str
    buffers: str
    row_invalidation: bool
    look_ahead: int
    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    collective_mode: str | None

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def _set(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            refuse_name(type(self).__name__, name, FIELDS)
        super().__setattr__(name, FIELDS[name].kind.check(name, value))

    def _get(self, name: str) -> Any:
        """The default of a field that was not assigned."""
        if name not in FIELDS:
            refuse_name(type(self).__name__, name, FIELDS)
        return FIELDS[name].default

    if not TYPE_CHECKING:  # which takes the fields from the annotations
        __setattr__, __getattr__ = _set, _get

    def __repr__(self) -> str:
        assigned = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"DistributeTranspilerConfig({assigned})"

    def is_set(self, name: str) -> bool:
        """Whether the field was assigned, even to its default."""
        return name in vars(self)

    @property
    def has_servers(self) -> bool:
        """Whether the mode is one of a job with servers."""
        return self.mode in _WITH_SERVERS

    def sync_requested(self, sync_mode: bool | None = None) -> bool | None:
        """Whether the job is to be sync, by the configuration or ``transpile``; None if neither
        says so.

        Args:
            sync_mode: the argument of ``transpile``.

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
        return said

    def _check_combination(self, sync_mode: bool | None) -> None:
        """Raises ValueError if fields contradict each other; ``sync_mode`` is None if neither the
        configuration nor ``transpile`` was given one.
        """
        found = [
            f"{one}={getattr(self, one)!r} contradicts {other}={getattr(self, other)!r}: switch "
            "one of them off"
            for one, other in _EXCLUDE
            if getattr(self, one) and getattr(self, other)
        ]
        found += [
            f"{name}={getattr(self, name)!r} contradicts sync_mode=True: assign sync_mode=False"
            for name in (*NOT_SYNC, "runtime_split_send_recv")
            if getattr(self, name) and sync_mode
        ]
        if self.is_set("launch_barrier") and self.is_set("wait_port"):
            if self.launch_barrier != self.wait_port:
                found.append(
                    f"launch_barrier={self.launch_barrier} contradicts wait_port={self.wait_port}: "
                    "they mean one thing"
                )
        if self.is_set("geo_sgd_need_push_nums") and not self.geo_sgd_mode:
            found.append(
                f"geo_sgd_need_push_nums={self.geo_sgd_need_push_nums} has no effect with "
                "geo_sgd_mode=False: switch it on"
            )
        if found:
            raise ValueError("; ".join(found))

    def check_effects(self) -> None:
        """Checks that fields other than at their defaults have an effect in this mode, and that
        none is missing.

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
        if not self.has_servers and self.k_steps and self.collective_mode == "grad_allreduce":
            found.append(
                f"k_steps={self.k_steps} has no effect with collective_mode='grad_allreduce', but "
                "with 'local_sgd': leave it at 0"
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
