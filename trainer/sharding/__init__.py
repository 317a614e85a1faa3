"""Training sharded over the ranks of a group, without servers: optimizer state, gradients,
parameters.

In reading order::

    levels        group_sharded_parallel, and its levels
    shards        a rank's shards: the interface, and the flat ones of "os" and "os_g"
    units         shards of "p_g_os", on torch's FSDP2
    accumulation  several steps, one update
    optimizer     ShardedOptimizer: the given optimizer steps shards
    places        the places in a model of parameters that FSDP2 has divided
    scaler        the GradScaler of a sharded model

The room imports ``collective``, ``checkpoint``, ``modules`` and ``optimizer``.
"""

from trainer.sharding.levels import group_sharded_parallel as group_sharded_parallel
from trainer.sharding.levels import save_group_sharded_model as save_group_sharded_model
from trainer.sharding.optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["group_sharded_parallel", "save_group_sharded_model", "ShardedOptimizer"]
