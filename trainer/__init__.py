"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from typing import TYPE_CHECKING

from trainer import row_optimizers as row_optimizers
from trainer.children import spawn as spawn
from trainer.data_parallel import DataParallel as DataParallel
from trainer.data_parallel import fused_allreduce_gradients as fused_allreduce_gradients
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

if TYPE_CHECKING:
    from trainer.embedding import DistributedEmbedding as DistributedEmbedding

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


def __getattr__(name: str) -> object:
    """DistributedEmbedding is imported when it is first asked for: what compiles the kernels of rows takes a while to import."""
    if name != "DistributedEmbedding":
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    from trainer.embedding import DistributedEmbedding

    return DistributedEmbedding
