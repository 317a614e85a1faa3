"""The reasons for which a setting of a strategy is refused in a job, and what to write instead.

A reason is one of these, and nothing else: the setting acts in jobs of another kind; no job reads
it in this version; another setting leaves it without effect (needs.py, idle_keys.py), chooses a
mode that does not read it (from_strategy.py), or excludes it (update_rules.py).  One error names
all settings that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from transpiler.plan.modes import COLLECTIVE
from transpiler.plan.settings import Setting
from transpiler.strategy.dgc import dgc_refusals
from transpiler.strategy.exchange import without_effect
from transpiler.strategy.from_strategy import ineffective, modes_of
from transpiler.strategy.idle_keys import idle_keys
from transpiler.strategy.local_sgd import local_sgd_refusals
from transpiler.strategy.needs import lonely
from transpiler.strategy.parallel_degrees import degree_contradictions
from transpiler.strategy.parallel_settings import EXCHANGE_SWITCHES
from transpiler.strategy.strategy import DistributedStrategy, every_setting
from transpiler.strategy.update_rules import rule_contradictions

_SERVERS = "a job with parameter servers"
_COLLECTIVE = (
    "a job without servers (fleet.init(is_collective=True)) and without hybrid_configs, sharding, "
    "pipeline or tensor_parallel"
)
_HYBRID = (
    "a job without servers that has hybrid_configs, sharding, pipeline or tensor_parallel in the "
    "strategy of fleet.init(is_collective=True, strategy=...)"
)

# kinds of jobs, in words; "alone" reads what a job with servers reads
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "servers": _SERVERS,
        "alone": "a process that trains alone, without servers",
        "collective": "a job without servers in which each trainer has a whole model",
        "hybrid": "a job that divides a model among its trainers",
        "program": "a program with parameter servers, or of one process",
        "collective_program": "a transpiled program without servers",
    }
)

_CAST = (
    "make the model's parameters 16-bit themselves (model.bfloat16()), so that nothing casts them"
)
_LOCAL_SGD = (
    "set a_sync_configs['k_steps'], with an outer_optimizer where servers are to take the mean "
    "over trainers (DiLoCo)"
)
_QUANTIZE = (
    "call torch.ao.quantization.prepare_qat on the model before fleet.distributed_model: its fake "
    "quantization trains as any module does"
)
_FULL_PRECISION = "nothing here puts fake quantization into a model"
_BY_HAND = (
    "divide by hand: hybrid_configs says how without servers, DistributeTranspilerConfig with "
    "servers, and `pserver plan SCRIPT` prints what comes of it before a job starts"
)
_NO_SEARCH = "nothing here searches for the best division"

_WITH_SERVERS = ("servers", "alone", "program")  # these have update modes

# What to write instead of a setting that no job reads, by its own or its dictionary's name.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "sharding_configs.optimize_cast": _CAST,
        "cudnn_batchnorm_spatial_persistent": "give the model "
        "memory_format=torch.channels_last, for which it takes the persistent one",
        "qat": _QUANTIZE,
        "qat_configs": _QUANTIZE,
        "semi_auto": _BY_HAND,
        "heter_ccl_mode": "train against parameter servers: there each trainer has a device of its "
        "own kind",
    }
)


# The reason why no job reads a setting, if it is more than a missing implementation.
BECAUSE: Mapping[str, str] = MappingProxyType(
    {
        "cudnn_batchnorm_spatial_persistent": "torch chooses cuDNN's batch norm by itself",
        "qat": _FULL_PRECISION,
        "qat_configs": _FULL_PRECISION,
        "semi_auto": _NO_SEARCH,
        "heter_ccl_mode": "trainers without servers exchange by one library, gloo or nccl",
    }
)

_ELASTIC = {
    "elastic": "servers deal out the samples of such a job; without them save with fleet.save, and "
    "start the job again by hand with another number of trainers, which fleet.load takes"
}
_AVERAGES = dict.fromkeys(
    ("localsgd", "localsgd_configs", "adaptive_localsgd", "adaptive_localsgd_configs"), _LOCAL_SGD
)
_UNITS = "FSDP2 reduces the gradients of a unit (a repeated block) together"
_STREAMS = "FSDP2 has its own groups and streams, and overlaps what it can"
_HSDP = "a sharding_degree beside a dp_degree reduces within shards first, then between replicas"
_AT_ONCE = "the gradients that such a program averages are one sum, which nothing hides"
_NO_SERVER = (
    "an all-reduce sums what trainers send, and no process sees one trainer's part; clip the sum "
    "(grad_clip of fleet.distributed_optimizer)"
)
_OUTLIERS = dict.fromkeys(
    ("a_sync_configs.outlier_push", "a_sync_configs.outlier_factor"), _NO_SERVER
)
_EXCHANGE = tuple(row.key for row in EXCHANGE_SWITCHES if COLLECTIVE.name in row.modes)
# The same for settings that act in other kinds of jobs, by the kind of this one.
INSTEAD_IN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "collective": _OUTLIERS | _ELASTIC,
        "collective_program": _OUTLIERS | _ELASTIC,
        "hybrid": {
            **_OUTLIERS,
            **_ELASTIC,
            "fuse_all_reduce_ops": _UNITS,
            "fuse_grad_size_in_MB": _UNITS,
            "fuse_grad_size_in_num": _UNITS,
            "last_comm_group_size_MB": _UNITS,
            "use_hierarchical_allreduce": _HSDP,
            "hierarchical_allreduce_inter_nranks": _HSDP,
            "nccl_comm_num": _STREAMS,
            "sync_nccl_allreduce": _STREAMS,
            "find_unused_parameters": "a parameter that no rank uses in a step needs no switch",
        },
        "servers": _AVERAGES,
        "alone": _AVERAGES,
        "program": {
            **_AVERAGES,
            "elastic": "an Executor is fed by its script; fleet.shard deals out samples in eager "
            "jobs",
            **dict.fromkeys(_EXCHANGE, _AT_ONCE),
            "fp16_allreduce": "compression={'*': 'float16'} of DistributeTranspilerConfig is for "
            "gradients that servers take",
        },
    }
)


def refusals(strategy: DistributedStrategy, kind: str) -> list[str]:
    """The reasons why settings that differ from their defaults have no effect in a job.

    Args:
        kind: of the job: one of ``KINDS``.

    Returns:
        A sentence for each of these settings, which begins with its full name: "strategy.amp: ..."
        Empty where all of them act.
    """
    settings = dict(every_setting())
    assigned = strategy.unsupported(())
    read = [name for name in assigned if _is_read(name, settings[name], kind)]
    found = [
        f"strategy.{name}: {_reason(name, settings[name], kind)}"
        for name in assigned
        if name not in read
    ]
    found += [
        f"strategy.{name}: {sentence}"
        for name, sentence in {**lonely(strategy, kind), **idle_keys(strategy)}.items()
        if _is_read(name, settings[name], kind)
    ]
    found += without_effect(strategy, read)
    found += [*rule_contradictions(strategy), *local_sgd_refusals(strategy, kind)]
    if _is_read("dgc", settings["dgc"], kind):
        modes = modes_of(strategy) if kind in _WITH_SERVERS else ()
        found += dgc_refusals(strategy, modes)
    if kind == "hybrid":
        found += degree_contradictions(strategy)
    if kind in _WITH_SERVERS:
        refused = tuple(f"strategy.{name}: " for name in assigned if name not in read)
        found += [said for said in ineffective(strategy) if not said.startswith(refused)]
    return found


def check(strategy: DistributedStrategy | None, kind: str, also: Sequence[str] = ()) -> None:
    """Checks that all settings of a strategy have an effect in a job.

    Args:
        also: further errors, in sentences like those of :func:`refusals`.

    Raises:
        TypeError: it is not a strategy.
        ValueError: the message names all of these settings, and the reason of each.
    """
    if strategy is None:
        return
    if not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy: expected a DistributedStrategy, got {type(strategy).__name__}")
    if found := [*refusals(strategy, kind), *also]:
        raise ValueError(in_one(found))


def in_one(refused: Sequence[str]) -> str:
    """One message of several refusals: names with the same reason stand before it together.

    Example:
        >>> in_one(["strategy.qat: no", "strategy.asp: never", "strategy.qat_configs.bits: no"])
        'strategy.qat, strategy.qat_configs.bits: no; strategy.asp: never'
    """
    names: dict[str, list[str]] = {}
    for sentence in refused:
        name, _, reason = sentence.partition(": ")
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(together)}: {reason}" for reason, together in names.items())


def too_late(strategy: DistributedStrategy, first: DistributedStrategy) -> list[str]:
    """The settings of an optimizer's strategy that act before there is an optimizer: too late.

    Args:
        first: ``fleet.init``'s strategy, as it was in that call.

    Returns:
        A sentence for each setting that ``first`` does not have with the same value.
    """
    return [
        f"strategy.{name}: {'fleet.shard' if name == 'elastic' else 'fleet.distributed_model'} "
        "reads it, from the strategy as it was given to fleet.init, where it has another value; "
        "give the strategy to fleet.init(strategy=...) with this value"
        for name in strategy.early_changes(first)
    ]


def _is_read(name: str, setting: Setting, kind: str) -> bool:
    if kind in ("servers", "alone"):
        return bool(setting.modes)
    of_lanes = kind == "program" and name.startswith("a_sync")
    return of_lanes or kind in (*setting.jobs, *setting.idle_jobs)


def _places(name: str, setting: Setting) -> list[str]:
    """The kinds of jobs that read a setting, in words."""
    by_kind = {
        "servers": _SERVERS,
        "collective": _COLLECTIVE,
        "hybrid": _HYBRID,
        "program": "a program with servers or alone (transpile(strategy=...))",
        "collective_program": "a program without servers (transpile(strategy=...))",
    }
    return [words for kind, words in by_kind.items() if _is_read(name, setting, kind)]


def _said(of: Mapping[str, str], name: str) -> str:
    """The text about a setting, by its own or its dictionary's name."""
    return of.get(name) or of.get(name.partition(".")[0], "")


def _reason(name: str, setting: Setting, kind: str) -> str:
    places = _places(name, setting)
    if not places:
        because, instead = _said(BECAUSE, name), _said(INSTEAD, name)
        return (
            "no job reads it in this version"
            + (f": {because}" if because else "")
            + "; leave it at its default"
            + (f", and {instead}" if instead else "")
        )
    instead = _said(INSTEAD_IN.get(kind, {}), name)
    return (
        f"acts only in {', or '.join(places)}, and this is {KINDS[kind]}; leave it at its default"
        + (f", and {instead}" if instead else "")
    )
