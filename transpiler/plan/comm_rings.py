"""Rings: the process groups of a job without servers, by name, and which trainers are in them.

A flat ring has all trainers and the id ``NCCLID``, ``NCCLID_1``, ...  Trainers may form rows, for
example the trainers of one host.  Ring i then has two further ids: ``Hierarchical_inter_NCCLID_i``
of the trainers of each row, and ``Hierarchical_exter_NCCLID_i`` of the heads, the first trainers of
all rows.  A sum is reduced within each row, then among the heads, then broadcast within each row,
so that only one trainer of a row talks to other hosts (Jia et al.: Highly scalable deep learning
training system with mixed-precision, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from transpiler.plan.plan import Collective


def flat_id(ring: int) -> str:
    """The id of a ring of all trainers."""
    return f"NCCLID_{ring}" if ring else "NCCLID"


def row_id(ring: int) -> str:
    """The id of a ring's rows; each row is a group of its own."""
    return f"Hierarchical_inter_NCCLID_{ring}"


def heads_id(ring: int) -> str:
    """The id of a ring's heads."""
    return f"Hierarchical_exter_NCCLID_{ring}"


def ids_of(collective: Collective, ring: int) -> tuple[str, ...]:
    """The ids of one ring."""
    return (flat_id(ring), row_id(ring), heads_id(ring)) if collective.inner else (flat_id(ring),)


def all_ids(collective: Collective) -> tuple[str, ...]:
    """The ids of all rings, the flat ones first."""
    flat = tuple(flat_id(ring) for ring in range(collective.rings))
    return flat + tuple(
        name for ring in range(collective.rings) for name in ids_of(collective, ring)[1:]
    )


def row_of(rank: int, inner: int) -> tuple[int, ...]:
    """The trainers of the row of trainer ``rank``; ``inner`` of them are in a row."""
    return tuple(range(rank - rank % inner, rank - rank % inner + inner))


def heads(trainers: int, inner: int) -> tuple[int, ...]:
    """The first trainer of every row."""
    return tuple(range(0, trainers, inner))


def row_length(asked: int, endpoints: Sequence[str]) -> int:
    """The number of trainers in a row.

    Args:
        asked: ``hierarchical_allreduce_inter_nranks``; 0 or 1: as many as run on each host.
        endpoints: HOST:PORT of each trainer, by its number.

    Raises:
        ValueError: hosts have different numbers of trainers, or the trainers of a host do not have
            consecutive numbers; or the trainers do not divide into several rows of this length.
    """
    name, trainers = "hierarchical_allreduce_inter_nranks", len(endpoints)
    if asked <= 1:
        hosts = [
            (host, len(list(group)))
            for host, group in groupby(endpoint.rpartition(":")[0] for endpoint in endpoints)
        ]
        counts = {count for _, count in hosts}
        if len(counts) > 1 or len(dict(hosts)) < len(hosts):
            said = ", ".join(f"{count} on {host}" for host, count in hosts)
            raise ValueError(
                f"{name}={asked}: expected the same number of trainers in a row on every host, "
                f"got {said}; say it"
            )
        asked = counts.pop()
    if not 1 < asked < trainers:
        raise ValueError(
            f"{name}: expected from 2 to less than the number of trainers, {trainers}, got "
            f"{asked}; leave use_hierarchical_allreduce off"
        )
    if trainers % asked:
        raise ValueError(
            f"{name}: expected a divisor of the number of trainers, got {trainers} trainers and "
            f"{asked}"
        )
    return asked


def row_or_all(asked: int, hosts: Sequence[str]) -> int:
    """The same for an eager job, whose trainers may all be in one row: on one host, or because they
    are no more than asked.

    Args:
        asked: as above.
        hosts: the host of each trainer, by its number.

    Raises:
        ValueError: as above.
    """
    if asked >= len(hosts) or (asked <= 1 and len(set(hosts)) == 1):
        return len(hosts)
    return row_length(asked, [f"{host}:0" for host in hosts])


# ---- in words ----


def describe_collective(collective: Collective) -> str:
    """The rings of a plan, and when its trainers average, in words: "2 rings, every 4 steps"."""
    words = f"{collective.rings} ring{'' if collective.rings == 1 else 's'}"
    if collective.steps > 1 or collective.adaptive:
        words += f", {seldom(collective.steps, collective.begin)}"
    words += ", which follow the loss" if collective.adaptive else ""
    words += ", sharded updates" if collective.sharded else ""
    words += f", in rows of {collective.inner}" if collective.inner else ""
    return words + (f", gradients as {collective.dtype}" if collective.dtype else "")


def seldom(steps: object, begin: object) -> str:
    """When parameters are averaged: "every 4 steps after step 30"."""
    every = "every step" if steps == 1 else f"every {steps} steps"
    return f"{every} after step {begin}" if begin else every
