"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from trainer.children import spawn as spawn
from trainer.data_parallel import DataParallel as DataParallel
from trainer.data_parallel import fused_allreduce_gradients as fused_allreduce_gradients
from trainer.executor import Executor as Executor
from trainer.parallel import init_parallel_env as init_parallel_env
from trainer.parallel import new_group as new_group

__all__ = ["DataParallel", "Executor", "fused_allreduce_gradients", "init_parallel_env", "new_group", "spawn"]
