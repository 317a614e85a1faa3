"""The few calls that turn a single-node script into one trainer of a cluster.

::

    fleet.init()
    model = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    for x, y in fleet.shard(loader):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()

``init`` finds the role of this process; ``distributed_optimizer`` joins the servers, after which
the model's values are trainer 0's; ``finish`` leaves.  Alone, without a cluster's variables, the
same calls train single-node; among trainers without servers (torchrun, ``pserver launch --nccl2``)
they average gradients.  A process has one job at a time, and the script's thread calls these.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from pserver.telemetry.logs import write_json
from trainer.data.pieces import Slot
from trainer.embedding.conversion import distribute_embedding, moved
from trainer.environment import environment
from trainer.environment.environment import (
    CloudRoleMaker,
    Connection,
    Role,
    RoleMaker,
    UserDefinedRoleMaker,
)
from trainer.hybrid.pipeline import Loss, Pipeline
from trainer.job.automatic_saves import AutomaticSaves
from trainer.job.checkpoint_settings import CheckpointSettings
from trainer.job.collective import CollectiveJob
from trainer.job.datasets import InMemoryDataset, QueueDataset
from trainer.job.followed_passes import FollowedPasses
from trainer.job.job import (
    Job,
    begin,
    distributed,
    end,
    epoch_status,
    is_first_worker,
    is_present,
    is_server,
    is_worker,
    metrics,
    present,
    server_endpoints,
    server_index,
    server_num,
    shrink,
    table_status,
    transport,
    variable_bytes,
    worker_endpoints,
    worker_index,
    worker_num,
)
from trainer.job.loggers import Given, begin_loggers, check_loggers
from trainer.job.report import begin_asked, counted, report, trace
from trainer.job.save_load import export, load, load_arrays, save
from trainer.job.search import searched
from trainer.job.shared_values import (
    all_gather,
    all_gather_object,
    all_reduce,
    broadcast_object,
)
from trainer.job.synced_metrics import sync
from trainer.modules.fused_updates import fuse_updates
from trainer.modules.prepare import check_optimizer, plain_again, prepared
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.read_ahead import BatchesAhead, ReadAhead
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.saved_batches import SavedBatches
from trainer.samplers.shard import SizedBatches
from trainer.samplers.shard import shard as _shard
from transpiler.clip import GradClip
from transpiler.names.names import missing as _missing
from transpiler.plan.settings import MOST_LOOK_AHEAD, check_flag
from transpiler.precision.mixed_forward import fp16_guard
from transpiler.strategy.parallel_degrees import is_divided
from transpiler.strategy.refusals import check, too_late
from transpiler.strategy.strategy import DistributedStrategy

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier_worker",
    "broadcast_object",
    "CloudRoleMaker",
    "distribute_embedding",
    "distributed_model",
    "distributed_optimizer",
    "DistributedStrategy",
    "epoch_status",
    "export",
    "finish",
    "fp16_guard",
    "init",
    "init_server",
    "init_worker",
    "InMemoryDataset",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load",
    "load_arrays",
    "metrics",
    "prefetch",
    "QueueDataset",
    "report",
    "Role",
    "run_server",
    "save",
    "server_endpoints",
    "server_index",
    "server_num",
    "shard",
    "shrink",
    "Slot",
    "stop_worker",
    "sync",
    "table_status",
    "trace",
    "transport",
    "UserDefinedRoleMaker",
    "variable_bytes",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch")


# ---- beginning and end ----


def init(
    role_maker: RoleMaker | None = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    *,
    checkpoint: str | None = None,
    every: float | None = None,
    keep: int | None = None,
    loggers: Sequence[Given] | None = None,
) -> None:
    """Begins a job: finds the role of this process in it.

    Example::

        fleet.init()                                                   # by the environment
        fleet.finish()
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=["127.0.0.1:6174"]))

    Args:
        role_maker: the role; None reads it from the environment: see docs/environment.md.
        is_collective: trainers without servers, which average their gradients among themselves.
            Where torchrun's variables are set, and no servers, this is so without the argument.  A
            process that trains alone is a world of one, and warns where another launcher has
            started several.
        strategy: the default for ``distributed_optimizer``.
        checkpoint: a folder, or its URL, of automatic checkpoints, from the newest of which the job
            also resumes: see docs/restarts.md.  None: the value of PSERVER_CHECKPOINT.
        every: seconds between two checkpoints; None: the value of PSERVER_CHECKPOINT_EVERY.
        keep: the number of newest checkpoints that are kept; None: the value of
            PSERVER_CHECKPOINT_KEEP.
        loggers: objects with ``log(values, step)``, or functions that open one: on the leader they
            get the values of ``report``, and the job's metrics every 10 seconds; see
            docs/loggers.md.

    Raises:
        ValueError: a required variable is missing or wrong, or settings of the strategy cannot act
            in this job; the message names all of them.
        RuntimeError: a job is running: call ``finish()`` first.
        PServerError: another trainer of a collective job has not come up.
    """
    if role_maker is not None and not isinstance(role_maker, RoleMaker):
        raise TypeError(
            "role_maker: expected CloudRoleMaker() or UserDefinedRoleMaker(...), got "
            f"{type(role_maker).__name__}"
        )
    check_flag("is_collective", is_collective)
    asked = check_loggers(loggers)
    role = role_maker or CloudRoleMaker()
    # a wrong variable raises even where nothing uses it
    connection = Connection.from_environment()
    settings = CheckpointSettings.of(checkpoint, every, keep, connection)
    if connection.log_json:
        write_json()
    if is_collective or role.role is Role.COLLECTIVE:
        connection.check_no_grace("without servers, where all trainers end with one of them")
        _begin(_collective(role, strategy), settings, asked)
        return
    strategy = searched(strategy, role)
    check(strategy, _kind(role))
    if role.role is Role.SINGLE:
        environment.other_launchers_told()
        log.warning(
            "no TRAINING_ROLE in the environment: training alone, in this process only%s",
            environment.said_of_other_launchers(),
        )
    elif role.role is Role.TRAINER and role.trainers == 1:
        environment.warn_of_other_launchers("this job has 1 trainer")
    job = Job(role, strategy)
    _begin(job, settings if role.role is not Role.PSERVER else None, asked)
    job.announce()


def _begin(job: Job, settings: CheckpointSettings | None, loggers: list[Given]) -> None:
    """Makes a job the present one, unless its strategy is refused."""
    begin(job)
    try:
        if settings is not None:
            if job.divided:
                raise ValueError(
                    "checkpoint: expected a model that is whole on every trainer, got one divided "
                    "by hybrid_configs: keep each trainer's optimizer.state_dict()"
                )
            job.saves = AutomaticSaves(job, settings)
        elif job.role.role is Role.TRAINER and job.role.trainers > 1:
            job.saves = FollowedPasses(job)
        job.apply(job.strategy)
        begin_asked(job)
        begin_loggers(job, loggers)
    except BaseException:
        end()
        job.restore()
        job.finish()  # it has not joined
        raise


def _collective(role: RoleMaker, strategy: DistributedStrategy | None) -> CollectiveJob:
    if isinstance(strategy, DistributedStrategy) and is_divided(strategy):
        from trainer.job.collective import HybridJob

        return HybridJob(role, strategy)
    return CollectiveJob(role, strategy)


def _kind(role: RoleMaker) -> str:
    return "alone" if role.role is Role.SINGLE else "servers"


def _check_late(strategy: DistributedStrategy | None, job: Job, kind: str) -> None:
    """Refuses a strategy of ``distributed_optimizer`` that is too late to act."""
    first = job.first or DistributedStrategy()
    late = [
        said
        for each in (job.strategy, None if strategy is job.strategy else strategy)
        if isinstance(each, DistributedStrategy)
        for said in too_late(each, first)
    ]
    check(job.strategy if strategy is None else strategy, kind, late)


def _note_reader(strategy: DistributedStrategy | None, job: Job) -> None:
    """Makes strategies warn, until the job's end, of changes after an optimizer has read them."""
    for each in (strategy, job.strategy):
        if each is not None:
            each.note_reader("fleet.distributed_optimizer")
            job.undo.callback(each.note_reader, "")


