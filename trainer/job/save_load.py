"""A job's files: checkpoints to continue from, and exports for plain PyTorch.

``trainer/fleet.py`` offers these calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.checkpoint import resume
from trainer.checkpoint.arrays import (
    Arrays,
    DenseArrays,
    Path,
    Source,
    Variables,
    fitted,
    raise_together,
    read_arrays,
)
from trainer.checkpoint.export import TableRows, check_form
from trainer.checkpoint.export import export as _export
from trainer.checkpoint.resume import jointly
from trainer.embedding.proxy import ProxyParameter
from trainer.gradients.averaging import keeping_told
from trainer.job.found_schedulers import scheduler_states
from trainer.job.job import Job, distributed, present
from trainer.job.position import Position, own_position
from trainer.samplers.pass_log import NOTHING
from transpiler.files import bounded_json
from transpiler.plan.settings import check_flag

if TYPE_CHECKING:
    from trainer.checkpoint.resume import OpenCheckpoint
    from trainer.checkpoint.tables import RowImport
    from trainer.communicator.communicator import Communicator
    from trainer.communicator.tables import Tables
    from trainer.optimizer import DistributedOptimizer

log = logging.getLogger(__name__)


def save(path: str, scheduler: Any | None = None, delta: bool = False) -> None:
    """Writes parameters, buffers, tables, optimizer state and step to the directory ``path``:
    whole, or not at all.

    Every trainer calls this, between steps; trainer 0 writes.  All steps of a trainer before its
    call are in the checkpoint, and none after it.  In the k-step modes it has the servers' values:
    of DiLoCo's parameters, those of the last exchange.

    Args:
        scheduler: of torch.optim.lr_scheduler, or a list of several; their states are written, too.
        delta: whether to write only the rows of tables that changed since the last save or load of
            this job, whose checkpoint must stay where it is relative to this one: ``load`` reads
            the whole chain.  Without an earlier checkpoint everything is written.

    Raises:
        InUse (an OSError): another job writes checkpoints to this path.
        OSError: the directory cannot be written; an existing checkpoint stays.
        ValueError: the directory has other files, and no checkpoint; ``delta`` is set, and the
            checkpoint before was removed or replaced; or trainers give different paths.  Nothing is
            written.

    An error of one trainer is raised on all, and the job may continue: see :func:`jointly`.

    ::

        fleet.save("checkpoint", scheduler=scheduler)
        ...  # in a later run, after the same fleet.distributed_optimizer:
        step = fleet.load("checkpoint", scheduler=scheduler)
    """
    check_flag("delta", delta)
    job = _whole(present())
    if delta and job.saves is not None and job.saves.keeps:
        raise ValueError(
            "delta: expected False in a job with automatic checkpoints, which removes checkpoints "
            "that a delta continues"
        )
    with nullcontext() if job.communicator is None else job.communicator.page.steps.save():
        _save(job, path, scheduler, delta)


def _save(job: Job, path: str, scheduler: Any | None, delta: bool) -> None:
    optimizer = distributed(job)
    optimizer.flush()
    _agree_on(path, optimizer, "save")
    passes = NOTHING if job.saves is None else job.saves.saved()
    told = optimizer.barrier("positions to save", json.dumps(own_position(passes)))
    with jointly(optimizer, "fleet.save", "saved"):
        if job.is_first:
            optimizer.flush()  # includes the others' last steps
            states = dict[str, Any]()
            try:
                states = scheduler_states(job.optimizers)
            except ValueError as error:  # the script gives its own
                log.info("%s: saved without the schedulers that were found: %s", path, error)
            position = position_of(job, told, states)
            if delta or not job.parts.save(path, scheduler, position):
                write(job, path, scheduler, delta, position)


def position_of(job: Job, told: Mapping[int, str], schedulers: Mapping[str, Any]) -> Position:
    """The position of a job's scripts, for its checkpoint.

    Args:
        told: by trainer, its :func:`trainer.job.position.own_position` as JSON.
        schedulers: their states.
    """
    trainers = {trainer: bounded_json.loads(text) for trainer, text in told.items()}
    leases = job.samples.lease_state()
    return Position(job.passes.count, schedulers, trainers, leases, job.role.trainers)


def write(
    job: Job,
    path: str,
    scheduler: Any | None,
    delta: bool,
    position: Position,
) -> None:
    """Writes a job's checkpoint, as the servers send it; one trainer calls this, when all have sent
    everything.

    Args:
        scheduler, delta: see :func:`save`.
        position: of the scripts.

    Raises:
        OSError, ValueError: see :func:`save`.
    """
    places = None if job.communicator is None else _log_places(job.communicator)
    unmerged: Mapping[str, torch.Tensor] = {}
    if places is not None and job.communicator is not None:  # a replay needs these, too
        unmerged = job.communicator.transfer.unmerged_states()
    tensors = job.tensors() | job.served()
    job.saved = resume.save(
        path,
        tensors,
        job.optimizers,
        scheduler,
        job.table_store(),
        job.saved if delta else None,
        position.meta(),
        job.claims,
        places,
        unmerged,
    )


def _log_places(communicator: Communicator) -> dict[str, Any] | None:
    """The place in each server's recorded log that the present values belong to; called while no
    trainer steps.
    """
    places = [client.log_place() for client in communicator.clients]
    return {"servers": places} if all(places) else None


def load(path: str, scheduler: Any | None = None) -> int:
    """Loads a checkpoint of :func:`save`; the job continues from there.

    Every trainer calls this, between steps, and must be able to read ``path``.  For an example see
    :func:`save`.

    Args:
        scheduler: gets the state that was saved with it; a list if a list was saved.

    Returns:
        The step at which it was saved; with several optimizers, the first one's.

    Raises:
        FileNotFoundError: there is no checkpoint: nothing, or the rest of an interrupted save.
        ValueError: it is damaged, or of another model or optimizer, or trainers find different
            checkpoints; or there are files or directories that are not part of a checkpoint.

    An error of one trainer is raised on all.  Then nothing is changed, unless a file was changed
    while it was read, and the job may continue.
    """
    job = _whole(present())
    found = read(job, path, scheduler)
    position = Position.from_meta(found.meta)
    job.passes.count = position.drawn
    job.samples.restore(position.leases)
    if job.saves is not None:
        job.saves.cancel()
    return distributed(job).steps


def read(job: Job, path: str, scheduler: Any | None = None) -> OpenCheckpoint:
    """Loads a checkpoint as :func:`load` does, without the passes over the data.

    Returns:
        The checkpoint that was read.
    """
    optimizer = distributed(job)
    optimizer.flush()
    optimizer.barrier("load")
    store, first = job.table_store(), job.is_first
    with jointly(optimizer, "fleet.load", "opened") as part:
        found = resume.opened(path, job.tensors(), job.optimizers, scheduler, store)
        part.fact = f"the checkpoint {found.reader.saved.identity}"
    with keeping_told(job.communicator):
        with jointly(optimizer, "fleet.load", "taken"):
            resume.load(found, job.tensors(), job.optimizers, scheduler, store if first else None)
            for each in job.optimizers:
                each.forget()
            if job.tables is not None:
                job.tables.invalidate_caches()
        job.loaded()
    with jointly(optimizer, "fleet.load", "loaded"):
        resume.load_stepped(found, store)
        if first:
            for name in [] if store is None else store.names():
                assert store is not None, "it has names"
                store.mark_saved(name)
            job.saved = found.reader.saved
            job.claims.saw(job.saved)
    return found


def _agree_on(path: str, optimizer: DistributedOptimizer, call: str) -> None:
    """Waits for all trainers, and checks that they give the same path: only trainer 0 writes, so
    another trainer's own path would stay empty.
    """
    with jointly(optimizer, f"fleet.{call}", call) as part:
        part.fact = f"the path {str(path)!r}"


def _whole(job: Job) -> Job:
    if job.divided:
        raise ValueError(
            "fleet.save, fleet.load, fleet.load_arrays: expected a model that is whole on every "
            "trainer, got one divided by hybrid_configs: export "
            "it with fleet.export, and keep each trainer's optimizer.state_dict()"
        )
    return job


def load_arrays(
    arrays: Path | Arrays | None = None,
    *,
    names: Mapping[str, str | None] | None = None,
    transpose: Sequence[str | type[nn.Module]] = (),
    tables: Mapping[str, Source] | None = None,
    steps: int | None = None,
    strict: bool = True,
) -> None:
    """Loads weights that another system trained: dense parameters and buffers by name, and rows of
    tables in chunks, onto any number of servers.

    Every trainer calls this, after ``fleet.distributed_optimizer`` and before the first step;
    trainer 0's arguments count, and only trainer 0 reads files.  Names, shapes, dtypes and ids are
    checked before anything is written.  Optimizer states of dense parameters begin anew.  A job
    that has continued from an automatic checkpoint keeps the checkpoint's values, and says so.

    Args:
        arrays: of dense parameters and buffers, by name: a mapping, or the path or URL of a file,
            "NAME.npz" or "NAME.safetensors".  None: they keep their values.
        names: the model's name for an array's name; None: that array is left out.  Arrays that are
            not in it have the model's names.  Those of several models begin with ``model0.``.
        transpose: patterns of the model's names whose arrays are transposed; or classes of modules,
            whose ``weight`` is: ``[nn.Linear]`` for arrays of Paddle.
        tables: by the table's name, its rows: a chunk, or an iterable of them, each a mapping or
            the path of a file.  A chunk has "ids", int64 [n], each once in all chunks, and
            "values", [n, embedding_dim]; with the states of the table's optimizer also
            "state.NAME", [n, width] for each; in a table with a ShowClickEntry also "show" and
            "click", [n].  Other rows stay.  A list is read twice: to check it, and to load it.  A
            generator is read once: where a chunk of it is wrong, the earlier ones are loaded.
        steps: the number of steps that have made the states of rows, for rules that depend on it,
            such as Adam.  All rows of the given tables then begin anew.
        strict: whether every parameter and every saved buffer needs an array (where ``arrays`` are
            given), every table rows (where ``tables`` are given), and every array a place;
            otherwise those without are left out, and the log names them.

    Raises:
        ValueError: something does not fit: the message has every problem of dense arrays, and the
            first of each table's.
        TypeError: an argument is of another type.
        OSError: a file cannot be read.
        PServerError: a server is lost, or has no room for the rows.
        RuntimeError: ``distributed_optimizer`` has not been called.

    An error of trainer 0 is raised on all.

    Example::

        fleet.load_arrays(
            "dense.npz",
            names={"linear_0.w_0": "fc.weight", "linear_0.b_0": "fc.bias"},
            transpose=[nn.Linear],
            tables={"rows": ["rows-0.npz", "rows-1.npz"]},
        )
    """
    job = _whole(present())
    optimizer = distributed(job)
    optimizer.flush()
    optimizer.barrier("load_arrays")
    first = job.is_first
    resumed = job.saves is not None and job.saves.resumed
    if first and resumed:
        log.warning("fleet.load_arrays: left out, as the job has continued from a checkpoint")
    with jointly(optimizer, "fleet.load_arrays", "arrays checked"):
        check_flag("strict", strict)
        found = None
        if first and not resumed:
            found = _Weights.of(job, arrays, names or {}, transpose, tables, steps, strict)
        if first and arrays is None and tables is None:
            raise ValueError("expected arrays of parameters, or tables= with rows, got neither")
    with keeping_told(job.communicator):
        with jointly(optimizer, "fleet.load_arrays", "arrays loaded"):
            if found is not None:
                found.load(job)
            for each in job.optimizers:
                each.forget()
            if job.tables is not None:
                job.tables.invalidate_caches()
        job.spread()


@dataclass(frozen=True, slots=True)
class _Weights:
    """Arrays that fit the job; nothing of it is changed yet."""

    dense: DenseArrays
    rows: Mapping[str, RowImport]

    @classmethod
    def of(
        cls,
        job: Job,
        arrays: Path | Arrays | None,
        names: Mapping[str, str | None],
        transpose: Sequence[str | type[nn.Module]],
        tables: Mapping[str, Source] | None,
        steps: int | None,
        strict: bool,
    ) -> _Weights:
        """Reads and checks the arguments of :func:`load_arrays`."""
        if arrays is None and (names or transpose):
            raise ValueError("names, transpose: expected arrays with them, got none")
        if steps is not None:
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ValueError(f"steps: expected a whole number of 1 or more, got {steps!r}")
            if tables is None:
                raise ValueError("steps: expected tables with it, got none")
        if isinstance(transpose, str | type):
            raise TypeError(f"transpose: expected a list, got {transpose!r}")
        dense = DenseArrays()
        if arrays is not None:
            dense = fitted(read_arrays(arrays), variables_of(job), names, transpose, strict)
        store = job.table_store()
        known = [] if store is None else store.names()
        given = {} if tables is None else tables
        problems = [
            f"tables: expected tables among {', '.join(known) or 'none'}, got {name!r}"
            for name in given
            if name not in known
        ]
        if strict and tables is not None:
            problems += [
                f"table {name!r}: expected rows, got none; strict=False keeps its rows"
                for name in known
                if name not in given
            ]
        raise_together(problems)
        rows: dict[str, RowImport] = {}
        for name, chunks in given.items():
            assert store is not None, "it has this table"
            from trainer.checkpoint.tables import RowImport  # imports numba

            rows[name] = RowImport(store, name, chunks, steps)
            rows[name].check()
        return cls(dense, rows)

    def load(self, job: Job) -> None:
        """Writes them, on the leader."""
        tensors = job.tensors()
        with torch.no_grad():
            for name, value in self.dense.values.items():
                tensors[name].detach().copy_(value)
        counts = [f"{len(self.dense.values)} parameters and buffers"]
        counts += [f"{each.load()} rows of table {name!r}" for name, each in self.rows.items()]
        log.info("fleet.load_arrays: loaded %s", ", ".join(counts))
        for what, left in (
            ("without an array, and unchanged", self.dense.missing),
            ("arrays without a variable", self.dense.unused),
        ):
            if left:
                log.warning("fleet.load_arrays: %s: %s", what, ", ".join(left))


def variables_of(job: Job) -> Variables:
    """The variables of a job's models that arrays may fill."""
    tensors, modules = job.tensors(), dict(job.modules())
    needed = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    for path, module in modules.items():
        if any(isinstance(each, ProxyParameter) for each in module.parameters(recurse=False)):
            continue  # a table's padding row
        needed |= {
            f"{path}.{name}" if path else name
            for name, buffer in module._buffers.items()
            if buffer is not None
            and buffer.is_floating_point()
            and name not in module._non_persistent_buffers_set
        }
    return Variables(tensors, needed & tensors.keys(), modules)


