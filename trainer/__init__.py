"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from trainer import row_optimizers as row_optimizers
from trainer.embedding import DistributedEmbedding as DistributedEmbedding
from trainer.executor import Executor as Executor
from transpiler.tables import Constant as Constant
from transpiler.tables import CountFilterEntry as CountFilterEntry
from transpiler.tables import Normal as Normal
from transpiler.tables import ProbabilityEntry as ProbabilityEntry
from transpiler.tables import ShowClickEntry as ShowClickEntry
from transpiler.tables import Uniform as Uniform

__all__ = [
    "Constant",
    "CountFilterEntry",
    "DistributedEmbedding",
    "Executor",
    "Normal",
    "ProbabilityEntry",
    "row_optimizers",
    "ShowClickEntry",
    "Uniform",
]