@overload
def distributed_model(
    model: nn.Module,
    *,
    loss_fn: Loss,
    stages: Sequence[str] = (),
    tensor_plan: Mapping[str, Any] | None = None,
) -> Pipeline: ...
@overload
def distributed_model(model: Model, *, tensor_plan: Mapping[str, Any] | None = None) -> Model: ...
def distributed_model(model: nn.Module, **hybrid: Any) -> nn.Module:
    """Registers a model, whose parameters and buffers are trainer 0's once the optimizer is
    distributed.

    With ``hybrid_configs``, ``sharding``, ``pipeline`` or ``tensor_parallel`` in ``init``'s
    strategy the model is made parallel at once, and ``hybrid`` are the keyword arguments
    ``tensor_plan``, ``stages`` and ``loss_fn`` of :func:`trainer.hybrid.hybrid_parallel`: make the
    optimizer after this.

    Embeddings that are marked by ``distribute_embedding``, or named by
    ``a_sync_configs["embeddings"]`` of ``init``'s strategy, are replaced by ones whose rows the
    servers hold: make the optimizer after this.  A reference to their former ``weight``, such as
    one for a penalty, raises on use.

    Example::

        fleet.init()
        model = fleet.distributed_model(nn.Linear(4, 2))

    Returns:
        The same module; with ``pp_degree`` a pipeline, and where it is itself an embedding that
        moves, the embedding in its place.

    Raises:
        RuntimeError: the optimizer has been distributed already.
        TypeError: it is no module.
        ValueError: an embedding cannot move, such as one whose weight an output layer shares; or a
            pattern matches none.
    """
    job = present()
    if job.optimizer is not None:
        raise RuntimeError("call fleet.distributed_model before fleet.distributed_optimizer")
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"distributed_model: expected a module, as Net(), got {got}")
    if job.divided:
        model = job.register(model, hybrid)
    elif hybrid:
        raise ValueError(
            f"{', '.join(hybrid)}: expected with hybrid_configs (or sharding, pipeline, "
            "tensor_parallel) in the strategy of fleet.init only"
        )
    model = prepared(model, job.strategy)
    model = moved(model, () if job.strategy is None else job.strategy.a_sync_configs["embeddings"])
    for known in job.models:
        moved(known, ())  # embeddings that it shares with this one
    if not any(model is known for known in job.models):
        job.models.append(model)
        model.register_state_dict_pre_hook(lambda *_: _flush(job))  # type: ignore[no-untyped-call]  # torch's own
    return model


