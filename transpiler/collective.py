"""The programs of a job without servers: a plan's pipelines, run on a single-node program.

::

    check_arguments      the arguments fit a mode without servers
    deployment_of        the plan: which trainers, which rings          strategy/collective_plan.py
    collective_program   the main program, by the passes of its mode    passes/collective.py
    collective_startup   the startup program, likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transpiler.ir.graph import Op
from transpiler.passes import (
    COLLECTIVE_STARTUP_PASSES,
    GRADIENT_PASSES,
    MAIN_PASSES,
    NCCL2_STARTUP_PASSES,
    SHARDED_PASSES,
)
from transpiler.plan.plan import Collective, Deployment, Execution
from transpiler.program import Program
from transpiler.program_planner import plan_collective
from transpiler.verify.verify import run

# the default of ``pservers`` and of ``current_endpoint``
ENDPOINT = "127.0.0.1:6174"


def check_arguments(
    mode: str,
    pservers: str,
    sync_mode: bool | None,
    endpoints: Sequence[str],
    trainer_id: int,
    own: str,
) -> None:
    """Checks the arguments of ``transpile`` in a mode without servers.

    Args:
        own: ``current_endpoint``.

    Raises:
        ValueError: servers are given, or ``sync_mode=False``, or another trainer's endpoint.
    """
    if pservers != ENDPOINT:
        raise ValueError(
            f"pservers={pservers!r} has no effect with mode={mode!r}, which has no servers: leave "
            "it out"
        )
    if sync_mode is False:
        raise ValueError(
            f"sync_mode=False contradicts mode={mode!r}: trainers without servers step together"
        )
    if own not in (endpoints[trainer_id], ENDPOINT):
        raise ValueError(
            f"current_endpoint: expected that of trainer {trainer_id} in trainers, "
            f"{endpoints[trainer_id]}, got {own!r}"
        )


def deployment_of(
    program: Program, collective: Collective, endpoints: Sequence[str], trainer_id: int
) -> Deployment:
    """This trainer's deployment of a single-node program.

    Raises:
        ValueError: the program has no optimizer op, or is already one of a cluster.
    """
    return Deployment(
        plan_collective(program, collective, len(endpoints)), tuple(endpoints), trainer_id
    )


def collective_program(program: Program, deployment: Deployment) -> Program:
    """A trainer's main program, from the single-node one.

    Raises:
        IllegalProgram: the program violates an invariant.
        ValueError: backward does not begin with the loss's gradient.
    """
    plan = deployment.plan
    assert plan.collective is not None, "a program of a job without servers"
    passes = SHARDED_PASSES if plan.collective.sharded else MAIN_PASSES[plan.mode]
    return run(replace(program, deployment=deployment), plan, passes)


def collective_startup(startup: Program, deployment: Deployment) -> Program:
    """A trainer's startup program, from the single-node one.

    Raises:
        IllegalProgram: the startup program violates an invariant.
    """
    collective = deployment.plan.collective
    assert collective is not None, "a program of a job without servers"
    shares = collective.kind.averages is not None
    passes = COLLECTIVE_STARTUP_PASSES if shares else NCCL2_STARTUP_PASSES
    return run(replace(startup, deployment=deployment), deployment.plan, passes)


def parallel_program(program: Program) -> Program:
    """The program that ParallelExecutor runs: with nccl2 it averages gradients; others stay as they
    are.

    Raises:
        IllegalProgram: the program violates an invariant.
        ValueError: backward does not begin with the loss's gradient.
    """
    plan = None if program.deployment is None else program.deployment.plan
    if plan is None or plan.collective is None or plan.collective.kind.averages is not None:
        return program
    return run(program, plan, GRADIENT_PASSES)


def executed(program: Program, execution: Execution) -> Program:
    """A transpiled program with these execution settings; a single-node one stays as it is."""
    if program.deployment is None:
        return program
    return replace(program, deployment=replace(program.deployment, execution=execution))


def broadcast_program(program: Program) -> Program:
    """The program that broadcasts trainer 0's values, for a mode whose startup program does not
    (nccl2).

    Raises:
        IllegalProgram: its variables are not those of the plan.
    """
    assert program.deployment is not None, "a program of a job without servers"
    block = program.main
    held = {
        placement.name: block.variables[placement.name]
        for placement in program.deployment.plan.placements
    }
    inits = tuple(Op("init", {}, (name,)) for name in held)
    bare = program.with_blocks(replace(block, ops=inits, variables=held))
    return run(bare, program.deployment.plan, COLLECTIVE_STARTUP_PASSES)
