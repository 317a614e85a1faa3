"""Mistakes that a type checker finds before the script runs: one on each line with a comment."""

import torch
from torch import nn

from pserver import BuildStrategy, DistributedEmbedding, DistributeTranspilerConfig, fleet

strategy = fleet.DistributedStrategy()
strategy.a_sinc = True  # mistake: a_sync
strategy.a_sync_configs = {"k_stps": 3}  # mistake: k_steps
strategy.a_sync_configs = {"k_steps": "3"}  # mistake: a number
strategy.a_sync_configs = {"merge": "average"}  # mistake: mean
strategy.a_sync_configs["k_steps"] = 3  # mistake: a whole dictionary is assigned
strategy.amp = "yes"  # mistake: a flag
print(strategy.a_sync_configs["k_stps"])  # mistake: k_steps
build = BuildStrategy()
build.enable_inplce = True  # mistake: enable_inplace
config = DistributeTranspilerConfig()
config.min_block_sise = 8  # mistake: min_block_size
table = DistributedEmbedding(8, num_embedings=3)  # mistake: num_embeddings
model = fleet.distributed_model(nn.Linear(2, 1))
model.wieght.sum()  # mistake: weight
fleet.distributed_model(nn.Linear(2, 1), tensor_plans={})  # mistake: tensor_plan
print(len(fleet.shard(iter([1]))))  # mistake: an iterator has no length
fleet.shards([1])  # mistake: shard
fleet.init(checkpoint=torch.ones(1))  # mistake: a path