def _flush(job: Job) -> None:
    """Makes a model whole and current on every trainer, before its ``state_dict()``."""
    if is_present(job) and job.optimizer is not None:
        job.optimizer.flush()


def distributed_optimizer(
    optimizer: torch.optim.Optimizer,
    strategy: DistributedStrategy | None = None,
    grad_clip: GradClip | None = None,
    compression: Mapping[str, str] | None = None,
) -> DistributedOptimizer:
    """Joins the servers and returns the optimizer whose steps they take.

    A scheduler may be made for the given optimizer or for the returned one: the two share their
    groups.  A script with several optimizers, as for a GAN, calls this for each of them before the
    first step, in the same order on every trainer; each then steps its own parameters only.

    Example::

        fleet.init()
        model = fleet.distributed_model(nn.Linear(4, 2))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    Args:
        optimizer: any element-wise optimizer of torch.optim, over parameters of the registered
            models; of several optimizers each has parameters of its own.
        strategy: of this optimizer's parameters; None takes that of ``init``; without one they are
            sync.  Settings that act earlier ("embeddings", ``hybrid_configs``) belong in that of
            ``init``.
        grad_clip: ``ClipGradByValue``, ``ClipGradByNorm`` or ``ClipGradByGlobalNorm`` of
            ``transpiler``, applied to the merged gradient.
        compression: of gradients on the wire, by pattern of parameter names, the first that
            matches: {"emb.*": "int8", "*": "bfloat16"}; "float16" and "" (none) too.  The rounding
            error is added to the next step's gradient.  "sparse" sends the elements that are not 0,
            with their positions, where that is less, and loses nothing.

    Returns:
        The optimizer to step, in the place of the given one.

    Raises:
        TypeError: it is no optimizer of torch.
        ValueError: the optimizer's rule cannot be sliced, or it has parameters of no registered
            model, or parameters of another optimizer; or settings of the strategy cannot act here.
        RuntimeError: the job has taken a step, or has no servers and an optimizer already.
        PServerError: a server cannot be reached, or refuses the job.
    """
    if grad_clip is not None and not isinstance(grad_clip, GradClip):
        raise TypeError(
            "grad_clip: expected ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm of "
            "transpiler, "
            f"got {type(grad_clip).__name__}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "distributed_optimizer: expected an optimizer of torch, as "
            f"torch.optim.Adam(model.parameters(), lr=1e-3), got {type(optimizer).__name__}"
        )
    job = present()
    check_optimizer(optimizer, job.strategy)
    if isinstance(job, CollectiveJob):
        if job.optimizers:
            raise RuntimeError(
                "this job has a distributed optimizer already, and without servers it takes one: "
                "gradients are averaged while backward runs, and a backward of the other's loss "
                "may pass through this one's parameters; start the job with servers"
            )
        _check_late(strategy, job, job.kind)
        job.apply(strategy)
        job.strategy = strategy or job.strategy
        fuse_updates(optimizer, job.strategy)
        job.optimizers.append(job.distribute(optimizer, grad_clip, compression))
        job.dump(job.optimizers[0], strategy)
        _note_reader(strategy, job)
        job.follow()
        return job.optimizers[0]
    if job.role.role is Role.PSERVER:
        raise RuntimeError("this process is a server: call fleet.run_server()")
    strategy = searched(strategy, job.role)
    _check_late(strategy, job, _kind(job.role))
    job.apply(strategy)
    fuse_updates(optimizer, strategy or job.strategy)
    made = job.join(optimizer, strategy, grad_clip, compression)
    job.dump(made, strategy)
    _note_reader(strategy, job)
    if job.early is None:
        job.follow()
    return made


