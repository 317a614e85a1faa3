"""A job's checkpoint on the trainers' side: parameters, buffers, optimizer state, hyper-parameters
and step.

Tensors are named ``model/NAME`` and ``state/STATE/NAME``.  They are whole, never slices, so that
any number of servers can go on.  Of several optimizers the parameter groups follow one another, and
"optimizers" says how many groups and steps each has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.manifest import check_unshared
from pserver.storage.place import place_at

if TYPE_CHECKING:
    from trainer.checkpoint.table_store import TableStore
    from trainer.modules.loss_scaling import LossScaling

log = logging.getLogger(__name__)


class Trained(Protocol):
    """What one optimizer of a job trains, as a checkpoint needs it: a ``DistributedOptimizer``,
    or the ``ProgramTraining`` of a program.

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
        """Groups and states, whole and current."""


def save(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    tables: TableStore | None = None,
    base: checkpoint.Saved | None = None,
    passes: int = 0,
    claims: checkpoint.Claims | None = None,
    place: Mapping[str, Any] | None = None,
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
        base: the checkpoint that this one continues: of tables it has what changed since.
        passes: over the data that the job has begun.
        claims: the paths that this job writes to.
        place: where the script is, of an automatic checkpoint: see
            :class:`trainer.job.script_place.ScriptPlace`.
        log: as of which entries of the servers' recorded log this is; None: there is none.
        unmerged: further tensors, of servers, for a replay of that; see
            :func:`pserver.dense.slices.unmerged_states`.

    Returns:
        The checkpoint, as the base of a later one.

    Raises:
        InUse: another job writes there.
        OSError: the directory cannot be written; the checkpoint that was there stays.
        ValueError: ``base`` was removed or replaced; or files of others are in the directory, and
            no checkpoint.
    """
    check_unshared(place_at(path))
    named = {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}
    for optimizer in optimizers:
        named |= _states(optimizer)
    named |= unmerged or {}
    meta = described(optimizers, scheduler, passes, place)
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
    passes: int = 0,
    place: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The metadata of a checkpoint, without the tables'; arguments as in :func:`save`."""
    meta: dict[str, Any] = {
        "step": optimizers[0].steps,
        "passes": passes,
        "groups": [_plain(group) for each in optimizers for group in each.param_groups],
    }
    if len(optimizers) > 1:
        meta["optimizers"] = [[len(each.param_groups), each.steps] for each in optimizers]
    if scheduler is not None:
        meta["scheduler"] = packed(_state_of(scheduler))
    if place is not None:
        meta["place"] = dict(place)
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
    """A scheduler's state as JSON holds it: mappings as pairs, as their keys may be numbers;
    functions are left to the script.
    """
    if isinstance(value, Mapping):
        return {
            "mapping": [[key, packed(item)] for key, item in value.items() if not callable(item)]
        }
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [packed(item) for item in value]}
    return value.item() if torch.is_tensor(value) else value


def unpacked(value: Any) -> Any:
    """What :func:`packed` packed."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "mapping":
        return {key: unpacked(item) for key, item in items}
    return tuple(map(unpacked, items)) if kind == "tuple" else [unpacked(item) for item in items]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group as JSON holds it."""
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
class Opened:
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

    @property
    def passes(self) -> int:
        """The passes over the data that the saved job had begun; 0 in files without this count."""
        return int(self.meta.get("passes", 0))


def opened(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[Trained],
    scheduler: Any | None = None,
    tables: TableStore | None = None,
) -> Opened:
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
    found = Opened(reader, {}, {}, meta)
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
    found: Opened,
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
        tables: to give their rows; one trainer of all gives servers theirs.
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
        tables.load(name, found.reader.chunks(name), found.meta["tables"][name])


def load_groups(saved: Sequence[Mapping[str, Any]], optimizers: Sequence[Trained]) -> None:
    """Takes the hyper-parameters of all groups, of one optimizer after the other."""
    groups = [group for each in optimizers for group in each.param_groups]
    for group, plain in zip(groups, saved, strict=True):
        group.update(
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in plain.items()
            }
        )


def load_stepped(found: Opened, tables: TableStore | None) -> None:
    """Takes the rows that a trainer steps by itself, with their states; every trainer calls this
    when the servers have theirs.  A checkpoint of another mode has none: states begin anew.
    """
    for name in [] if tables is None else tables.stepped():
        assert tables is not None
        if f"{name}@trainer" in found.reader.tables:
            chunks = found.reader.chunks(f"{name}@trainer")
            tables.load_stepped(name, chunks, found.meta["tables"][name])


def _odd(mine: set[str], theirs: set[str]) -> str:
    """Which names only the model has, and which only the checkpoint: three of each."""
    sides = (("model", sorted(mine - theirs)), ("checkpoint", sorted(theirs - mine)))
    return "; ".join(
        f"only the {side} has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for side, names in sides
        if names
    )


def _check_tables(path: str, meta: Mapping[str, Any], tables: TableStore | None) -> None:
    """Raises ValueError if a checkpoint's tables are not the job's."""
    mine, theirs = set() if tables is None else set(tables.names()), set(meta.get("tables", {}))
    if mine != theirs:
        raise ValueError(f"{path}: expected the model's tables: {_odd(mine, theirs)}")
    for name in sorted(mine):
        assert tables is not None, "it has tables"
        try:
            tables.check(name, meta["tables"][name])
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
    """Raises ValueError if there are not as many schedulers as a checkpoint has states of."""
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
    found: Opened,
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
