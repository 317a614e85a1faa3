"""Why a setting of a strategy is refused in a job: where it acts instead, or what to write.

A reason is one of these, and nothing else: the setting acts in jobs of another kind; no job reads
it in this version; another setting chooses a mode that does not read it (from_strategy.py).  One
error names all settings that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transpiler.plan.setting import Setting
from transpiler.strategy.fields import every_setting
from transpiler.strategy.from_strategy import ineffective
from transpiler.strategy.strategy import DistributedStrategy

_SERVERS = "a job with parameter servers"
_COLLECTIVE = "a job without servers (fleet.init(is_collective=True)) and without hybrid_configs"
_HYBRID = (
    "a job with hybrid_configs in the strategy of fleet.init(is_collective=True, strategy=...)"
)

# kinds of jobs, in words; "alone" reads what a job with servers reads
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "servers": _SERVERS,
        "alone": "a process that trains alone, without servers",
        "collective": "a job without servers and without hybrid_configs",
        "hybrid": "a job with hybrid_configs",
    }
)

_AMP = "call torch.autocast and torch.amp.GradScaler in the script"
_RECOMPUTE = "call torch.utils.checkpoint.checkpoint in the model"
_ACCUMULATE = "call optimizer.step() after every k-th backward"
_SHARD = "call trainer.group_sharded_parallel, or set hybrid_configs['sharding_degree']"
_PIPELINE = "set hybrid_configs['pp_degree']"
_TENSOR = "set hybrid_configs['mp_degree']"
_LOCAL_SGD = (
    "set a_sync_configs['k_steps'] with an outer_optimizer in a job with servers, or transpile "
    "with collective_mode='local_sgd' and k_steps"
)
_TRANSPILE = "set it in DistributeTranspilerConfig, for programs"
_PATHS = "give fleet.save, fleet.load and fleet.export a path that every trainer can reach"

# What to write instead of a setting that no job reads, by its own or its dictionary's name.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "amp": _AMP,
        "amp_configs": _AMP,
        "recompute": _RECOMPUTE,
        "recompute_configs": _RECOMPUTE,
        "gradient_merge": _ACCUMULATE,
        "gradient_merge_configs": _ACCUMULATE,
        "sharding": _SHARD,
        "sharding_configs": _SHARD,
        "pipeline": _PIPELINE,
        "tensor_parallel": _TENSOR,
        "tensor_parallel_configs": _TENSOR,
        "localsgd": _LOCAL_SGD,
        "localsgd_configs": _LOCAL_SGD,
        "adaptive_localsgd": _LOCAL_SGD,
        "adaptive_localsgd_configs": _LOCAL_SGD,
        "fp16_allreduce": "give fleet.distributed_optimizer compression={'*': 'float16'} in a job "
        "with servers",
        "nccl_comm_num": _TRANSPILE,
        "use_hierarchical_allreduce": _TRANSPILE,
        "hierarchical_allreduce_inter_nranks": _TRANSPILE,
        "fuse_all_reduce_ops": "fuse_grad_size_in_MB says how large a bucket is",
        "fuse_grad_size_in_num": "fuse_grad_size_in_MB says how large a bucket is",
        "cudnn_exhaustive_search": "set torch.backends.cudnn.benchmark in the script",
        "split_data": "iterate over the loader itself, without fleet.shard",
        "fs_client_param": _PATHS,
    }
)


def refusals(strategy: DistributedStrategy, kind: str) -> list[str]:
    """Why each setting that differs from its default cannot act in a job.

    Args:
        kind: of the job: one of ``KINDS``.

    Returns:
        A sentence for each of these settings, which begins with its full name: "strategy.amp: ..."
        Empty where all of them act.
    """
    settings = dict(every_setting())
    found = [
        f"strategy.{name}: {_reason(name, settings[name], kind)}"
        for name in strategy.unsupported(())
        if not _is_read(settings[name], kind)
    ]
    return found + (ineffective(strategy) if kind in ("servers", "alone") else [])


def check(strategy: DistributedStrategy | None, kind: str) -> None:
    """Refuses a strategy with settings that cannot act in a job.

    Raises:
        TypeError: it is no strategy.
        ValueError: the message names all of these settings, and the reason of each.
    """
    if strategy is None:
        return
    if not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy: expected a DistributedStrategy, got {type(strategy).__name__}")
    if found := refusals(strategy, kind):
        raise ValueError("; ".join(found))


def _is_read(setting: Setting, kind: str) -> bool:
    return bool(setting.modes) if kind in ("servers", "alone") else kind in setting.jobs


def _reason(name: str, setting: Setting, kind: str) -> str:
    places = [_SERVERS] if setting.modes else []
    places += [_COLLECTIVE] if "collective" in setting.jobs else []
    places += [_HYBRID] if "hybrid" in setting.jobs else []
    if not places:
        instead = INSTEAD.get(name) or INSTEAD.get(name.partition(".")[0])
        return "no job reads it in this version; leave it at its default" + (
            f", and {instead}" if instead else ""
        )
    return (
        f"acts only in {', or '.join(places)}, and this is {KINDS[kind]}; leave it at its default"
    )
