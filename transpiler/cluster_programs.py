"""The programs of a job with servers: a plan's pipelines, run on a single-node program.

A trainer's two programs come from the single-node ones; a server's two come from the plan alone, so
that an eager script, which has no graph, gets the same ones.  Programs of a job without servers are
in ``collective.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from transpiler.ir.graph import Block, Op, Role, Storage, freeze
from transpiler.ir.table_ops import table_variable
from transpiler.passes import (
    PSERVER_PASSES,
    forward_passes,
    trainer_passes,
    trainer_startup_passes,
)
from transpiler.passes.pserver import held, rows_at_start, server_of, value_variable
from transpiler.plan.plan import Deployment, Placement, Plan, Slice
from transpiler.program import Program
from transpiler.verify.evaluation import changes_nothing
from transpiler.verify.verify import run, verify


def trainer_program(program: Program, deployment: Deployment) -> Program:
    """A trainer's main program.

    Args:
        program: the single-node main program.
        deployment: this trainer's.

    Raises:
        IllegalProgram: the program violates an invariant, or a gradient has no op that produces it.
    """
    return run(
        replace(program, deployment=deployment),
        deployment.own_plan,
        trainer_passes(deployment.runtime_split_send_recv),
    )


def forward_program(program: Program, deployment: Deployment, trained: Program) -> Program:
    """A forward program as a trainer runs it: against the servers' values and tables.

    Args:
        program: single-node, without updates.
        deployment: this trainer's.
        trained: the trainer's main program, whose values it computes with.

    Raises:
        IllegalProgram: the program violates an invariant.
        ValueError: it has a parameter, buffer or table that the trained program has not, or it
            changes one.
    """
    if program.main.variables_of(Role.GRADIENT):
        raise ValueError(
            "transpile: expected a program that evaluates or has optimizer ops, got one with "
            "gradients that nothing uses"
        )
    known = trained.main.variables
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.TABLE):
        mine, own = known.get(variable.name), (variable.shape, variable.dtype)
        if mine is None or (mine.shape, mine.dtype) != own:
            got = "none" if mine is None else f"{mine.dtype}{list(mine.shape)}"
            raise ValueError(
                f"transpile: the forward program has {variable.name} {variable.dtype}"
                f"{list(variable.shape)}: expected it in the program that the job trains, got "
                f"{got}; capture both from the same module"
            )
    found = replace(program, deployment=deployment, storage=trained.storage or program.storage)
    for violation in changes_nothing(found):
        raise ValueError(
            f"transpile: the forward program changes {violation.variable or 'a variable'} "
            f"({violation.op}): give it in eval() mode, or its clone(for_test=True)"
        )
    passes = forward_passes(deployment.runtime_split_send_recv)
    made = run(found, deployment.plan, passes)
    verify(made, deployment.plan)
    return made


def check_belongs(plan: Plan, startup: Program) -> None:
    """Checks that this is a single-node startup program, of the program that the plan is for.

    Raises:
        ValueError: it has other ops than init, or lacks a variable.
    """
    odd = next((op.type for op in startup.main.ops if op.type not in ("init", "fake_init")), None)
    if odd is not None:
        raise ValueError(
            "startup_program: expected a single-node startup program, of init ops only, got the "
            f"op {odd!r}"
        )
    held = {
        variable.name: variable
        for variable in startup.main.variables_of(Role.PARAMETER, Role.BUFFER)
    }
    for placement in plan.placements:
        found = held.get(placement.name)
        if found is None or found.shape != placement.shape or found.dtype != placement.dtype:
            got = "none" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ValueError(
                "startup_program: expected the one that belongs to the main program, with "
                f"{placement.name} "
                f"{placement.dtype}{list(placement.shape)}; got {got}"
            )

    for table in plan.tables:
        if table.name not in startup.main.variables:
            raise ValueError(
                "startup_program: expected the one that belongs to the main program, with "
                f"{table.name}; got none"
            )


def trainer_startup(startup: Program, deployment: Deployment) -> Program:
    """A trainer's startup program.

    Args:
        startup: the single-node startup program.
        deployment: this trainer's.

    Raises:
        IllegalProgram: the startup program initialises other variables than the plan places.
    """
    return run(
        replace(startup, deployment=deployment),
        deployment.plan,
        trainer_startup_passes(deployment.runtime_split_send_recv),
    )


def pserver_program(deployment: Deployment) -> Program:
    """A server's main program.

    Args:
        deployment: that of the server, ``deployment.server_index``.

    Raises:
        ValueError: the deployment is a trainer's.
    """
    return run(Program((Block(0, freeze({}), ()),), deployment), deployment.plan, PSERVER_PASSES)


def pserver_startup(deployment: Deployment, storage: Storage | None = None) -> Program:
    """A server's startup program: one ``init`` for each slice and table that it holds.

    States are not initialised: the update rule makes them at its first step, or they are loaded.

    Args:
        deployment: that of the server, ``deployment.server_index``.
        storage: the module's live values; the program's storage then holds copies of the slices.
            None: the program holds no values, and its server waits for trainer 0's.

    Raises:
        ValueError: the deployment is a trainer's, or a value is missing or of another shape.
    """
    program = Program((Block(0, freeze({}), ()),), deployment)
    slices = list(held(deployment.plan, server_of(program)))
    variables = freeze(
        {slice_.name: value_variable(placement, slice_) for placement, slice_ in slices}
    )
    tables = {table.name: table_variable(table) for table in deployment.plan.tables}
    names = [*variables, *tables]
    program = program.with_blocks(
        Block(0, freeze({**variables, **tables}), tuple(Op("init", {}, (name,)) for name in names))
    )
    verify(program, deployment.plan)
    if storage is None:
        return program
    values = {
        slice_.name: _slice_values(placement, slice_, storage) for placement, slice_ in slices
    }
    return replace(
        program,
        storage=Storage(values, storage.optimizer, rows=rows_at_start(deployment.plan, storage)),
    )


def _slice_values(placement: Placement, slice_: Slice, storage: Storage) -> torch.Tensor:
    """A contiguous copy of a slice's values, on the CPU."""
    if placement.name not in storage.tensors:
        raise ValueError(
            f"expected a value for {placement.name}, which server {slice_.server} holds a part of; "
            "got none"
        )
    value = storage.tensors[placement.name].detach()
    if tuple(value.shape) != placement.shape:
        raise ValueError(
            f"{placement.name}: expected a value of shape {list(placement.shape)}, got "
            f"{list(value.shape)}"
        )
    part = value.reshape(-1)[slice_.begin : slice_.end].reshape(slice_.shape)
    return part.cpu().clone(memory_format=torch.contiguous_format)
