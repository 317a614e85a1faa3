"""Checkpoints of which every server writes its part: what a trainer adds to them.

A part has the slices and the optimizer states that its server holds, and its rows of the tables.
The trainer adds what no server has: buffers, parameters that trainers average among themselves, the
states of optimizers that step on trainers, groups, steps and schedulers.  It says in the manifest
of which slices each tensor is put together, under the names of ``resume``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Saved
from pserver.checkpoint.manifest import WholeTensor
from trainer.checkpoint.resume import Trained
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from trainer.checkpoint.table_store import Chunk, TableStore

States = Sequence[Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Rest:
    """What a trainer adds to the servers' parts: copies, which steps leave as they are.

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
        """Copies it, between two steps.

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
    """The tensors that are put together from the servers' parts, by the names of ``resume``.

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


def write(
    path: str,
    rest: Rest,
    parts: Sequence[Saved],
    layout: Mapping[str, WholeTensor],
    tables: Mapping[str, Mapping[str, Any]],
) -> Saved:
    """Writes what the trainer adds, and the manifest last of all.

    Args:
        parts: of all servers, in their order: they are complete.
        layout: see :func:`layout_of`.
        tables: the metadata of each.

    Raises:
        InUse: another job writes there.
        OSError: the disk is full, or refuses; the checkpoint that was there stays.
    """
    meta = dict(rest.meta)
    if tables:
        meta["tables"] = {
            name: dict(known) | dict(rest.stepped.get(name, ([], {}))[1])
            for name, known in tables.items()
        }
    with checkpoint.writing(path) as writer:
        writer.parts(parts, layout)
        writer.tensors(rest.tensors)
        for name, (chunks, _) in rest.stepped.items():
            writer.chunks(f"{name}@trainer", chunks)
        return writer.commit(meta)
