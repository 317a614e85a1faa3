"""``pserver save``: writes what the servers of a running or a failed job hold, as a checkpoint that
``fleet.load`` reads on any number of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pserver.checkpoint import checkpoint
from pserver.operations.held_job import HeldJob, holding
from pserver.security.access import Access, always_open

SAVED_BY = "pserver save"


def save(
    endpoints: Sequence[str],
    path: str,
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> None:
    """Writes the checkpoint: whole, or not at all.  A running job waits meanwhile, between two of
    its steps.

    Memory holds the job's dense tensors, and one chunk of a table.

    Args:
        endpoints: HOST:PORT of every server of the job, in any order.
        path: the checkpoint's directory, or its URL.
        console: where progress is shown, if it is a terminal, and the result.
        access_of: by endpoint, what is proved to the server.

    Raises:
        PServerError: a server does not answer, holds nothing, or has another job; or some of the
            job's servers are missing.
        OSError: the directory cannot be written; the checkpoint that was there stays.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        holding(endpoints, access_of) as job,
    ):
        task = bar.add_task("")
        tensors = {}
        for name, tensor in job.tensors():
            bar.update(task, description=f"reading {name}")
            tensors[name] = tensor
        meta: dict[str, Any] = {
            "step": job.step,
            "groups": job.hparams(),
            "saved_by": SAVED_BY,
            "unknown": job.unknown(),
        }
        rows = 0
        with checkpoint.writing(path) as writer:
            bar.update(task, description=f"writing {path}")
            writer.tensors(tensors)
            for table in job.plan.tables:
                bar.update(task, description=f"reading table {table.name}")
                known = meta.setdefault("tables", {})[table.name] = dict[str, Any]()
                rows += writer.chunks(table.name, job.chunks(table.name, known))
            writer.commit(meta)
        said = _said(job, len(tensors), rows)
    console.print(f"{said}: {path}", markup=False, highlight=False, soft_wrap=True)
    if job.apart:
        console.print(f"warning: {job.apart}", markup=False, highlight=False, soft_wrap=True)


def _said(job: HeldJob, tensors: int, rows: int) -> str:
    tables = f", {rows} rows of {len(job.plan.tables)} tables" if job.plan.tables else ""
    state = "failed" if job.failure else "running"
    return f"saved step {job.step} of the {state} job, {tensors} tensors{tables}"