def finish() -> None:
    """Leaves the job, when the servers have applied all that this trainer sent, and every trainer
    has finished.  Until then the others continue without it.  Where there is no job it has no
    effect, so that a ``finally`` may call it.

    Example::

        fleet.init()
        fleet.finish()
        fleet.finish()    # no job is left to leave: no effect

    Raises:
        PServerError: the job has failed: a trainer did not finish, or a server was lost.
    """
    job = end()
    if job is None:
        return
    try:
        job.claims.release()
        for model in job.models:
            plain_again(model)
        job.finish()
    finally:
        environment.forget_other_launchers()
        job.restore()


# ---- data ----


@overload
def shard(
    loader: SizedBatches[Batch], seed: int | None = None, progress: bool = False
) -> SizedBatches[Batch]: ...
@overload
def shard(
    loader: Iterable[Batch], seed: int | None = None, progress: bool = False
) -> Iterable[Batch]: ...
def shard(loader: Iterable[Any], seed: int | None = None, progress: bool = False) -> Iterable[Any]:
    """This trainer's part of the data: the same split in every process, in another order at each
    iteration where the loader shuffles.  Every trainer calls this equally often.

    Example::

        fleet.init()
        for x in fleet.shard(DataLoader(torch.arange(8), batch_size=2)):
            print(x)

    Args:
        loader: a DataLoader, or any iterable of batches; docs/data.md describes how each kind is
            divided.
        seed: of the shuffling; None: 0 (or that of the loader's generator) where the loader
            shuffles, and otherwise its own order.
        progress: show the progress of each pass, on trainer 0, or in a process that trains alone: a
            bar on a terminal, a line at the pass's end elsewhere.  Where ``pserver launch`` shows
            its panel, that has the bar.

    Returns:
        An iterable of batches; no sample is in two parts.  All trainers have equally many, unless
        leases deal them out on demand: see docs/data.md.  Each iteration is a pass of its own.  It
        has a length where the loader has one.

    Raises:
        ValueError: a sampler gives one rank's part only.  When it is iterated over: there are
            fewer samples, or batches, than trainers; or the trainers have drawn different orders.
    """
    check_flag("progress", progress)
    job = present()
    saves = job.saves
    name = "" if saves is None else saves.passes.name_of(loader, sys._getframe(1))
    # without checkpoints an undivided loader draws by itself
    known = name if saves is not None and saves.keeps else ""
    if isinstance(job, CollectiveJob):
        mine = job.shard(loader, seed, known)
        parts = job.role.trainers
    else:
        place, parts = job.place_in_data()
        # one that is its own iterator goes on behind a pass that the script has left
        ahead = ReadAhead(job.look_ahead, goes_on=isinstance(loader, Iterator))
        mine = _shard(loader, parts, place, seed, job.passes, known, lambda: _leases(job), ahead)
        if mine is loader and job.role.role is Role.TRAINER:
            mine = BatchesAhead(loader, ahead)
    if saves is not None and (known or parts > 1):
        mine = SavedBatches(mine, name, saves)
    return counted(mine, job, progress)


