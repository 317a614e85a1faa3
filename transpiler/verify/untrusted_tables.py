"""What a server checks of the tables in a program that came over the wire.

The plan determines the blocks of a table, so the invariants of tables (tables.py) are checked here
on a program that no pass of ours may have made.  A part of untrusted_program.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from transpiler.ir.graph import Block, Role, Variable
from transpiler.ir.ops import check
from transpiler.ir.schema import DTYPES, where
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import table_of_block
from transpiler.verify.tables import table_blocks_complete, tables_held
from transpiler.verify.untrusted_plan import expect

ROLES = frozenset({Role.TABLE, Role.GRADIENT, Role.DELTA, Role.INPUT, Role.TEMPORARY})


def is_of_table(variable: Variable, plan: Plan) -> bool:
    """Whether a variable of a server's program belongs to a table.

    Such a variable may have a free number of rows, and nothing is allocated for it.
    """
    return variable.role is Role.TABLE or any(variable.of == table.name for table in plan.tables)


def check_table_variable(what: str, variable: Variable) -> None:
    """Checks the role, dtype and shape of a variable of a table.

    Raises:
        ValueError: naming the variable.
    """
    expect(
        variable.role in ROLES,
        f"{what}: expected no {variable.role.name} of a table: states are part of the rows",
    )
    expect(
        variable.dtype in DTYPES,
        f"{what}: expected a dtype among {', '.join(DTYPES)}; got {variable.dtype!r}",
    )
    widths = [size for size in variable.shape[1:] if not isinstance(size, int) or size < 1]
    expect(
        1 <= len(variable.shape) <= 2 and not widths,
        f"{what}: expected rows, got the shape {list(variable.shape)}",
    )


def blocks_of_tables(program: Program) -> tuple[list[int], list[int]]:
    """The indices of a server's blocks that answer lookups, and those of all blocks of tables."""
    tables = [block for block in program.blocks[1:] if table_of_block(block, program.main)]
    return [block.index for block in tables if block.ops[0].type == "lookup_table"], [
        block.index for block in tables
    ]


def check_tables(program: Program, plan: Plan) -> None:
    """Checks the blocks of tables against the plan.

    Raises:
        ValueError: naming block, op and table.
    """
    _, indices = blocks_of_tables(program)
    for index in indices:
        _check_block(program.blocks[index], program.main.variables)
    for invariant in (tables_held, table_blocks_complete):
        for violation in invariant(program, plan):
            place = ", ".join(
                part for part in (violation.op, f"table {violation.variable!r}") if part
            )
            raise ValueError(f"{place}: {violation.why}")


def _check_block(block: Block, shared: Mapping[str, Variable]) -> None:
    for number, op in enumerate(block.ops):
        try:
            check(op)
            for name in (*op.inputs, *op.outputs):
                known = name in block.variables or name in shared
                expect(
                    known,
                    f"{where(op)}: expected variables of its block or of block 0, got {name!r}",
                )
        except ValueError as error:
            raise ValueError(f"block {block.index}, op {number}: {error}") from error
