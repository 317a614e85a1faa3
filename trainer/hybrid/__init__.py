"""Hybrid parallelism: data, pipeline, sharding, sequence and tensor parallel in one job, on
torch.distributed.

In reading order::

    mesh         the ranks in five directions
    parallel     hybrid_parallel, hybrid_optimizer, whole state_dicts
    pipeline     a model cut into stages, and one rank's forwards and backwards
    tensor       linear layers and embeddings cut over ranks
    sequence     sequences cut over ranks
    sample_mean  means over samples, and sharding over them
    shards       a rank's part of each parameter, on any mesh

The room imports ``collective`` and ``sharding``.
"""

from trainer.hybrid.mesh import data_place as data_place
from trainer.hybrid.mesh import hybrid_mesh as hybrid_mesh
from trainer.hybrid.parallel import hybrid_load_state_dict as hybrid_load_state_dict
from trainer.hybrid.parallel import hybrid_optimizer as hybrid_optimizer
from trainer.hybrid.parallel import hybrid_parallel as hybrid_parallel
from trainer.hybrid.parallel import hybrid_state_dict as hybrid_state_dict
from trainer.hybrid.pipeline import Pipeline as Pipeline
from trainer.hybrid.pipeline import device_guard as device_guard
from trainer.hybrid.sequence import split_sequence as split_sequence

__all__ = [
    "data_place",
    "device_guard",
    "hybrid_load_state_dict",
    "hybrid_mesh",
    "hybrid_optimizer",
    "hybrid_parallel",
    "hybrid_state_dict",
    "Pipeline",
    "split_sequence",
]
