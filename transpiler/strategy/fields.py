"""The switches of a :class:`DistributedStrategy` as one table: name, type, range and default of
every property and key.

What a switch does is written where it is done; here stands only what may be assigned.  Defaults are
those of the documentation.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from transpiler.distribute_config import UnknownField

Checker = Callable[[str, Any], Any]  # (the full name, what was assigned) -> the value kept


@dataclass(frozen=True, slots=True)
class Field:
    """One switch: its default, and the check that every assignment passes."""

    default: Any
    check: Checker


def refuse_type(name: str, words: str, value: Any) -> NoReturn:
    """Raises the TypeError for a value of another type."""
    raise TypeError(f"{name}: expected {words}, got {value!r} ({type(value).__name__})")


def refuse_range(name: str, words: str, value: Any) -> NoReturn:
    """Raises the ValueError for a value of the right type that is out of range."""
    raise ValueError(f"{name}: expected {words}, got {value!r}")


def refuse_name(owner: str, name: object, known: Collection[str]) -> NoReturn:
    """Raises the error for a name that does not exist, with the closest ones that do."""
    close = difflib.get_close_matches(str(name), known, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
    raise UnknownField(f"{owner} has no {name!r}: {hint}")


# ---- kinds ----


def _flag(default: bool = False) -> Field:
    def check(name: str, value: Any) -> bool:
        return value if isinstance(value, bool) else refuse_type(name, "True or False", value)

    return Field(default, check)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(default: int, least: int = 1, most: int = 2**31 - 1, none: int | None = None) -> Field:
    """A whole number; ``none`` is one more that means "not set"."""

    def check(name: str, value: Any) -> int:
        if not _is_int(value):
            refuse_type(name, "a whole number", value)
        if not least <= value <= most and value != none:
            words = (
                f"a whole number of {least} or more"
                if most == 2**31 - 1
                else f"a whole number of {least} to {most}"
            )
            refuse_range(name, words + ("" if none is None else f", or {none}"), value)
        return int(value)

    return Field(default, check)


def _real(default: float, valid: Callable[[float], bool], words: str) -> Field:
    def check(name: str, value: Any) -> float:
        if not _is_int(value) and not isinstance(value, float):
            refuse_type(name, words, value)
        if not math.isfinite(value) or not valid(value):
            refuse_range(name, words, value)
        return float(value)

    return Field(default, check)


def _above(default: float, bound: float = 0.0) -> Field:
    return _real(default, lambda value: value > bound, f"a number above {bound:g}")


def _from(default: float, least: float = 0.0) -> Field:
    return _real(default, lambda value: value >= least, f"a number of {least:g} or more")


def _text(default: str = "", *choices: str) -> Field:
    words = "one of " + ", ".join(map(repr, choices)) if choices else "a text"

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            refuse_type(name, words, value)
        return value if not choices or value in choices else refuse_range(name, words, value)

    return Field(default, check)


def _list(item: Field, default: tuple[Any, ...] = (), least: int = 0) -> Field:
    def check(name: str, value: Any) -> tuple[Any, ...]:
        if value is None and least == 0:
            value = ()
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if len(value) < least:
            refuse_range(name, f"a list of {least} or more", value)
        return tuple(item.check(f"{name}[{index}]", entry) for index, entry in enumerate(value))

    return Field(default, check)


def _axes() -> Field:
    default = ("dp", "pp", "sharding", "sep", "mp")

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if sorted(map(str, value)) != sorted(default):
            refuse_range(name, f"each of {', '.join(default)} once", value)
        return tuple(value)

    return Field(default, check)


def _average() -> Field:
    def check(name: str, value: Any) -> bool:
        if isinstance(value, str):
            return (
                value == "avg"
                if value in ("avg", "sum")
                else refuse_range(name, "True, False, 'avg' or 'sum'", value)
            )
        return (
            value
            if isinstance(value, bool)
            else refuse_type(name, "True, False, 'avg' or 'sum'", value)
        )

    return Field(True, check)


def _staleness() -> Field:
    count = _count(0, least=0)
    return Field(None, lambda name, value: None if value is None else count.check(name, value))


def _modes() -> Field:
    mode = _text(
        "", "sync", "async", "half_async", "geo", "k_steps", "k_step", "diloco", "collective"
    )

    def check(name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            refuse_type(name, "a dict from patterns of parameter names to modes", value)
        pattern = _text()
        return {
            pattern.check(f"{name}: pattern", key): mode.check(f"{name}[{key!r}]", word)
            for key, word in value.items()
        }

    return Field(MappingProxyType({}), check)


OUTER_OPTIMIZER: Mapping[str, Field] = MappingProxyType(
    {
        "type": _text("sgd", "sgd", "nesterov", "adam"),
        "lr": _above(1.0),
        "momentum": _real(0.0, lambda value: 0 <= value < 1, "a number of 0 or more and below 1"),
    }
)


def _outer_optimizer() -> Field:
    def check(name: str, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            refuse_type(name, "a dict with type, lr and momentum, or None", value)
        defaults = {key: field.default for key, field in OUTER_OPTIMIZER.items()}
        return {**defaults, **check_keys(name, OUTER_OPTIMIZER, {}, value)}

    return Field(None, check)


def check_keys(
    owner: str, fields: Mapping[str, Field], aliases: Mapping[str, str], values: Mapping[Any, Any]
) -> dict[str, Any]:
    """The checked values of a dict of switches, by their own names.

    Raises:
        ValueError: an unknown key, a value out of range, or two spellings of one key with different
            values.
        TypeError: a value of another type.
    """
    checked: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key) if isinstance(key, str) else key
        if name not in fields:
            refuse_name(owner, key, [*fields, *aliases])
        kept = fields[name].check(f"{owner}[{key!r}]", value)
        if name in checked and checked[name] != kept:
            raise ValueError(
                f"{owner}: {spelled[name]!r} and {key!r} mean one thing, and got "
                f"{checked[name]!r} and {kept!r}"
            )
        checked[name], spelled[name] = kept, key
    return checked


# ---- the table ----

SWITCHES: Mapping[str, Field] = MappingProxyType(
    {
        # parameter servers
        "a_sync": _flag(True),
        "adam_d2sum": _flag(),
        # what a step computes
        "amp": _flag(),
        "asp": _flag(),
        "qat": _flag(),
        "recompute": _flag(),
        "gradient_merge": _flag(),
        "lars": _flag(),
        "lamb": _flag(),
        "sync_batch_norm": _flag(),
        # how trainers exchange without servers
        "sync_nccl_allreduce": _flag(True),
        "use_hierarchical_allreduce": _flag(),
        # 0: the number of GPUs of a machine
        "hierarchical_allreduce_inter_nranks": _count(0, least=0),
        "fuse_all_reduce_ops": _flag(True),
        "fuse_grad_size_in_MB": _count(32),
        "fuse_grad_size_in_num": _count(8),
        "last_comm_group_size_MB": _above(1.0),
        "find_unused_parameters": _flag(),
        "nccl_comm_num": _count(1),
        "fp16_allreduce": _flag(),
        "dgc": _flag(),
        "localsgd": _flag(),
        "adaptive_localsgd": _flag(),
        "heter_ccl_mode": _flag(),
        # how a model is divided
        "sharding": _flag(),
        "pipeline": _flag(),
        "fuse_grad_merge": _flag(),
        "tensor_parallel": _flag(),
        "auto": _flag(),
        "semi_auto": _flag(),
        "auto_search": _flag(),
        "split_data": _flag(True),
        # the rest
        "elastic": _flag(),
        "without_graph_optimization": _flag(True),
        "cudnn_exhaustive_search": _flag(True),
        "conv_workspace_size_limit": _count(4000, least=0),  # MB
        "cudnn_batchnorm_spatial_persistent": _flag(True),
    }
)

CONFIGS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "a_sync_configs": {
            "k_steps": _count(0, least=0),  # 0: every step
            "max_merge_var_num": _count(1),
            "send_queue_size": _count(16),
            "independent_recv_thread": _flag(),
            "min_send_grad_num_before_recv": _count(1),
            "thread_pool_size": _count(1),
            "send_wait_times": _count(1, least=0),
            "runtime_split_send_recv": _flag(),
            "launch_barrier": _flag(True),
            # ours
            "merge": _text("auto", "auto", "sum", "mean"),
            "half_async": _flag(),
            "staleness": _staleness(),  # None: unbounded
            "dc_asgd": _from(0.0),  # lambda of delay compensation; 0: none
            "outer_optimizer": _outer_optimizer(),
            "modes": _modes(),
            "overlap": _flag(),
            "embeddings": _list(_text()),  # patterns of names of modules
        },
        "gradient_scale_configs": {"scale_strategy": _text("avg", "avg", "sum", "customized")},
        "trainer_desc_configs": {
            "dump_fields_path": _text(),
            "dump_fields": _list(_text()),
            "dump_param": _list(_text()),
            "stat_var_names": _list(_text()),
        },
        "fs_client_param": {
            "uri": _text(),
            "user": _text(),
            "passwd": _text(),
            "hadoop_bin": _text(),
        },
        "amp_configs": {
            "init_loss_scaling": _above(32768.0),
            "use_dynamic_loss_scaling": _flag(True),
            "incr_every_n_steps": _count(1000),
            "decr_every_n_nan_or_inf": _count(2),
            "incr_ratio": _above(2.0, bound=1.0),
            "decr_ratio": _real(0.5, lambda value: 0 < value < 1, "a number above 0 and below 1"),
            "custom_white_list": _list(_text()),
            "custom_black_list": _list(_text()),
            "custom_black_varnames": _list(_text()),
            "use_pure_fp16": _flag(),
            "use_pure_bf16": _flag(),
            "use_fp16_guard": _flag(True),
        },
        "qat_configs": {
            "channel_wise_abs_max": _flag(True),
            "weight_bits": _count(8, least=2, most=16),
            "activation_bits": _count(8, least=2, most=16),
            "not_quant_pattern": _list(_text()),
            "algo": _text(),
        },
        "recompute_configs": {
            "checkpoints": _list(_text()),
            "enable_offload": _flag(),
            "checkpoint_shape": _list(_count(1)),
        },
        "gradient_merge_configs": {"k_steps": _count(1), "avg": _average()},
        "lars_configs": {
            "lars_coeff": _above(0.001),
            "lars_weight_decay": _from(0.0005),
            "epsilon": _from(0.0),
            "exclude_from_weight_decay": _list(_text()),
        },
        "lamb_configs": {
            "lamb_weight_decay": _from(0.01),
            "exclude_from_weight_decay": _list(_text()),
        },
        "localsgd_configs": {"k_steps": _count(1), "begin_step": _count(1, least=0)},
        "adaptive_localsgd_configs": {"init_k_steps": _count(1), "begin_step": _count(1, least=0)},
        "dgc_configs": {
            "rampup_begin_step": _count(0, least=0),
            "rampup_step": _count(1),
            "sparsity": _list(
                _real(0.0, lambda v: 0 <= v < 1, "a number of 0 or more and below 1"),
                (0.999,),
                least=1,
            ),
        },
        "sharding_configs": {
            "sharding_segment_strategy": _text(
                "segment_broadcast_MB", "segment_broadcast_MB", "segment_anchors"
            ),
            "segment_broadcast_MB": _above(32.0),
            "segment_anchors": _list(_text()),
            "sharding_degree": _count(8),
            "gradient_merge_acc_step": _count(1),
            "optimize_offload": _flag(),
            "dp_degree": _count(1),
            "mp_degree": _count(1),
            "pp_degree": _count(1),
            "pp_allreduce_in_optimize": _flag(),
            "optimize_cast": _flag(),
        },
        "pipeline_configs": {"micro_batch_size": _count(1), "accumulate_steps": _count(1)},
        "tensor_parallel_configs": {
            "tensor_parallel_degree": _count(1),
            "tensor_init_seed": _count(-1, least=0, none=-1),
        },
        "hybrid_configs": {
            "dp_degree": _count(-1, none=-1),  # -1: what the other degrees leave
            "mp_degree": _count(1),
            "pp_degree": _count(1),
            "sharding_degree": _count(1),
            "sep_degree": _count(1),
            "order": _axes(),  # from outside to inside
        },
        "execution_strategy": {
            "num_threads": _count(0, least=0),  # 0: as many as fit
            "num_iteration_per_drop_scope": _count(100),
            "num_iteration_per_run": _count(1),
        },
        "build_strategy": {
            "enable_sequential_execution": _flag(),
            "fuse_elewise_add_act_ops": _flag(),
            "fuse_bn_act_ops": _flag(),
            "enable_auto_fusion": _flag(),
            "fuse_relu_depthwise_conv": _flag(),
            "fuse_broadcast_ops": _flag(),
            "fuse_all_optimizer_ops": _flag(),
            "enable_inplace": _flag(),
        },
    }
)

# Names that the two generations of documentation spell differently.
ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "a_sync_configs": {"k_step": "k_steps"},
        # both count micro batches; micro_batch_size is a size
        "pipeline_configs": {"micro_batch": "accumulate_steps"},
    }
)
