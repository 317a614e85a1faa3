"""Settings of a strategy about trainers without servers: how they exchange gradients, and how they
divide a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transpiler.plan.modes import COLLECTIVE
from transpiler.plan.settings import (
    EVERY,
    Setting,
    Table,
    ValueKind,
    above,
    count,
    flag,
    list_of,
    number,
    permutation,
    table,
    text,
)

_HYBRID = ("hybrid",)
# The jobs in which trainers exchange gradients: eager jobs and programs without servers, and the
# mode of jobs with servers in which trainers average dense gradients.
_WITHOUT = ("collective", "collective_program")
_AMONG = (COLLECTIVE.name,)
_COLLECTIVE = ("collective",)
_LOCAL_SGD = ("collective", "collective_program")
DGC_MODES = ("sync", "async", "half_async")
_AND_PROGRAMS = ("hybrid", "collective_program")
DGC_JOBS = ("collective", "program")


def _divided(key: str, default: Any, kind: ValueKind, sentence: str, absent: str = "") -> Setting:
    """A setting of jobs that divide a model, read when the model is registered."""
    return Setting(key, default, kind, sentence, jobs=_HYBRID, early=True, absent=absent)


EXCHANGE_SWITCHES = (
    Setting(
        "sync_nccl_allreduce",
        False,
        flag(),
        "The host waits for each all-reduce right away.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "use_hierarchical_allreduce",
        False,
        flag(),
        "Reduces within rows of ranks, then between their first ranks.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "hierarchical_allreduce_inter_nranks",
        0,
        count(least=0),
        "Ranks of a row; 0 and 1: those of each machine.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "fuse_all_reduce_ops",
        True,
        flag(),
        "Gradients travel in buckets; otherwise each by itself.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "fuse_grad_size_in_MB",
        32,
        count(),
        "The most MB of a bucket.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "fuse_grad_size_in_num",
        0,
        count(least=0),
        "The most gradients of a bucket; 0: any number.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "last_comm_group_size_MB",
        1.0,
        above(),
        "The most MB of the bucket that leaves last.",
        jobs=_WITHOUT,
    ),
    Setting(
        "find_unused_parameters",
        False,
        flag(),
        "A parameter may have no gradient in a step, and then counts as zero.",
        jobs=("collective",),
    ),
    Setting(
        "nccl_comm_num",
        1,
        count(),
        "Process groups, which buckets use in turn.",
        modes=_AMONG,
        jobs=_WITHOUT,
    ),
    Setting(
        "fp16_allreduce",
        False,
        flag(),
        "Gradients of more than 16 bits travel as float16.",
        modes=_AMONG,
        jobs=(*_WITHOUT, "hybrid"),
    ),
    Setting(
        "dgc",
        False,
        flag(),
        "Of a large gradient each trainer sends the largest elements, and keeps the others for "
        "later steps: deep gradient compression.",
        modes=DGC_MODES,
        jobs=DGC_JOBS,
    ),
    Setting(
        "localsgd",
        False,
        flag(),
        "Trainers step by themselves, and average their parameters.",
        jobs=_LOCAL_SGD,
    ),
    Setting(
        "adaptive_localsgd",
        False,
        flag(),
        "The same, with a number of steps that follows the loss.",
        jobs=_LOCAL_SGD,
    ),
    Setting("heter_ccl_mode", False, flag(), "Trainers with different accelerators."),
)

DIVISION_SWITCHES = (
    Setting(
        "sharding",
        False,
        flag(),
        "Parameters, gradients and the optimizer's states are sharded; in programs the states.",
        jobs=_AND_PROGRAMS,
        early=True,
    ),
    _divided("pipeline", False, flag(), "Layers are stages on different trainers."),
    Setting(
        "fuse_grad_merge", False, flag(), "Merged gradients share one buffer.", EVERY, _COLLECTIVE
    ),
    _divided("tensor_parallel", False, flag(), "Layers are split over trainers."),
    Setting("auto", False, flag(), "As ``auto_search``.", EVERY),
    Setting("semi_auto", False, flag(), "The division is found from hints in the model."),
    Setting(
        "auto_search",
        False,
        flag(),
        "The update mode is what ``pserver plan --search --write`` has chosen for the script.",
        EVERY,
    ),
    Setting(
        "split_data",
        True,
        flag(),
        "``fleet.shard`` gives each trainer its own part of the data, not all of it.",
        EVERY,
        _COLLECTIVE + _HYBRID,
    ),
)

PARALLEL_CONFIGS: Mapping[str, Table] = MappingProxyType(
    {
        "localsgd_configs": table(
            Setting("k_steps", 1, count(), "Steps between two averages.", jobs=_LOCAL_SGD),
            Setting(
                "begin_step",
                1,
                count(least=0),
                "Up to this one every step ends in an average.",
                jobs=_LOCAL_SGD,
            ),
        ),
        "adaptive_localsgd_configs": table(
            Setting(
                "init_k_steps", 1, count(), "Steps between two averages, at first.", jobs=_LOCAL_SGD
            ),
            Setting(
                "begin_step",
                1,
                count(least=0),
                "Up to this one every step ends in an average.",
                jobs=_LOCAL_SGD,
            ),
        ),
        "dgc_configs": table(
            Setting(
                "rampup_begin_step",
                0,
                count(least=0),
                "The first compressed step, counted from 0; before it gradients travel whole.",
                modes=DGC_MODES,
                jobs=DGC_JOBS,
            ),
            Setting(
                "rampup_step",
                1,
                count(),
                "Steps from there until the last sparsity; each one holds for equally many.",
                modes=DGC_MODES,
                jobs=DGC_JOBS,
            ),
            Setting(
                "sparsity",
                (0.999,),
                list_of(number(lambda value: 0 <= value < 1, "of 0 or more and below 1"), 1),
                "The part of each large gradient that stays, stage by stage.",
                modes=DGC_MODES,
                jobs=DGC_JOBS,
            ),
        ),
        "sharding_configs": table(
            _divided(
                "sharding_segment_strategy",
                "segment_broadcast_MB",
                text("segment_broadcast_MB", "segment_anchors"),
                "How modules are divided into segments, whose parameters are gathered together.",
            ),
            _divided("segment_broadcast_MB", 32.0, above(), "The size of a segment, in MB."),
            _divided(
                "segment_anchors",
                (),
                list_of(text()),
                "Names of modules, or of their parameters, that begin a segment.",
            ),
            Setting(
                "sharding_degree",
                8,
                count(),
                "Shards; not assigned: as many as the other degrees leave trainers for.",
                jobs=_AND_PROGRAMS,
                early=True,
                absent="as many as the other degrees leave trainers for",
            ),
            _divided(
                "gradient_merge_acc_step",
                1,
                count(),
                "Steps whose mean gradient is reduced and applied once.",
            ),
            _divided(
                "optimize_offload",
                False,
                flag(),
                "The optimizer's states of a model on a GPU lie in main memory between updates.",
            ),
            _divided("dp_degree", 1, count(), "Replicas of the sharded model."),
            _divided("mp_degree", 1, count(), "Parts of each split layer."),
            _divided("pp_degree", 1, count(), "Stages of the pipeline."),
            _divided(
                "pp_allreduce_in_optimize",
                False,
                flag(),
                "Replicas reduce their gradients in the update, not in backward.",
            ),
            Setting("optimize_cast", False, flag(), "Casts move to the update."),
        ),
        "pipeline_configs": table(
            _divided(
                "micro_batch_size",
                1,
                count(),
                "Samples of a micro-batch; not assigned: as accumulate_steps makes them.",
                absent="as accumulate_steps makes them",
            ),
            _divided(
                "accumulate_steps",
                1,
                count(),
                "Micro-batches of a batch; not assigned: as many as micro_batch_size makes.",
                absent="as many as micro_batch_size makes",
            ),
            _divided(
                "schedule_mode",
                "1F1B",
                text("1F1B", "F-then-B"),
                "A forward and a backward in turn, or all forwards, then all backwards.",
            ),
        ),
        "tensor_parallel_configs": table(
            _divided("tensor_parallel_degree", 1, count(), "Parts of each split layer."),
            _divided(
                "tensor_init_seed",
                -1,
                count(least=0, none=-1),
                "Of the initial values of split layers; -1: they are as the script made them.",
            ),
        ),
        "hybrid_configs": table(
            _divided(
                "dp_degree",
                -1,
                count(none=-1),
                "Replicas; -1: as many as the other degrees leave trainers for.",
            ),
            _divided("mp_degree", 1, count(), "Parts of each split layer."),
            _divided("pp_degree", 1, count(), "Pipeline stages."),
            _divided("sharding_degree", 1, count(), "Shards of the states."),
            _divided("sep_degree", 1, count(), "Parts of a sequence."),
            _divided(
                "order",
                ("dp", "pp", "sharding", "sep", "mp"),
                permutation("dp", "pp", "sharding", "sep", "mp"),
                "The dimensions of the mesh of trainers, from outside to inside.",
            ),
        ),
    }
)
