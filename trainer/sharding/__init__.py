"""Training divided over ranks without servers: state, gradients and parameters in shares
(``levels`` says which).
"""

from trainer.sharding.files import save_group_sharded_model as save_group_sharded_model
from trainer.sharding.levels import group_sharded_parallel as group_sharded_parallel
from trainer.sharding.optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["group_sharded_parallel", "save_group_sharded_model", "ShardedOptimizer"]
