"""A job's checkpoint on the trainers' side: parameters, buffers, optimizer state, hyper-parameters
and step.

Tensors are named ``model/NAME`` and ``state/STATE/NAME``.  They are whole, never slices, so that
any number of servers can continue.  The parameter groups of several optimizers follow one another,
and "optimizers" has the numbers of groups and steps of each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Saved, name_in
from pserver.checkpoint.manifest import WholeTensor, check_unshared
from pserver.storage.place import place_at
from transpiler.files import bounded_json
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from trainer.checkpoint.tables import Chunk, TableStore
    from trainer.modules.loss_scaling import LossScaling


# ---- joint call ----
#
# A part of a call that all trainers make: it succeeds on all of them, or raises on all of them.
#
# A trainer that fails reports its error at the barrier that ends the part: otherwise only it would
# raise, and the others would wait forever.  So a script that catches the error on every trainer can
# continue.


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (FileNotFoundError, NotADirectoryError, PermissionError, OSError, ValueError)
} | {"TypeError": TypeError}


class JobBarriers(Protocol):
    """The barriers of a job's trainers."""

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits for every trainer that has not left; returns their texts, by trainer."""


class JointPart:
    """One trainer's share of a joint part.

    Attributes:
        fact: a finding of this trainer, which must be the same on all trainers.
    """

    def __init__(self) -> None:
        self.fact = ""


@contextmanager
def jointly(meeting: JobBarriers, call: str, barrier: str) -> Iterator[JointPart]:
    """Ends when the block has succeeded on every trainer, and otherwise raises on every trainer.

    Args:
        meeting: of the job, such as its optimizer.
        call: the user's, for messages: "fleet.save".
        barrier: its name; all trainers enter it.

    Raises:
        Exception: the failure of the block, on the trainer that failed.  The other trainers raise
            OSError, ValueError or TypeError where it was one, otherwise RuntimeError; the message
            names the trainer.
        ValueError: trainers have different facts.

    Example::

        with jointly(optimizer, "fleet.save", "saved"):
            if trainer_id == 0:
                write()
    """
    part = JointPart()
    try:
        yield part
    except BaseException as failure:
        _tell(meeting, barrier, failure)
        raise
    texts = meeting.barrier(barrier, json.dumps({"fact": part.fact}))
    told = {trainer: bounded_json.loads(text) for trainer, text in sorted(texts.items())}
    for trainer, said in told.items():
        if "error" in said:
            raise _error(f"{call}: trainer {trainer}", said)
    facts = {said["fact"]: trainer for trainer, said in reversed(told.items())}
    if len(facts) > 1:
        (one, first), (other, second) = sorted(facts.items(), key=lambda item: item[1])[:2]
        raise ValueError(
            f"{call}: expected the same on every trainer, got {one} on trainer {first} and "
            f"{other} on trainer {second}"
        )


def _tell(meeting: JobBarriers, barrier: str, failure: BaseException) -> None:
    """Reports a failure to the other trainers.  Where that fails, the job's end informs them; this
    trainer raises the first error.
    """
    said: dict[str, object] = {
        "error": [each.__name__ for each in type(failure).__mro__],
        "errno": None,
        "message": str(failure),
        "file": "",
    }
    if isinstance(failure, OSError):
        said |= {
            "errno": failure.errno,
            "message": failure.strerror or str(failure),
            "file": str(failure.filename or ""),
        }
    try:
        meeting.barrier(barrier, json.dumps(said))
    except Exception as error:
        failure.add_note(f"the other trainers could not be notified: {error}")


def _error(where: str, said: dict[str, object]) -> Exception:
    """Another trainer's failure, to be raised on this one."""
    names = said["error"]
    assert isinstance(names, list)
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), RuntimeError)
    text = f"{where}: {said['message'] or 'no message'}"
    if kind is RuntimeError:
        text = f"{where}: {names[0]}: {said['message']}"
    if said["file"]:
        text += f": {said['file']!r}"
    number = said["errno"]
    if issubclass(kind, OSError) and isinstance(number, int):
        return OSError(number, text)  # of the class of its number
    return kind(text)


# ---- save and load ----


log = logging.getLogger(__name__)


