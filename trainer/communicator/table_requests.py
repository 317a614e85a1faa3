"""What a communicator has for a plan's tables: nothing, and no numba, where the plan has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pserver.client.client import Client
from pserver.client.stream import Destination
from trainer.communicator.lane import LaneSender
from trainer.communicator.roll import Roll
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from trainer.communicator.lookups import Lookups
    from trainer.communicator.table_sources import TableSources


def lookups_of(plan: Plan) -> Lookups | None:
    """The requests for rows; None for a plan without tables."""
    if not plan.tables:
        return None
    from trainer.communicator.lookups import Lookups  # imports numba

    return Lookups(plan.tables)


def sources_of(
    plan: Plan,
    lookups: Lookups | None,
    lanes: Sequence[LaneSender],
    clients: Sequence[Client],
    roll: Roll,
    drain: Callable[[], None],
) -> TableSources | None:
    """Where the embeddings' rows come from; None for a plan without tables.

    Args:
        roll: which trainers are there.
        drain: waits until every step sent has been applied.
    """
    if lookups is None:
        return None
    from trainer.communicator.table_sources import TableSources  # imports numba

    return TableSources(plan, lookups, lanes, clients, roll, drain)


def table_destination(lookups: Lookups | None, server: int) -> Destination | None:
    """Where the rows of a server's replies go."""
    return None if lookups is None else partial(lookups.destination, server)