def export(path: str, rows: str | None = None) -> None:
    """Writes the model, with every step that was taken, to one file that torch alone can read: a
    plain state_dict.  In the k-step modes it has the servers' values, as in :func:`save`.

    A table becomes its module's whole ``weight``; or, if it has no range of ids or the weight would
    be larger than 4 GiB, ``ids`` and their ``weight``.  ``trainer.serving.load_embedding`` looks
    rows up in the file.

    Every trainer calls this, between steps; trainer 0 writes.  The names are those of the model's
    own ``state_dict()``; several models are numbered: ``model0.fc.weight``.

    Args:
        path: "NAME.safetensors" is written for ``safetensors.torch.load_file``, any other name for
            ``torch.load``.
        rows: the dtype in which tables are written: "float32", "float64", "bfloat16", "float16" or
            "int8", with a scale for each row; None: the dtype in which they are computed.

    Raises:
        RuntimeError: no model is registered.
        OSError: the file cannot be written; an existing file stays.
        ValueError: trainers give different paths, or ``rows`` has another value.

    ::

        fleet.export("model.safetensors")
        Net().load_state_dict(safetensors.torch.load_file("model.safetensors"))
    """
    check_form(rows)
    job = present()
    if not job.models:
        raise RuntimeError("call fleet.distributed_model first")
    if job.optimizer is None:
        _export_model(job, path, rows)
        return
    job.optimizer.flush()
    _agree_on(path, job.optimizer, "export")
    with jointly(job.optimizer, "fleet.export", "exported"):
        _export_model(job, path, rows)


def _export_model(job: Job, path: str, rows: str | None) -> None:
    """Writes the model on trainer 0; in a divided job all trainers give their parts."""
    if job.is_first or job.divided:
        prefixes = [
            f"model{index}." if len(job.models) > 1 else "" for index in range(len(job.models))
        ]
        # includes the others' last steps
        states = zip(prefixes, (job.state_dict(model) for model in job.models), strict=True)
        whole = {prefix + name: value for prefix, state in states for name, value in state.items()}
        if job.is_first:
            tables = None if job.tables is None else _table_rows(job, job.tables)
            _export(path, whole, tables, rows=rows)


def _table_rows(job: Job, tables: Tables) -> dict[str, TableRows]:
    """The tables to export, by the names of the modules that look them up."""
    store = job.table_store()
    assert store is not None, "a job with tables has a place for them"
    return {
        path: TableRows(
            module.settings.table(name),
            store.materialized(name),
            module.padding_idx,
            module.padding_row,
            store.reader(name),
        )
        for path, name, module in tables.by_module()
    }