class Trained(Protocol):
    """One optimizer of a job, as a checkpoint needs it: a ``DistributedOptimizer``, or the
    ``ProgramTraining`` of a program.

    Attributes:
        names: of parameters, those of other optimizers included.
        param_groups, state: as of any optimizer of torch.
        steps: that it has taken.
        loss_scaling: of ``strategy.amp``; None where nothing scales the loss, and for a program,
            which has its scale in a variable.
    """

    names: Mapping[torch.Tensor, str]
    param_groups: list[dict[str, Any]]
    state: Any
    steps: int
    loss_scaling: LossScaling | None

    def state_dict(self) -> dict[str, Any]:
        """The groups and states, whole and current."""


def save(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    tables: TableStore | None = None,
    base: checkpoint.Saved | None = None,
    position: Mapping[str, Any] | None = None,
    claims: checkpoint.Claims | None = None,
    log: Mapping[str, Any] | None = None,
    unmerged: Mapping[str, torch.Tensor] | None = None,
) -> checkpoint.Saved:
    """Writes the checkpoint, atomically; the optimizer's state is collected from the servers first,
    tables chunk by chunk.

    Args:
        path: the checkpoint's directory, or its URL.
        tensors: parameters and buffers, by name.
        optimizers: of the job, in their order.
        scheduler: whose state is written too, or a list of several.
        tables: of the job, if it has some.
        base: the checkpoint that this one continues: of tables it has only later changes.
        position: metadata of the scripts' position: see
            :meth:`trainer.job.position.Position.meta`; None: of a program, which has none.
        claims: the paths that this job writes to.
        log: the position in the servers' recorded log; None: there is no log.
        unmerged: further tensors, of servers, for a replay of that log; see
            :func:`pserver.dense.slices.unmerged_states`.

    Returns:
        The checkpoint, as the base of a later one.

    Raises:
        InUse: another job writes there.
        OSError: the directory cannot be written; an existing checkpoint stays.
        ValueError: ``base`` was removed or replaced; or the directory has other files, and no
            checkpoint.
    """
    check_unshared(place_at(path))
    named = {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}
    for optimizer in optimizers:
        named |= _states(optimizer)
    named |= unmerged or {}
    meta = described(optimizers, scheduler, position)
    if log is not None:
        meta["log"] = dict(log)
    names = [] if tables is None else tables.names()
    with checkpoint.writing(path, base, claims) as writer:
        writer.tensors(named)
        for name in names:
            assert tables is not None
            meta.setdefault("tables", {})[name] = metadata = dict[str, Any]()
            writer.chunks(name, tables.chunks(name, base is not None, metadata))
        for name in [] if tables is None else tables.stepped():
            assert tables is not None
            metadata = meta["tables"][name]
            writer.chunks(
                f"{name}@trainer", tables.stepped_chunks(name, base is not None, metadata)
            )
        saved = writer.commit(meta)
    for name in names:
        assert tables is not None
        tables.mark_saved(name)
    return saved


