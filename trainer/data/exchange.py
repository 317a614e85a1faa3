"""Samples that change trainers.

Each trainer sends every sample to the trainer that its hash names, some at a time, so that
messages stay small.  Nobody lets go of what it had before all trainers have compared what was sent
with what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pserver.errors import PServerError
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.data.columns import Array, Column, Columns, Ragged, joined, samples_of, taken
from trainer.data.sample_hash import checksum

ROUND_SAMPLES = 2**18  # that a trainer sends at once
CPU = torch.device("cpu")
WHAT = "an exchange of samples"
NUMBER = ""  # the column of the samples' numbers: no slot has this name


class SampleExchange:
    """One trainer's part in exchanges of samples.  Not thread-safe.

    Args:
        groups: of the trainers, who all make one at the same time.

    Raises:
        PServerError: the group does not come up.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._rank, self._size = groups.rank, groups.size
        self._group = groups.group("samples", range(self._size), CPU)

    def gathered(self, *numbers: int) -> Array:
        """int64 [trainers, numbers]: what each trainer says.

        Raises:
            TrainerLost: another trainer is gone.
        """
        return self._table(np.array(numbers, np.int64))

    def exchange(
        self, columns: Columns, to: Array, advance: Callable[[int], None] = lambda _: None
    ) -> dict[str, Column]:
        """Sends samples to other trainers, and gets theirs.

        Args:
            columns: with the samples' numbers; they stay.
            to: int64 [samples]: the trainer that gets each.
            advance: called with how many samples have gone.

        Returns:
            The samples that this trainer has got, of all trainers together as many as they had.

        Raises:
            TrainerLost: another trainer is gone; nothing has changed here.
            RuntimeError: samples are missing, or have come twice; nothing has changed here.
        """
        samples = samples_of(columns)
        rounds = int(self.gathered(-(-samples // ROUND_SAMPLES)).max())
        got = []
        for begin in range(0, max(rounds, 1) * ROUND_SAMPLES, ROUND_SAMPLES):
            end = min(begin + ROUND_SAMPLES, samples)
            places = np.arange(min(begin, end), end)
            places = places[np.argsort(to[places], kind="stable")]
            got.append(self._round(taken(columns, places), to[places]))
            advance(end)
        found = joined(got)
        self._compare(columns, found)
        return found

    def _round(self, columns: Columns, to: Array) -> dict[str, Column]:
        """Exchanges samples, which are sorted by the trainer that gets them."""
        table = self._table(np.bincount(to, minlength=self._size).astype(np.int64))
        sent, comes = table[self._rank], table[:, self._rank]
        found: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(column, Ragged):
                found[name] = self._swapped(column, sent, comes)
                continue
            counts = self._swapped(column.counts, sent, comes)
            values = self._swapped(column.values, _sums(column.counts, sent), _sums(counts, comes))
            found[name] = Ragged.of(values, counts)
        return found

    def _swapped(self, rows: Array, sent: Array, comes: Array) -> Array:
        """Rows of a column: ``sent`` to each trainer, ``comes`` from each."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((int(comes.sum()), *rows.shape[1:]), rows.dtype)
        size = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
        splits = [(each * size).tolist() for each in (comes, sent)]
        self._do(partial(self._group.alltoall_base, _bytes(out), _bytes(rows), *splits))
        return out

    def _table(self, own: Array) -> Array:
        """int64 [trainers, ...]: a row from each trainer."""
        found = torch.zeros((self._size, *own.shape), dtype=torch.int64)
        found[self._rank] = torch.from_numpy(own)
        self._do(partial(self._group.allreduce, found))
        table: Array = found.numpy()
        return table

    def _do(self, operation: Callable[[], torch.distributed.Work]) -> None:
        self._groups.wait(self._groups.begin(operation, WHAT), WHAT, CPU)

    def _compare(self, had: Columns, found: Columns) -> None:
        facts = [(samples_of(each), checksum(np.asarray(each[NUMBER]))) for each in (had, found)]
        with np.errstate(over="ignore"):
            had_all, found_all = self.gathered(*facts[0], *facts[1]).sum(0).reshape(2, 2).tolist()
        if had_all != found_all:
            raise RuntimeError(
                f"global_shuffle: expected {had_all[0]} samples to arrive, as all trainers had, "
                f"got {found_all[0]}"
                + (", others" if had_all[0] == found_all[0] else "")
                + ": each trainer keeps those that it had"
            )


def exchanged(
    group: ElasticGroup, columns: Columns, to: Array, advance: Callable[[int], None]
) -> Columns:
    """Samples change trainers among those that are there.  What is to go to another trainer goes
    nowhere: who gets a lease for it reads it again.

    Args:
        group: of the trainers that are there.
        columns, to, advance: see :meth:`SampleExchange.exchange`.

    Returns:
        The samples that this trainer has then; those that it had, where the others have made this
        exchange before it came.

    Raises:
        PServerError: what has ended the job.
        RuntimeError: samples are missing, or have come twice.
        ValueError: another trainer makes another call.
    """
    while True:
        told = group.told(WHAT)
        if group.is_past:
            return columns
        if others := sorted(trainer for trainer, text in told.items() if text != WHAT):
            raise ValueError(f"expected {WHAT} on every trainer, got another call on {others[0]}")
        places = {member.trainer: place for place, member in enumerate(group.members)}
        there = np.array([places.get(each, -1) for each in range(max(places) + 1)], np.int64)
        place = np.where(to < len(there), there[np.minimum(to, len(there) - 1)], -1)
        going = np.flatnonzero(place >= 0)
        failure, found = "", columns
        try:
            exchange = SampleExchange(group.groups())
            found = exchange.exchange(taken(columns, going), place[going], advance)
        except PServerError as error:  # one of them is gone: those that are left do it again
            failure = str(error)
        if group.confirmed(failure):
            return found


def _sums(counts: Array, parts: Array) -> Array:
    """The sums of counts in parts of so many."""
    ends = np.cumsum(parts)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    sums: Array = bounds[ends] - bounds[ends - parts]
    return sums


def _bytes(rows: Array) -> Tensor:
    return torch.from_numpy(rows.reshape(-1).view(np.uint8))
