"""``pserver save``: writes what the servers of a running or a failed job hold, as a checkpoint that
``fleet.load`` reads on any number of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
        told = partial(bar.update, task)
        written = write(job, path, SAVED_BY, lambda text: told(description=text))
        said = f"saved step {job.step} of the {'failed' if job.failure else 'running'} job, "
        said += written
    console.print(f"{said}: {path}", markup=False, highlight=False, soft_wrap=True)
    if job.apart:
        console.print(f"warning: {job.apart}", markup=False, highlight=False, soft_wrap=True)


def write(job: HeldJob, path: str, by: str, tell: Callable[[str], None]) -> str:
    """Writes what a job holds as a checkpoint.

    Args:
        by: which command does.
        tell: told what is done.

    Returns:
        How much it is, for a sentence.

    Raises:
        OSError: the directory cannot be written; the checkpoint that was there stays.
    """
    tensors = {}
    for name, tensor in job.tensors():
        tell(f"reading {name}")
        tensors[name] = tensor
    meta: dict[str, Any] = {
        "step": job.step,
        "groups": job.hparams(),
        "saved_by": by,
        "unknown": job.unknown(),
    }
    if places := job.log_places():
        meta["log"] = {"servers": places}
    rows = 0
    with checkpoint.writing(path) as writer:
        tell(f"writing {path}")
        writer.tensors(tensors)
        for table in job.plan.tables:
            tell(f"reading table {table.name}")
            known = meta.setdefault("tables", {})[table.name] = dict[str, Any]()
            rows += writer.chunks(table.name, job.chunks(table.name, known))
        writer.commit(meta)
    tables = f", {rows} rows of {len(job.plan.tables)} tables" if job.plan.tables else ""
    return f"{len(tensors)} tensors{tables}"
