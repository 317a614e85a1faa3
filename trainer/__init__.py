"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from typing import TYPE_CHECKING

from trainer import row_optimizers as row_optimizers
from trainer.collective.data_parallel import DataParallel as DataParallel
from trainer.collective.data_parallel import fused_allreduce_gradients as fused_allreduce_gradients
from trainer.collective.parallel_env import init_parallel_env as init_parallel_env
from trainer.collective.parallel_env import new_group as new_group
from trainer.collective.spawn import spawn as spawn
from trainer.hybrid import device_guard as device_guard
from trainer.hybrid import hybrid_load_state_dict as hybrid_load_state_dict
from trainer.hybrid import hybrid_mesh as hybrid_mesh
from trainer.hybrid import hybrid_optimizer as hybrid_optimizer
from trainer.hybrid import hybrid_parallel as hybrid_parallel
from trainer.hybrid import hybrid_state_dict as hybrid_state_dict
from trainer.hybrid import split_sequence as split_sequence
from trainer.sharding import group_sharded_parallel as group_sharded_parallel
from trainer.sharding import save_group_sharded_model as save_group_sharded_model
from transpiler.ir.tables import Constant as Constant
from transpiler.ir.tables import CountFilterEntry as CountFilterEntry
from transpiler.ir.tables import Normal as Normal
from transpiler.ir.tables import ProbabilityEntry as ProbabilityEntry
from transpiler.ir.tables import ShowClickEntry as ShowClickEntry
from transpiler.ir.tables import Uniform as Uniform

if TYPE_CHECKING:
    from trainer.embedding.embedding import DistributedEmbedding as DistributedEmbedding
    from trainer.executor.executor import Executor as Executor
    from trainer.parallel_executor import ParallelExecutor as ParallelExecutor

__all__ = [
    "Constant",
    "CountFilterEntry",
    "DataParallel",
    "device_guard",
    "DistributedEmbedding",
    "Executor",
    "fused_allreduce_gradients",
    "group_sharded_parallel",
    "hybrid_load_state_dict",
    "hybrid_mesh",
    "hybrid_optimizer",
    "hybrid_parallel",
    "hybrid_state_dict",
    "init_parallel_env",
    "new_group",
    "Normal",
    "ParallelExecutor",
    "ProbabilityEntry",
    "row_optimizers",
    "save_group_sharded_model",
    "ShowClickEntry",
    "spawn",
    "split_sequence",
    "Uniform",
]


def __getattr__(name: str) -> object:
    """Three names are imported when they are first asked for, so that ``import trainer`` stays
    light: DistributedEmbedding brings numba, the two executors the servers' transports.
    """
    if name == "DistributedEmbedding":
        from trainer.embedding.embedding import DistributedEmbedding

        return DistributedEmbedding
    if name == "Executor":
        from trainer.executor.executor import Executor

        return Executor
    if name == "ParallelExecutor":
        from trainer.parallel_executor import ParallelExecutor

        return ParallelExecutor
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
