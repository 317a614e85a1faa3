"""Settings of a strategy about trainers without servers: how they exchange gradients, and how they
divide a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transpiler.plan.setting import (
    Setting,
    Table,
    above,
    count,
    flag,
    list_of,
    number,
    permutation,
    table,
    text,
)

_COLLECTIVE = ("collective",)
_HYBRID = ("hybrid",)

EXCHANGE_SWITCHES = (
    Setting("sync_nccl_allreduce", False, flag(), "The host waits for each all-reduce."),
    Setting(
        "use_hierarchical_allreduce", False, flag(), "Reduces within machines, then between them."
    ),
    Setting(
        "hierarchical_allreduce_inter_nranks",
        0,
        count(least=0),
        "Ranks that reduce among themselves first; 0: the number of GPUs of a machine.",
    ),
    Setting("fuse_all_reduce_ops", True, flag(), "Small gradients travel in one bucket."),
    Setting("fuse_grad_size_in_MB", 32, count(), "The size of a bucket, in MB.", jobs=_COLLECTIVE),
    Setting("fuse_grad_size_in_num", 8, count(), "Gradients of a bucket."),
    Setting(
        "last_comm_group_size_MB",
        1.0,
        above(),
        "The size of the bucket that leaves last, in MB.",
        jobs=_COLLECTIVE,
    ),
    Setting(
        "find_unused_parameters",
        False,
        flag(),
        "A parameter may have no gradient in a step, and then counts as zero.",
        jobs=_COLLECTIVE,
    ),
    Setting("nccl_comm_num", 1, count(), "Process groups, which buckets use in turn."),
    Setting("fp16_allreduce", False, flag(), "Gradients travel as float16."),
    Setting("dgc", False, flag(), "Deep gradient compression: see ``dgc_configs``."),
    Setting("localsgd", False, flag(), "Trainers average parameters every few steps."),
    Setting("adaptive_localsgd", False, flag(), "The same, with a number of steps that adapts."),
    Setting("heter_ccl_mode", False, flag(), "Trainers with different accelerators."),
)

DIVISION_SWITCHES = (
    Setting("sharding", False, flag(), "Optimizer states (and more) are sharded."),
    Setting("pipeline", False, flag(), "Layers are stages on different trainers."),
    Setting("fuse_grad_merge", False, flag(), "Merged gradients share one buffer."),
    Setting("tensor_parallel", False, flag(), "Layers are split over trainers."),
    Setting("auto", False, flag(), "The division is found automatically."),
    Setting("semi_auto", False, flag(), "It is found from hints in the model."),
    Setting("auto_search", False, flag(), "It is searched for by measuring."),
    Setting("split_data", True, flag(), "Each trainer reads its own part of a batch."),
)

PARALLEL_CONFIGS: Mapping[str, Table] = MappingProxyType(
    {
        "localsgd_configs": table(
            Setting("k_steps", 1, count(), "Steps between two averages."),
            Setting("begin_step", 1, count(least=0), "The first step of local SGD."),
        ),
        "adaptive_localsgd_configs": table(
            Setting("init_k_steps", 1, count(), "Steps between the first two averages."),
            Setting("begin_step", 1, count(least=0), "The first step of local SGD."),
        ),
        "dgc_configs": table(
            Setting("rampup_begin_step", 0, count(least=0), "The first compressed step."),
            Setting("rampup_step", 1, count(), "Steps until the last sparsity."),
            Setting(
                "sparsity",
                (0.999,),
                list_of(number(lambda value: 0 <= value < 1, "of 0 or more and below 1"), 1),
                "The part of each gradient that stays, stage by stage.",
            ),
        ),
        "sharding_configs": table(
            Setting(
                "sharding_segment_strategy",
                "segment_broadcast_MB",
                text("segment_broadcast_MB", "segment_anchors"),
                "How parameters are divided into segments.",
            ),
            Setting("segment_broadcast_MB", 32.0, above(), "The size of a segment, in MB."),
            Setting("segment_anchors", (), list_of(text()), "Variables that begin a segment."),
            Setting("sharding_degree", 8, count(), "Shards."),
            Setting("gradient_merge_acc_step", 1, count(), "Steps whose gradients merge."),
            Setting("optimize_offload", False, flag(), "States live in main memory."),
            Setting("dp_degree", 1, count(), "Replicas of the data-parallel dimension."),
            Setting("mp_degree", 1, count(), "Parts of the tensor-parallel dimension."),
            Setting("pp_degree", 1, count(), "Stages of the pipeline."),
            Setting("pp_allreduce_in_optimize", False, flag(), "Reduces before the update."),
            Setting("optimize_cast", False, flag(), "Casts move to the update."),
        ),
        "pipeline_configs": table(
            Setting("micro_batch_size", 1, count(), "Samples of a micro-batch.", jobs=_HYBRID),
            Setting("accumulate_steps", 1, count(), "Micro-batches of a batch.", jobs=_HYBRID),
        ),
        "tensor_parallel_configs": table(
            Setting("tensor_parallel_degree", 1, count(), "Parts of a layer."),
            Setting(
                "tensor_init_seed", -1, count(least=0, none=-1), "Of initial values; -1: none."
            ),
        ),
        "hybrid_configs": table(
            Setting(
                "dp_degree",
                -1,
                count(none=-1),
                "Replicas; -1: as many as the other degrees leave trainers for.",
                jobs=_HYBRID,
            ),
            Setting("mp_degree", 1, count(), "Parts of each split layer.", jobs=_HYBRID),
            Setting("pp_degree", 1, count(), "Pipeline stages.", jobs=_HYBRID),
            Setting("sharding_degree", 1, count(), "Shards of the states.", jobs=_HYBRID),
            Setting("sep_degree", 1, count(), "Parts of a sequence.", jobs=_HYBRID),
            Setting(
                "order",
                ("dp", "pp", "sharding", "sep", "mp"),
                permutation("dp", "pp", "sharding", "sep", "mp"),
                "The dimensions of the mesh of trainers, from outside to inside.",
                jobs=_HYBRID,
            ),
        ),
    }
)
