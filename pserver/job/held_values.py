"""What a server holds as a program's values: given to a server that starts, taken from one that
ends.

[Note: a server's file]  A pserver program with these values is all that a job needs of its server:
slices, optimizer states, rows, hyper-parameters, and how many steps each trainer has taken.  A
server that starts with such a file begins where that one ended, and a trainer that joins it counts
its steps from there, whatever process it is.  The checkpoints of job_files.py differ: they go back
into a job whose trainers live, and know these by their incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pserver.errors import Refused
from pserver.job.installed_program import CHUNK_ROWS, InstalledProgram
from pserver.job.membership import Membership
from pserver.table.gradient import RowGradient
from transpiler.ir.graph import Role, Storage
from transpiler.ir.served import HeldRows, Served
from transpiler.program import Program

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


def check_values(program: Program, values: Storage) -> None:
    """Returns if a server may start with these values of its program.

    Raises:
        Refused: a slice has none, or the values are of another job.
    """
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        if variable.name not in values.tensors:
            raise Refused(
                f"expected a pserver program with its values, as Executor.save writes it; got no "
                f"value of {variable.name!r}"
            )
    assert program.deployment is not None, "a pserver program"
    plan = program.deployment.plan
    if values.served is not None and (
        len(values.served.versions) != len(plan.lanes)
        or values.served.tables.keys() != {table.name for table in plan.tables}
    ):
        raise Refused("how far the job had come: expected the lanes and tables of the program's")


def give(values: Storage, installed: InstalledProgram, members: Membership) -> None:
    """A server that starts takes over copies of these values.

    Raises:
        Refused: a table's rows are of another table.
    """
    installed.slices.load(values.tensors)
    for name, (ids, rows) in values.rows.items():
        _give_rows(installed, name, ids, rows)
    if values.served is None:
        return
    for name, held in values.served.tables.items():
        installed.restore_table(name, held.metadata)
        installed.load_rows(name, {key: array.numpy() for key, array in held.arrays.items()})
    for lane, version in zip(installed.lanes, values.served.versions, strict=True):
        lane.version = version
        lane.hparams = values.served.hparams
    members.begin_at(values.served.steps)


def _give_rows(
    installed: InstalledProgram, name: str, ids: torch.Tensor, rows: torch.Tensor
) -> None:
    """The first rows of a table, of which this server takes its own."""
    for begin in range(0, len(ids), CHUNK_ROWS):
        chunk = RowGradient(ids[begin : begin + CHUNK_ROWS], rows[begin : begin + CHUNK_ROWS])
        own = installed.own_rows(chunk)
        installed.load_rows(name, {"ids": own.ids.numpy(), "values": own.rows.contiguous().numpy()})


def take(values: Storage, installed: InstalledProgram, members: Membership) -> None:
    """Puts copies of all that a server holds into ``values``, of one moment between two steps."""
    with installed.quiesce.paused():
        values.tensors = {name: held.clone() for name, held in installed.slices.tensors()}
        values.rows = {}
        values.served = Served(
            [lane.version for lane in installed.lanes],
            members.steps(len(installed.lanes)),
            {group: held for lane in installed.lanes for group, held in lane.hparams.items()},
            {name: _rows(table) for name, table in installed.tables.items()},
        )
        values.steps = values.served.step


def _rows(table: LockedTable) -> HeldRows:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 0, changed_since_save=False, materialized=False)
        chunks.append(chunk)
    arrays = {
        name: torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks]))
        for name in chunks[0]
    }
    return HeldRows(arrays, table.metadata())
