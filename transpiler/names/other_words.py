"""Replacements for words of PaddlePaddle's documents that are not in its list of names: classes
and calls of its packages for distributed training, and methods of its optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EMBEDDING = "trainer.DistributedEmbedding"
_SHARD = "trainer.fleet.shard(loader)"
_LAUNCH = "`pserver launch` on the command line, or trainer.spawn"
_VALUES = (
    "trainer.fleet.all_reduce, all_gather and broadcast_object; trainer.fleet.barrier_worker waits"
)
_SAVE = "trainer.fleet.save; trainer.fleet.export writes whole models"

WORDS: Mapping[str, str] = MappingProxyType(
    {
        # models and data
        "PyLayer": "torch.autograd.Function",
        "PyLayerContext": "torch.autograd.Function",
        "sparse_embedding": _EMBEDDING,
        "distributed_lookup_table": _EMBEDDING,
        "DistributedBatchSampler": _SHARD,
        "BatchSampler": "torch.utils.data.BatchSampler",
        "DataLoader": f"torch.utils.data.DataLoader; {_SHARD} gives each trainer its part",
        "ParallelEnv": "trainer.fleet.worker_index() and trainer.fleet.worker_num()",
        "PaddleCloudRoleMaker": "trainer.fleet.CloudRoleMaker",
        # calls of fleet
        "launch": _LAUNCH,
        "fleetrun": _LAUNCH,
        "util": _VALUES,
        "UtilBase": _VALUES,
        "save_persistables": _SAVE,
        "load_model": "trainer.fleet.load",
        "minimize": "loss.backward(), then optimizer.step()",
        # methods of optimizers
        "clear_grad": "optimizer.zero_grad()",
        "clear_gradients": "optimizer.zero_grad()",
        "set_lr": "optimizer.param_groups[0]['lr'] = lr; or one of torch.optim.lr_scheduler",
        "get_lr": "optimizer.param_groups[0]['lr']",
        "set_state_dict": "optimizer.load_state_dict(state)",
        "set_dict": "optimizer.load_state_dict(state)",
        "apply_gradients": "optimizer.step()",
        "backward": "loss.backward()",
    }
)