def described(
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    position: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The metadata of a checkpoint, without the tables'; arguments as in :func:`save`."""
    meta: dict[str, Any] = {
        "step": optimizers[0].steps,
        "passes": 0,
        "groups": [_plain(group) for each in optimizers for group in each.param_groups],
    }
    if len(optimizers) > 1:
        meta["optimizers"] = [[len(each.param_groups), each.steps] for each in optimizers]
    if scheduler is not None:
        meta["scheduler"] = packed(_state_of(scheduler))
    meta |= position or {}
    scales = [
        None if each.loss_scaling is None else each.loss_scaling.state() for each in optimizers
    ]
    if any(scales):
        meta["loss_scaling"] = scales
    return meta


def _states(optimizer: Trained) -> dict[str, torch.Tensor]:
    """The states of an optimizer's parameters, by the names that they are written under."""
    order = [
        optimizer.names.get(parameter)  # None: a table's proxy parameter, which has no state
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return {
        f"state/{key}/{order[index]}": value
        for index, state in optimizer.state_dict()["state"].items()
        if order[index] is not None
        for key, value in state.items()
        if torch.is_tensor(value)
    }


def _state_of(scheduler: Any) -> Any:
    """A scheduler's state, or those of a list of schedulers."""
    if isinstance(scheduler, list | tuple):
        return [each.state_dict() for each in scheduler]
    return scheduler.state_dict()


def packed(value: Any) -> Any:
    """A scheduler's state for JSON: mappings as pairs, as their keys may be numbers; without
    functions, which the script makes.
    """
    if isinstance(value, Mapping):
        return {
            "mapping": [[key, packed(item)] for key, item in value.items() if not callable(item)]
        }
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [packed(item) for item in value]}
    return value.item() if torch.is_tensor(value) else value


def unpacked(value: Any) -> Any:
    """Restores from :func:`packed`."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "mapping":
        return {key: unpacked(item) for key, item in items}
    return tuple(map(unpacked, items)) if kind == "tuple" else [unpacked(item) for item in items]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group for JSON."""
    plain = {
        key: value.item() if torch.is_tensor(value) else value
        for key, value in group.items()
        if key != "params"
    }
    return {
        key: value
        for key, value in plain.items()
        if isinstance(value, bool | int | float | str | tuple | list | None)
    }


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that fits the job; nothing of the job is changed yet.

    Attributes:
        reader: of its tables.
        values: parameters and buffers, by name.
        states: of optimizers, by the parameter's name and the state's.
        meta: see :func:`save`.
    """

    reader: checkpoint.Reader
    values: dict[str, torch.Tensor]
    states: dict[tuple[str, str], torch.Tensor]
    meta: dict[str, Any]


def opened(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    tables: TableStore | None = None,
) -> OpenCheckpoint:
    """Reads the checkpoint, and compares it with the job; changes nothing.

    Args:
        tensors: parameters and buffers, by name.
        optimizers: of the job, in their order.
        tables: of the job, if it has some.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is torn, or of another model or other optimizers.
    """
    reader = checkpoint.reading(path)
    meta = reader.meta
    if "saved_by" in meta:  # `pserver save`, which also knows the groups of tables' own rules
        meta = {**meta, "groups": meta["groups"][: sum(_sizes(optimizers))]}
    found = OpenCheckpoint(reader, {}, {}, meta)
    for name, tensor in reader.tensors().items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            found.values[rest] = tensor
        elif kind == "state":
            key, _, parameter = rest.partition("/")
            if parameter:  # without a name: a proxy parameter's, as older versions wrote it
                found.states[parameter, key] = tensor
    _check(path, tensors, found)
    _check_groups(path, found.meta, optimizers)
    _check_tables(path, found.meta, tables)
    if scheduler is not None and "scheduler" in found.meta:
        _check_schedulers(path, unpacked(found.meta["scheduler"]), scheduler)
    elif scheduler is not None:
        by = f" by {meta['saved_by']}, which does not know it" if "saved_by" in meta else ""
        raise ValueError(
            f"{path}: expected a scheduler's state, got a checkpoint that was saved without one{by}"
            + (f"; load without it, and set it to step {meta['step']} yourself" if by else "")
        )
    for thing in meta.get("unknown", ()):
        log.warning("%s was written by %s and lacks %s", path, meta["saved_by"], thing)
    return found


def load(
    found: OpenCheckpoint,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    tables: TableStore | None = None,
) -> None:
    """Takes a checkpoint into the live tensors, the optimizers' groups and states, the scheduler,
    and the tables.

    Args:
        tensors: the live ones, by name.
        optimizers: of the job, in their order.
        tables: whose rows are replaced; with servers only one trainer passes them.
    """
    with torch.no_grad():
        for name, tensor in found.values.items():
            tensors[name].detach().copy_(tensor)
    load_groups(found.meta["groups"], optimizers)
    owners = {
        parameter: each
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
        if parameter in each.names  # a proxy parameter keeps what it has
    }
    for parameter, each in owners.items():
        each.state.pop(parameter, None)
    for (name, key), tensor in found.states.items():
        if (owner := owners.get(tensors[name])) is not None:
            device = tensors[name].device  # as torch keeps them
            state = tensor if key == "step" else tensor.to(device)
            owner.state[tensors[name]][key] = state
    steps = [int(found.meta["step"])] * len(optimizers)
    if "optimizers" in found.meta:  # `pserver save` counts the steps of the job only
        steps = [int(count) for _, count in found.meta["optimizers"]]
    for each, count in zip(optimizers, steps, strict=True):
        each.steps = count
    for each, state in zip(optimizers, found.meta.get("loss_scaling", ()), strict=False):
        if each.loss_scaling is not None and state:
            each.loss_scaling.load(state)
    if scheduler is not None:
        several = isinstance(scheduler, list | tuple)
        states = unpacked(found.meta["scheduler"])
        pairs = zip(scheduler, states, strict=True) if several else [(scheduler, states)]
        for each_scheduler, state in pairs:
            each_scheduler.load_state_dict(state)
    for name in [] if tables is None else tables.names():
        assert tables is not None, "it has names"
        saved = found.meta["tables"][name_in(name, found.meta["tables"])]
        tables.load(name, found.reader.chunks(name), saved)


def load_groups(saved: Sequence[Mapping[str, Any]], optimizers: Sequence[Trained]) -> None:
    """Sets the hyper-parameters of all groups, optimizer by optimizer."""
    groups = [group for each in optimizers for group in each.param_groups]
    for group, plain in zip(groups, saved, strict=True):
        group.update(
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in plain.items()
            }
        )


def load_stepped(found: OpenCheckpoint, tables: TableStore | None) -> None:
    """Loads the rows that a trainer steps by itself, with their states; every trainer calls this
    after the servers have theirs.  A checkpoint of another mode has none: states start anew.
    """
    for name in [] if tables is None else tables.stepped():
        assert tables is not None
        stepped = name_in(f"{name}@trainer", found.reader.tables)
        if stepped in found.reader.tables:
            saved = found.meta["tables"][name_in(name, found.meta["tables"])]
            tables.load_stepped(name, found.reader.chunks(stepped), saved)


def _odd(mine: set[str], theirs: set[str]) -> str:
    """The names that only the model has, and those that only the checkpoint has: three of each."""
    sides = (("model", sorted(mine - theirs)), ("checkpoint", sorted(theirs - mine)))
    return "; ".join(
        f"only the {side} has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for side, names in sides
        if names
    )


def _check_tables(path: str, meta: Mapping[str, Any], tables: TableStore | None) -> None:
    """Raises ValueError if a checkpoint's tables are not the job's."""
    mine, theirs = set() if tables is None else set(tables.names()), set(meta.get("tables", {}))
    saved = {name: name_in(name, theirs) for name in sorted(mine)}
    if set(saved.values()) != theirs or len(mine) != len(theirs):
        raise ValueError(f"{path}: expected the model's tables: {_odd(mine, theirs)}")
    for name in saved:
        assert tables is not None, "it has tables"
        try:
            tables.check(name, meta["tables"][saved[name]])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _check_groups(path: str, meta: Mapping[str, Any], optimizers: Sequence[Trained]) -> None:
    """Raises ValueError if a checkpoint is of optimizers with other groups."""
    groups, mine = sum(_sizes(optimizers)), _sizes(optimizers)
    if len(meta["groups"]) != groups:
        raise ValueError(f"{path}: expected {groups} parameter groups, got {len(meta['groups'])}")
    theirs = [count for count, _ in meta.get("optimizers", [])] or [groups]
    if theirs != mine and "saved_by" not in meta:
        raise ValueError(
            f"{path}: expected the checkpoint of {_spelled(mine)}, got one of {_spelled(theirs)}"
        )


def _sizes(optimizers: Sequence[Trained]) -> list[int]:
    return [len(each.param_groups) for each in optimizers]


def _spelled(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return "one optimizer"
    return f"{len(sizes)} optimizers with {', '.join(map(str, sizes))} parameter groups"


def _check_schedulers(path: str, states: Any, scheduler: Any) -> None:
    """Raises ValueError if the number of schedulers is not that of a checkpoint."""
    theirs = len(states) if isinstance(states, list) else 1
    mine = len(scheduler) if isinstance(scheduler, list | tuple) else 1
    if theirs != mine or isinstance(states, list) != isinstance(scheduler, list | tuple):
        raise ValueError(
            f"{path}: expected the schedulers as they were saved, "
            f"{f'a list of {theirs}' if isinstance(states, list) else 'one'}, got "
            f"{f'a list of {mine}' if isinstance(scheduler, list | tuple) else 'one'}"
        )


def _check(
    path: str,
    present: Mapping[str, torch.Tensor],
    found: OpenCheckpoint,
) -> None:
    """Raises ValueError if a checkpoint does not fit the job, before anything is changed."""
    values = found.values
    if set(present) != set(values):
        raise ValueError(
            f"{path}: expected the model's variables: {_odd(set(present), set(values))}"
        )
    for name, tensor in values.items():
        mine = present[name]
        if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
            expected, got = (
                f"{mine.dtype} {list(mine.shape)}",
                f"{tensor.dtype} {list(tensor.shape)}",
            )
            raise ValueError(f"{path}: {name}: expected {expected}, got {got}")
    for name, key in found.states:
        if name not in present:
            raise ValueError(f"{path}: state {key!r} of {name!r}: the model has no such parameter")


# ---- server parts ----
#
# Checkpoints of which every server writes its part, and a trainer the rest.
#
# A part has the slices and the optimizer states that its server holds, and its rows of the tables.
# The trainer adds what no server has: buffers, parameters that trainers average among themselves,
# the states of optimizers that step on trainers, groups, steps and schedulers.  Its manifest lists
# the slices of each tensor, under the names of ``resume``.


States = Sequence[Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Rest:
    """A trainer's addition to the servers' parts: copies, which later steps do not change.

    Attributes:
        tensors: by the names of ``resume``.
        meta: of the checkpoint, without the tables'.
        stepped: by table, the chunks and the metadata of rows that this trainer steps by itself.
    """

    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]
    stepped: Mapping[str, tuple[list[Chunk], Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        optimizers: Iterable[Trained],
        plan: Plan,
        meta: Mapping[str, Any],
        tables: TableStore | None,
    ) -> Rest:
        """Copies the tensors, between two steps.

        Args:
            tensors: those that no server holds as they are now, by name.
            optimizers: of the job.
        """
        held = {name for name in plan_names(plan) if not _on_trainer(plan, name)}
        named = {f"model/{name}": tensor for name, tensor in tensors.items()}
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                name = optimizer.names.get(parameter)  # None: a table's proxy parameter
                if name is not None and name not in held:
                    named |= {
                        f"state/{key}/{name}": value
                        for key, value in state.items()
                        if torch.is_tensor(value)
                    }
        stepped = {}
        for name in [] if tables is None else tables.stepped():
            assert tables is not None, "it has names"
            known: dict[str, Any] = {}
            stepped[name] = (list(tables.stepped_chunks(name, False, known)), known)
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        return cls(copies, meta, stepped)


def plan_names(plan: Plan) -> list[str]:
    """The variables that servers update."""
    return [placement.name for placement in plan.placements if placement.group is not None]


def _on_trainer(plan: Plan, name: str) -> bool:
    return plan.lane_of(plan.placement(name)).kind.steps_on_trainer


def layout_of(plan: Plan, states: States) -> dict[str, WholeTensor]:
    """The tensors that consist of slices in the servers' parts, by the names of ``resume``.

    Args:
        states: of each server, see :func:`transpiler.ir.slice_states.slice_states`.
    """
    found: dict[str, WholeTensor] = {}
    for name in plan_names(plan):
        placement = plan.placement(name)
        shape, slices = tuple(placement.shape), placement.slices
        found[f"model/{name}"] = WholeTensor(shape, tuple((s.server, s.name) for s in slices))
        if _on_trainer(plan, name):
            continue
        own = [(s.server, states[s.server].get(s.name, {})) for s in slices]
        for state in own[0][1]:
            found[f"state/{state}/{name}"] = WholeTensor(
                shape, tuple((server, each[state]) for server, each in own)
            )
    return found


def write_rest(
    writer: checkpoint.Writer,
    rest: Rest,
    parts: Sequence[Saved],
    layout: Mapping[str, WholeTensor],
    tables: Mapping[str, Mapping[str, Any]],
) -> Saved:
    """Writes the trainer's addition, and the manifest last of all.

    Args:
        parts: of all servers, in their order: they are complete.
        layout: see :func:`layout_of`.
        tables: the metadata of each.

    Raises:
        InUse: another job writes there.
        OSError: the files cannot be written; an existing checkpoint stays.
    """
    meta = dict(rest.meta)
    if tables:
        meta["tables"] = {
            name: dict(known) | dict(rest.stepped.get(name, ([], {}))[1])
            for name, known in tables.items()
        }
    writer.parts(parts, layout)
    writer.tensors(rest.tensors)
    for name, (chunks, _) in rest.stepped.items():
        writer.chunks(f"{name}@trainer", chunks)
    return writer.commit(meta)
