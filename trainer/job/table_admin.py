"""What a script asks of its tables between steps: their status, and to drop rows.

``trainer/fleet.py`` offers these calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.job.current import distributed, present
from transpiler.plan.settings import number, optional, refuse_type

DAYS = number(lambda value: value >= 0, "of 0 or more that is finite")
THRESHOLD = optional(number(lambda value: True, "that is finite"))


def table_status() -> dict[str, dict[str, int]]:
    """The status of every table, over all servers.

    Any trainer may ask at any time, without waiting for others.

    Returns:
        By table: "rows", "bytes_held", and what was counted since the start ("admitted",
        "evicted", ...).  Empty where there are no tables.

    Raises:
        PServerError: a server does not answer.

    ::

        fleet.init()
        model = fleet.distributed_model(DistributedEmbedding(8, name="emb"))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([3, 5])).sum().backward()
        optimizer.step()
        fleet.table_status()["emb"]["rows"]  # 2
    """
    job = present()
    if job.tables is None:
        return {}
    if job.communicator is None:
        return job.tables.status()
    found: dict[str, Counter[str]] = {}
    for client in job.communicator.clients:
        for table in client.table_status():
            held = {"bytes_held": table.bytes_held, **table.counters, "rows": table.rows}
            found.setdefault(table.name, Counter()).update(held)
    return {name: dict(sorted(counted.items())) for name, counted in sorted(found.items())}


def shrink(
    threshold: float | None = None, days: float = 1.0, tables: Collection[str] = ()
) -> dict[str, int]:
    """Applies time decay, then drops rows below the score threshold or past their TTL.

    Every trainer calls this, between steps; when it returns, all servers have done it.

    Args:
        threshold: in place of each table's own ``delete_threshold``.
        days: that have passed since the last call.
        tables: only these; none means all.

    Returns:
        How many rows were dropped, by table (on trainer 0; elsewhere none).

    Raises:
        TypeError: an argument is something else.
        ValueError: a table that the job does not have; fewer than 0 days; or a number that is not
            finite.
        PServerError: a server is lost.

    ::

        fleet.shrink(days=1.0)  # {"emb": 120} where 120 rows of the table "emb" were dropped
    """
    job = present()
    known = [] if job.tables is None else job.tables.names
    threshold = THRESHOLD.check("shrink: threshold", threshold)
    days = DAYS.check("shrink: days", days)
    names = _names(tables, known)
    optimizer = distributed(job)
    optimizer.flush()
    optimizer.barrier("shrink")
    removed: Counter[str] = Counter()
    if job.communicator is None and job.tables is not None:
        removed.update(job.tables.shrink(days, threshold, names or known))
    elif job.communicator is not None and job.is_first:
        clients = job.communicator.clients
        with ThreadPoolExecutor(len(clients), "shrink") as pool:
            for found in pool.map(lambda each: each.shrink(days, threshold, names), clients):
                removed.update(found)
    optimizer.barrier("shrunk")
    return dict(sorted(removed.items()))


def _names(tables: Any, known: Collection[str]) -> list[str]:
    """The tables that are meant.

    Raises:
        TypeError: these are no names.
        ValueError: the job has no such table.
    """
    if isinstance(tables, str | bytes) or not isinstance(tables, Collection):
        refuse_type("shrink: tables", "a list of names", tables)
    names = list(tables)
    for name in names:
        if not isinstance(name, str):
            refuse_type("shrink: tables", "a list of names", tables)
        if name not in known:
            raise ValueError(
                f"shrink: expected tables among {', '.join(known) or 'none'}, got {name!r}"
            )
    return names
