"""Programs are held against laws after every pass; an error names the op, the variable and the law.

The laws stand in ``invariants.py`` (all programs, and the plan), ``trainer.py``,
``pserver.py``, ``tables.py`` and ``collective.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transpiler.plan.modes import CollectiveMode, Payload
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify import collective, pserver, tables, trainer
from transpiler.verify.invariants import (
    IllegalProgram,
    Invariant,
    Violation,
    defined_before_use,
    slices_tile,
)

__all__ = [
    "IllegalProgram",
    "Invariant",
    "invariants_of",
    "run",
    "Stage",
    "verify",
    "verify_servers",
    "Violation",
]

Pass = Callable[[Program, Plan], Program]


@dataclass(frozen=True, slots=True)
class Stage:
    """A pass, and the laws that hold from then on."""

    transform: Pass
    laws: tuple[Invariant, ...] = ()


ALWAYS: tuple[Invariant, ...] = (slices_tile, defined_before_use)
TRAINER: tuple[Invariant, ...] = (
    trainer.updated_in_one_place,
    trainer.sent_exactly_once,
    trainer.changes_sent_once,
    trainer.sent_when_final,
    trainer.parameters_received_once,
    trainer.received_after_sending,
    trainer.barriers_exactly_where_due,
    trainer.concatenated_after_arrival,
    tables.rows_pulled_once,
    tables.row_gradients_sent_once,
    tables.rows_updated_in_one_place,
)
TRAINER_STARTUP: tuple[Invariant, ...] = (
    trainer.parameters_received_once,
    trainer.barriers_exactly_where_due,
    trainer.concatenated_after_arrival,
    tables.tables_declared,
)
PSERVER: tuple[Invariant, ...] = (
    pserver.slices_held,
    pserver.optimize_blocks_complete,
    pserver.listens_once,
    pserver.only_server_ops,
    tables.tables_held,
    tables.table_blocks_complete,
)
PSERVER_STARTUP: tuple[Invariant, ...] = (
    pserver.slices_held,
    pserver.slices_initialised,
    pserver.only_server_ops,
)
COLLECTIVE_STARTUP: tuple[Invariant, ...] = (
    collective.ids_drawn_once,
    collective.rings_begin_once,
    collective.parameters_handed_on,
    collective.awaited_before_use,
)
SHARED: tuple[Invariant, ...] = (
    collective.updated_once,
    collective.buckets_in_bounds,
    collective.awaited_before_use,
)
AVERAGED_GRADIENTS: tuple[Invariant, ...] = (
    collective.loss_gradient_scaled,
    collective.summed_exactly_once,
    *SHARED,
)
AVERAGED_PARAMETERS: tuple[Invariant, ...] = (collective.averaged_exactly_once, *SHARED)
UNSHARED: tuple[Invariant, ...] = (collective.shares_nothing, collective.updated_once)


def _collective_laws_of(program: Program, mode: CollectiveMode) -> tuple[Invariant, ...]:
    """The laws of a job without servers.

    What ParallelExecutor made of an nccl2 program averages gradients.
    """
    if collective.is_startup(program):
        return (collective.ids_drawn_once,) if mode.averages is None else COLLECTIVE_STARTUP
    if mode.averages is Payload.PARAMETERS:
        return AVERAGED_PARAMETERS
    shares = any(op.type == "c_allreduce_sum" for op in program.main.ops)
    return UNSHARED if mode.averages is None and not shares else AVERAGED_GRADIENTS


def invariants_of(program: Program) -> tuple[Invariant, ...]:
    """The laws of a complete program of a cluster: a trainer's or a server's, main or startup."""
    plan = None if program.deployment is None else program.deployment.plan
    if plan is not None and plan.collective is not None:
        return _always(plan) + _collective_laws_of(program, plan.collective.kind)
    if program.deployment is not None and program.deployment.server_index is not None:
        return ALWAYS + (PSERVER if len(program.blocks) > 1 else PSERVER_STARTUP)
    return ALWAYS + (TRAINER_STARTUP if trainer.is_startup(program) else TRAINER)


def _always(plan: Plan) -> tuple[Invariant, ...]:
    """The laws that hold before the first pass; without servers there are no slices."""
    return ALWAYS if plan.collective is None else (defined_before_use,)


def _hold(program: Program, plan: Plan, laws: Sequence[Invariant]) -> None:
    for law in laws:
        for fault in law(program, plan):
            sentence = " ".join((inspect.getdoc(law) or law.__name__).split("\n\n")[0].split())
            raise IllegalProgram(sentence.rstrip("."), fault)


def verify(program: Program, plan: Plan) -> None:
    """Holds a complete program of a cluster against its laws.

    Raises:
        IllegalProgram: it breaks one.
        ValueError: the program is not one of a cluster.
    """
    if program.deployment is None:
        raise ValueError("verify: expected a program of a cluster, got a single-node one")
    _hold(program, plan, invariants_of(program))


def verify_servers(programs: Sequence[Program], plan: Plan) -> None:
    """Every slice is owned by exactly one of the servers' main programs, the one that the plan
    names.

    Raises:
        IllegalProgram: a slice is on two servers, on none, or on another one.
    """
    for fault in pserver.owned_once(programs, plan):
        raise IllegalProgram("every slice is owned exactly once over all servers", fault)


def run(program: Program, plan: Plan, stages: Sequence[Stage]) -> Program:
    """Runs the passes in order.  After each one, all laws that hold by then are checked.

    Raises:
        IllegalProgram: a pass broke a law, or was given a program that does.
    """
    laws = _always(plan)
    _hold(program, plan, laws)
    for stage in stages:
        program = stage.transform(program, plan)
        laws += stage.laws
        _hold(program, plan, laws)
    return program
