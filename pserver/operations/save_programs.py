"""``pserver save --programs``: writes what each server of a running or a failed job holds as its
program, for ``pserver serve --program``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from pserver.errors import Refused
from pserver.operations.held_job import Held, HeldJob, holding
from pserver.security.access import Access, always_open
from transpiler.files.local_path import local_path
from transpiler.ir.graph import Role, Storage
from transpiler.ir.served import HeldRows, Served
from transpiler.ir.slice_states import slice_states
from transpiler.program import Program


def save_programs(
    endpoints: Sequence[str],
    path: str,
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> None:
    """Writes ``server-0.program`` and so on, each whole or not at all.  A running job waits
    meanwhile, between two of its steps.

    Memory holds one server's part of the job.

    Args:
        endpoints: HOST:PORT of every server of the job, in any order.
        path: a directory, which is made.
        console: where the result is shown.
        access_of: by endpoint, what is proved to the server.

    Raises:
        PServerError: a server does not answer, holds nothing, or has another job; some of the job's
            servers are missing; or a job that has failed has left them at different steps.
        OSError: a file cannot be written.
        ValueError: the path is a URL.
    """
    folder = local_path(path, "pserver save --programs")
    with holding(endpoints, access_of) as job:
        if job.apart:
            raise Refused(f"{job.apart}: no job can go on from there; use pserver save")
        folder.mkdir(parents=True, exist_ok=True)
        for index, observer in enumerate(job.observers):
            file = folder / f"server-{index}.program"
            _program(observer, job).save(file)
            said = f"saved step {job.step} of {observer.endpoint}: {file}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        unknown = ", ".join(thing for thing in job.unknown() if "checkpoint" not in thing)
    console.print(f"not known to servers: {unknown}", markup=False, highlight=False, soft_wrap=True)


def _program(observer: Held, job: HeldJob) -> Program:
    """A server's program with what the server holds."""
    program = observer.program
    held = [each.name for each in program.main.variables_of(Role.PARAMETER, Role.BUFFER)]
    states = [name for own in slice_states(program.blocks).values() for name in own.values()]
    storage = Storage(observer.read([*held, *states]), None)
    versions = observer.progress.versions
    storage.served = Served(
        versions,
        {trainer: (job.step,) * len(versions) for trainer in range(job.plan.trainers)},
        observer.progress.hparams,
        {table.name: _rows(observer, table.name) for table in job.plan.tables},
    )
    return replace(program, storage=storage)


def _rows(observer: Held, table: str) -> HeldRows:
    scanned = list(observer.scan(table))
    arrays = {
        name: torch.cat([chunk[name] for chunk, _ in scanned if name in chunk])
        for name in {name for chunk, _ in scanned for name in chunk}
    }
    return HeldRows(arrays, json.dumps(dict(scanned[-1][1])))
