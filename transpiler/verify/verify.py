"""Checks programs against their invariants, at once or after every pass of a pipeline.

An error names the op, the variable and the invariant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transpiler.plan.modes import Payload
from transpiler.plan.plan import Collective, Plan
from transpiler.program import Program
from transpiler.verify import collective, evaluation, pserver, tables, trainer
from transpiler.verify import trainer as averaged
from transpiler.verify.invariants import (
    IllegalProgram,
    Invariant,
    Violation,
    defined_before_use,
    slices_tile,
)
from transpiler.verify.trainer import merged_once

__all__ = [
    "IllegalProgram",
    "Invariant",
    "invariants_of",
    "PassStage",
    "run",
    "verify",
    "verify_servers",
    "verify_single_node",
    "Violation",
]

Pass = Callable[[Program, Plan], Program]


@dataclass(frozen=True, slots=True)
class PassStage:
    """A pass of a pipeline.

    Attributes:
        transform: the pass.
        invariants: hold after it and after every later pass.
    """

    transform: Pass
    invariants: tuple[Invariant, ...] = ()


EVERY_PROGRAM: tuple[Invariant, ...] = (slices_tile, defined_before_use, merged_once)
TRAINER: tuple[Invariant, ...] = (
    trainer.updated_in_one_place,
    trainer.sent_exactly_once,
    averaged.gradients_averaged_once,
    averaged.averaged_before_barriers,
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
EVALUATION: tuple[Invariant, ...] = (
    evaluation.changes_nothing,
    evaluation.received_before_computing,
    trainer.parameters_received_once,
    trainer.concatenated_after_arrival,
    tables.rows_pulled_once,
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
    collective.ids_generated_once,
    collective.rings_initialized_once,
    collective.parameters_broadcast,
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
    collective.cast_both_ways,
    *SHARED,
)
AVERAGED_PARAMETERS: tuple[Invariant, ...] = (
    collective.averaged_exactly_once,
    collective.adapted_once,
    *SHARED,
)
SHARDED_UPDATES: tuple[Invariant, ...] = (
    collective.loss_gradient_scaled,
    collective.reduced_to_its_owner,
    collective.updated_by_its_owner,
    collective.broadcast_by_its_owner,
    collective.awaited_before_use,
)
SINGLE_NODE: tuple[Invariant, ...] = (defined_before_use, merged_once)
UNSHARED: tuple[Invariant, ...] = (collective.shares_nothing, collective.updated_once)


def _collective_invariants_of(program: Program, plan: Collective) -> tuple[Invariant, ...]:
    """The invariants of a program in a job without servers.

    An nccl2 program with sums is one that ParallelExecutor has made: it averages gradients.
    """
    mode = plan.kind
    if collective.is_startup(program):
        return (collective.ids_generated_once,) if mode.averages is None else COLLECTIVE_STARTUP
    if mode.averages is Payload.PARAMETERS:
        return AVERAGED_PARAMETERS
    if plan.sharded:
        return SHARDED_UPDATES
    shares = any(op.type == "c_allreduce_sum" for op in program.main.ops)
    return UNSHARED if mode.averages is None and not shares else AVERAGED_GRADIENTS


def invariants_of(program: Program) -> tuple[Invariant, ...]:
    """The invariants of a complete program of a job: a trainer's or a server's; main, startup, or
    the trainer's clone for tests.
    """
    plan = None if program.deployment is None else program.deployment.plan
    if plan is not None and plan.collective is not None:
        return _before_any_pass(plan) + _collective_invariants_of(program, plan.collective)
    if program.deployment is not None and program.deployment.server_index is not None:
        return EVERY_PROGRAM + (PSERVER if len(program.blocks) > 1 else PSERVER_STARTUP)
    if evaluation.is_evaluation(program):
        return EVERY_PROGRAM + EVALUATION
    return EVERY_PROGRAM + (TRAINER_STARTUP if trainer.is_startup(program) else TRAINER)


def _before_any_pass(plan: Plan) -> tuple[Invariant, ...]:
    """The invariants that hold before the first pass; without servers there are no slices."""
    return EVERY_PROGRAM if plan.collective is None else SINGLE_NODE


def _check(program: Program, plan: Plan, invariants: Sequence[Invariant]) -> None:
    for invariant in invariants:
        for violation in invariant(program, plan):
            sentence = " ".join(
                (inspect.getdoc(invariant) or invariant.__name__).split("\n\n")[0].split()
            )
            raise IllegalProgram(sentence.rstrip("."), violation)


def verify(program: Program, plan: Plan) -> None:
    """Checks a complete program of a job against its invariants.

    Raises:
        IllegalProgram: it violates an invariant.
        ValueError: the program is a single-node one.
    """
    if program.deployment is None:
        raise ValueError("verify: expected a program of a job, got a single-node one")
    _check(program, plan, invariants_of(program))


def verify_single_node(program: Program) -> None:
    """Checks a single-node program: each variable is defined before it is used, and gradients are
    merged before they update.

    Raises:
        IllegalProgram: it violates one of the two.
    """
    for violation in defined_before_use(program, None):
        raise IllegalProgram("every variable is defined before its first use", violation)
    for violation in merged_once(program, None):
        raise IllegalProgram("gradients are merged once, before all updates", violation)


def verify_servers(programs: Sequence[Program], plan: Plan) -> None:
    """Checks that every slice is owned by exactly one of the servers' main programs, the one that
    the plan names.

    Raises:
        IllegalProgram: a slice is on two servers, on none, or on another one.
    """
    for violation in pserver.owned_once(programs, plan):
        raise IllegalProgram("every slice is owned exactly once over all servers", violation)


def run(program: Program, plan: Plan, stages: Sequence[PassStage]) -> Program:
    """Runs a pipeline.  After each pass, all invariants that hold by then are checked.

    Args:
        program: the argument of the first pass.
        stages: in order.

    Returns:
        The program that the last pass made.

    Raises:
        IllegalProgram: a pass made a program that violates an invariant, or ``program`` violates
            one.
    """
    invariants = _before_any_pass(plan)
    _check(program, plan, invariants)
    for stage in stages:
        program = stage.transform(program, plan)
        invariants += stage.invariants
        _check(program, plan, invariants)
    return program
