"""The trainer: one process's part of a job.  Scripts import this package's names, and ``fleet``::

    from pserver import DistributedEmbedding, fleet

    fleet.init()                                       # which process of which job is this?
    model = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
    for x, y in fleet.shard(loader):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()                               # the servers take this step
        optimizer.zero_grad()
    fleet.finish()

This page is the package's manual.  ``transpiler`` makes the plan before training: which server
holds what.  ``pserver`` is the servers, and its page follows a gradient there.

A step: from ``p.grad`` to the parameter
----------------------------------------

In a job with servers, sync; file by file, in order:

 1. ``optimizer.py``: ``DistributedOptimizer.step`` takes GradScaler's scale out of ``p.grad``, and
    clips, unless the servers do; ``gradients/dgc.py`` compresses large ones, where the strategy
    says so.  ``gradients/gradient_changes.py`` warns where the script has clipped before a mean.
 2. ``embedding/proxy.py``: tables give their pending row gradients, times the script's
    factors on ``proxy.grad``; ``communicator/tables.py`` collects them.
 3. ``senders/writes.py`` finds external writes, which are part of the step.
    ``communicator/communicator.py`` cuts each gradient into the plan's slices and gives these to
    the sender of their lane.
 4. ``senders/sync_lane.py``: the slices leave at once, those of a GPU through pinned memory
    (``device_copies.py``).
 5. ``pserver/client``: frames on a stream of the lane, sent again after a broken connection.
 6. ``close_step`` sends each server the current hyper-parameters: the step is complete.
 7. The server merges the slices of all trainers, updates the parameters, and replies with values.
 8. ``collective/elastic_means.py`` averages the gradients of parameters in the mode "collective",
    meanwhile or, beside a sync lane, before 6, and the script's own optimizer steps these.
 9. ``finish_step`` waits for the replies.  ``senders/parameters.py``: values arrive in
    the parameters' own memory, or in buffers that are copied there now.

Only ``finish_step``, and ``refresh`` at the entry of a forward, change parameters: a running
backward never sees one change.  With ``overlap``, 3 to 5 begin while backward runs.

Classes by mode
---------------

=================  =============================================  ==================================
mode               on the trainer                                 the optimizer runs on
=================  =============================================  ==================================
sync               ``senders.SyncSender``                         servers, once for all trainers
async, half-async  ``senders.AsyncSender``, with a queue          servers, for each message
geo, diloco        ``senders.GeoSender``, ``DiLoCoSender``        this trainer; every k steps its
(k-step)                                                          changes go to the servers
collective beside  ``collective.DenseSteps``                      this trainer
servers (mixed)
collective         ``collective.DataParallel``, by                this trainer, with
                   ``job.CollectiveJob``                          ``job.CollectiveOptimizer``
hybrid, sharded    ``hybrid.hybrid_parallel``,                    this trainer its shards, with
                   ``sharding.group_sharded_parallel``            ``sharding.ShardedOptimizer``
programs           ``Executor`` or ``ParallelExecutor``, with     servers by ``send`` and ``recv``;
                   ``executor.PServerRuntime`` or                 or this trainer, by
                   ``CollectiveRuntime``                          ``executor.OptimizerSegment``
tables             ``DistributedEmbedding``, whose rows are       servers; in geo, diloco and alone
                   ``embedding.LocalRows``, those of              this trainer
                   ``senders.Lookups``,
                   ``senders.GeoRows`` or ``DiLoCoRows``
=================  =============================================  ==================================

The rooms
---------

A room imports those above it, and none below it::

    row_optimizers  serving         root files that import no room
    device_copies
    environment                     settings from environment variables: role, connection
    lr                              learning rates that torch has no scheduler for
    collective                      between trainers: rendezvous, groups, all-reduce
    data                            training data in files: formats, datasets, batches
    compat                          names for scripts that come from PaddlePaddle
    embedding                       DistributedEmbedding, its proxy parameter, rows of this process
    nn                              losses and layers of models that rank and recommend
    gradients                       changes to gradients before they are sent
    modules                         changes that a strategy makes to a model
    senders                         the sending of a lane: gradients to the servers, values back
    communicator                    the connections to the servers
    samplers                        the samples that a trainer trains on
    optimizer                       root: the optimizer that fleet returns
    checkpoint                      a job's state in files
    executor, parallel_executor     programs
    sharding                        state, gradients and parameters in shards
    hybrid                          five directions of parallelism at once
    job                             the job, from fleet.init to fleet.finish
    metrics                         AUC and the like, over the samples of all trainers
    fleet                           root: the calls of a script
    notebook                        root: servers in the background, for notebooks
    lightning, huggingface          root: the Trainers of Lightning and transformers
    examples                        complete scripts

Threads
-------

The script's thread does everything except for these:

- ``heartbeat``, one for each server, and two of each stream (``pserver/client``).
- ``lane ...``: an async lane's sender, and its receiver with ``independent_recv_thread``; a k-step
  lane's exchange.
- ``membership``: heartbeats between trainers, one in each job without servers, each mixed one, and
  each whose trainers sum something themselves (``fleet.all_reduce``, metrics).
- ``trace``: merges the spans of a trace, after its last step.
- ``ring N``: a ring of trainers in rows (``collective/all_reduce.py``).
- ``prefetch``: the next batches of a dataset; ``parses N``: pieces of its files (``data/``).
- autograd's own: hooks of gradients (``DataParallel``, ``sharding.Reducer``, ``overlap``, proxy
  parameters) run in the thread that computes the gradient.

Glossary
--------

- **plan**: the transpiler's frozen decision: slices, their servers, lanes, rules.
- **lane**: parameters that share one update mode and one sequence of steps.
- **slice**: a contiguous part of a parameter; one server holds it.
- **shard**: one rank's part of a parameter that ranks divide among themselves.
- **table**: rows by int64 ids; **row**: one of them.
- **proxy parameter**: the scalar by which a table appears in an optimizer.
- **step**: from a script's ``optimizer.step()`` to the next; ``close`` ends its sending, ``finish``
  its waiting, ``drain`` waits for all replies of a lane, ``flush`` also receives the others' steps.
- **rendezvous**: trainers find one another and compare what they run; **peers**: the trainers after
  that; **membership**: which of them are live.
- **unit**: a module whose shards are gathered together; **bucket**: gradients that are reduced
  together.
- **transport**: how tensors travel: ``tcp``, ``grpc``, ``shm``; ``nccl``, ``gloo``.

The essays
----------

An essay stands in the file that it is about; code that relies on one says ``See [Note: ...]``.
``docs/notes.md`` lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pserver.own_packages import uncollected as _uncollected
from trainer import row_optimizers as row_optimizers
from trainer.collective.data_parallel import DataParallel as DataParallel
from trainer.collective.fused_gradients import (
    fused_allreduce_gradients as fused_allreduce_gradients,
)
from trainer.collective.spawn import spawn as spawn
from trainer.collective.world import init_parallel_env as init_parallel_env
from trainer.collective.world import new_group as new_group
from trainer.hybrid import device_guard as device_guard
from trainer.hybrid import hybrid_load_state_dict as hybrid_load_state_dict
from trainer.hybrid import hybrid_mesh as hybrid_mesh
from trainer.hybrid import hybrid_optimizer as hybrid_optimizer
from trainer.hybrid import hybrid_parallel as hybrid_parallel
from trainer.hybrid import hybrid_state_dict as hybrid_state_dict
from trainer.hybrid import split_sequence as split_sequence
from trainer.modules import sparsity as asp
from trainer.sharding import group_sharded_parallel as group_sharded_parallel
from trainer.sharding import save_group_sharded_model as save_group_sharded_model
from transpiler.ir.tables import Constant as Constant
from transpiler.ir.tables import CountFilterEntry as CountFilterEntry
from transpiler.ir.tables import Normal as Normal
from transpiler.ir.tables import ProbabilityEntry as ProbabilityEntry
from transpiler.ir.tables import ShowClickEntry as ShowClickEntry
from transpiler.ir.tables import Uniform as Uniform
from transpiler.names.names import missing as _missing
from transpiler.strategy.run_strategies import BuildStrategy as BuildStrategy
from transpiler.strategy.run_strategies import ExecutionStrategy as ExecutionStrategy

if TYPE_CHECKING:
    from trainer.checkpoint.export import export_program as export_program
    from trainer.compat.feeders import DataFeeder as DataFeeder
    from trainer.compat.flags import get_flags as get_flags
    from trainer.compat.flags import set_flags as set_flags
    from trainer.compat.places import cpu_places as cpu_places
    from trainer.compat.places import cuda_places as cuda_places
    from trainer.compat.scope import Scope as Scope
    from trainer.compat.scope import global_scope as global_scope
    from trainer.compat.scope import scope_guard as scope_guard
    from trainer.compat.variables import create_global_var as create_global_var
    from trainer.compat.variables import create_parameter as create_parameter
    from trainer.data.arrow import CsvLines as CsvLines
    from trainer.data.arrow import ParquetRows as ParquetRows
    from trainer.data.data_feed_desc import DataFeedDesc as DataFeedDesc
    from trainer.embedding.embedding import DistributedEmbedding as DistributedEmbedding
    from trainer.executor.executor import Executor as Executor
    from trainer.executor.loaded_program import CompiledProgram as CompiledProgram
    from trainer.executor.values import deserialize_persistables as deserialize_persistables
    from trainer.executor.values import load_inference_model as load_inference_model
    from trainer.executor.values import load_program_state as load_program_state
    from trainer.executor.values import save_inference_model as save_inference_model
    from trainer.executor.values import serialize_persistables as serialize_persistables
    from trainer.executor.values import set_program_state as set_program_state
    from trainer.notebook import local_cluster as local_cluster
    from trainer.parallel_executor import ParallelExecutor as ParallelExecutor

__all__ = [
    "asp",
    "BuildStrategy",
    "CompiledProgram",
    "Constant",
    "CountFilterEntry",
    "cpu_places",
    "create_global_var",
    "create_parameter",
    "CsvLines",
    "cuda_places",
    "DataFeedDesc",
    "DataFeeder",
    "DataParallel",
    "deserialize_persistables",
    "device_guard",
    "DistributedEmbedding",
    "ExecutionStrategy",
    "Executor",
    "export_program",
    "fused_allreduce_gradients",
    "get_flags",
    "global_scope",
    "group_sharded_parallel",
    "hybrid_load_state_dict",
    "hybrid_mesh",
    "hybrid_optimizer",
    "hybrid_parallel",
    "hybrid_state_dict",
    "init_parallel_env",
    "load_inference_model",
    "load_program_state",
    "local_cluster",
    "new_group",
    "Normal",
    "ParallelExecutor",
    "ParquetRows",
    "ProbabilityEntry",
    "row_optimizers",
    "save_group_sharded_model",
    "save_inference_model",
    "Scope",
    "scope_guard",
    "serialize_persistables",
    "set_flags",
    "set_program_state",
    "ShowClickEntry",
    "spawn",
    "split_sequence",
    "Uniform",
]

# names that are imported on first use, and their modules
_LATE = {
    "CompiledProgram": "executor.loaded_program",
    "cpu_places": "compat.places",
    "create_global_var": "compat.variables",
    "create_parameter": "compat.variables",
    "CsvLines": "data.arrow",
    "cuda_places": "compat.places",
    "DataFeedDesc": "data.data_feed_desc",
    "DataFeeder": "compat.feeders",
    "deserialize_persistables": "executor.values",
    "DistributedEmbedding": "embedding.embedding",
    "Executor": "executor.executor",
    "export_program": "checkpoint.export",
    "get_flags": "compat.flags",
    "global_scope": "compat.scope",
    "load_inference_model": "executor.values",
    "load_program_state": "executor.values",
    "local_cluster": "notebook",
    "ParallelExecutor": "parallel_executor",
    "ParquetRows": "data.arrow",
    "save_inference_model": "executor.values",
    "Scope": "compat.scope",
    "scope_guard": "compat.scope",
    "serialize_persistables": "executor.values",
    "set_flags": "compat.flags",
    "set_program_state": "executor.values",
}

_ROOMS = ("lr", "metrics")  # whose names users write behind the package's: trainer.metrics.auc


def __getattr__(name: str) -> object:
    """Imports some names on first use, so that ``import trainer`` stays light:
    DistributedEmbedding brings the room of tables, classes and functions for programs the servers'
    transports.
    """
    if name not in _LATE and name not in _ROOMS:
        raise _missing(__name__, name, (*__all__, *_ROOMS, "fleet", "nn"))
    with _uncollected():
        found = import_module(f"{__name__}.{_LATE.get(name, name)}")
    return found if name in _ROOMS else getattr(found, name)


def __dir__() -> list[str]:
    """Lists late imports, too, so that ``help(trainer)`` shows them; without PaddlePaddle's
    names.
    """
    compat = {name for name, module in _LATE.items() if module.startswith("compat.")}
    return sorted({*globals(), *__all__} - compat)
