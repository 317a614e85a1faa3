"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from trainer import row_optimizers as row_optimizers
from trainer.children import spawn as spawn
from trainer.data_parallel import DataParallel as DataParallel
from trainer.data_parallel import fused_allreduce_gradients as fused_allreduce_gradients
from trainer.embedding import DistributedEmbedding as DistributedEmbedding
from trainer.executor import Executor as Executor
from trainer.parallel import init_parallel_env as init_parallel_env
from trainer.parallel import new_group as new_group
from trainer.parallel_executor import ParallelExecutor as ParallelExecutor
from transpiler.tables import Constant as Constant
from transpiler.tables import CountFilterEntry as CountFilterEntry
from transpiler.tables import Normal as Normal
from transpiler.tables import ProbabilityEntry as ProbabilityEntry
from transpiler.tables import ShowClickEntry as ShowClickEntry
from transpiler.tables import Uniform as Uniform

__all__ = [
    "Constant",
    "CountFilterEntry",
    "DataParallel",
    "DistributedEmbedding",
    "Executor",
    "fused_allreduce_gradients",
    "init_parallel_env",
    "new_group",
    "Normal",
    "ParallelExecutor",
    "ProbabilityEntry",
    "row_optimizers",
    "ShowClickEntry",
    "spawn",
    "Uniform",
]