def _leases(job: Job) -> SampleLeases | None:
    if not job.splits_data:
        return None
    return job.samples.leases(job.communicator, job.first, job.saves)


def prefetch(ids: Any) -> None:
    """Announces the ids that a coming step will look up: their rows are asked for while the steps
    before it are taken.

    For loops that read batches by themselves; those of ``fleet.shard`` and of a dataset are read
    ahead, and need no call.  Each call stands for one batch, in the order of the forwards, also
    where gradients of several are accumulated; up to ``strategy.a_sync_configs["look_ahead"]`` of
    them are announced ahead.  A forward whose ids are not those that were announced asks for its
    own rows.  In a process without servers it has no effect.

    Example::

        fleet.init()
        fleet.prefetch(torch.tensor([3, 7]))                # a model with one table
        fleet.prefetch({"users": torch.tensor([3]), "items": torch.tensor([5, 8])})

    Args:
        ids: as the forward of the table will get them, without the offsets of bags; or, by the
            table's name or its module, those of each.

    Raises:
        TypeError, ValueError: they are no ids of this table, or there is no such table.
        ValueError: ``look_ahead`` is 0.
        RuntimeError: ``distributed_optimizer`` has not been called.
    """
    job = present()
    if job.role.role is not Role.TRAINER or isinstance(job, CollectiveJob):
        return
    distributed(job)
    if not job.tables:
        raise ValueError("fleet.prefetch: expected a job with tables, got one without")
    lookups, look_ahead = job.tables.announced(ids), job.look_ahead()
    if look_ahead is None:
        raise ValueError(
            'fleet.prefetch: expected strategy.a_sync_configs["look_ahead"] of 1 to '
            f"{MOST_LOOK_AHEAD}, got 0: nothing is looked up ahead"
        )
    look_ahead.announce(lookups)


# ---- the original's life-cycle calls ----


def barrier_worker() -> None:
    """Waits for every trainer that has not left.

    Example::

        fleet.init()
        model = fleet.distributed_model(nn.Linear(4, 2))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters()))
        fleet.barrier_worker()

    Raises:
        RuntimeError: ``distributed_optimizer`` has not been called.
        PServerError: a trainer was lost, or the others wait for a step that this one does not take.
    """
    distributed(present()).barrier("barrier_worker")


def init_worker() -> None:
    """Checks that ``distributed_optimizer`` has joined the servers: nothing else is left to do for
    a trainer.

    Raises:
        RuntimeError: it has not been called.
    """
    distributed(present())


def stop_worker() -> None:
    """Leaves the job: the same as :func:`finish`."""
    finish()


def init_server() -> None:
    """Checks that this process is a server: nothing else is left to do, as the trainers send it
    the plan.

    Raises:
        RuntimeError: the process is a trainer.
    """
    server_index()


def run_server() -> None:
    """Serves one job at CURRENT_ENDPOINT, and returns when it is done.

    Raises:
        RuntimeError: the process is a trainer.
        PServerError: the job has failed; this is the cause.
        SystemExit: SIGTERM or SIGINT arrived before the job was done, with status 143 or 130.
        OSError: it cannot listen there.
    """
    init_server()
    role = present().role
    connection = Connection.from_environment()
    from pserver.service.server import serve_job  # here: a trainer needs no server

    serve_job(connection.server_config(role.current_endpoint))


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raises for an unknown name; the error says what to write."""
        raise _missing(__name__, name, __all__)
