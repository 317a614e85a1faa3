"""Training sharded over the ranks of a group, without servers: optimizer state, gradients,
parameters.

In reading order::

    levels        group_sharded_parallel, and the table of its levels
    agreement     all ranks ask for the same, or the difference is said
    bucket        the layout of gradients that travel together
    reducer       means of gradients, bucket by bucket, while backward runs
    collectives   torch's collectives over flat memory, by their names in the installed torch
    shards        a rank's shards: the interface, and the flat ones of "os" and "os_g"
    reads         parameters that are read where their unit is not running
    units         those of "p_g_os", on torch's FSDP2
    segment_runs  forwards that run a part of a segment
    segments      units that are gathered together
    accumulation  several steps, one update
    replica_mean  means over replicas in the update
    host_states   an optimizer's states in main memory
    norms         clipping by the norms of whole gradients
    places        where a model holds what FSDP2 has divided
    sharded_rule  which update rules may step shards
    optimizer     ShardedOptimizer: the given optimizer steps shards
    scaler        the GradScaler of a sharded model
    files         a sharded model as plain files

The room imports ``collective``, ``checkpoint`` and ``optimizer``.
"""

from trainer.sharding.files import save_group_sharded_model as save_group_sharded_model
from trainer.sharding.levels import group_sharded_parallel as group_sharded_parallel
from trainer.sharding.optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["group_sharded_parallel", "save_group_sharded_model", "ShardedOptimizer"]
