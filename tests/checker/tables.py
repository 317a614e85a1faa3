"""The tables of a trial: one trainer's reads and updates of one, and the rows that servers must
then hold.

Every row is a set of counters as the slices of parameters are: each trainer's own, more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import torch

from pserver.lane.tables import LockedTable
from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from tests.checker.invariants import Invariant
from tests.checker.scenario import COPIES, IDS, Scenario
from trainer.communicator.communicator import Communicator

Expect = Callable[[bool, int, str], None]


class TableInvariants:
    """The values that the rows of one table may have: one invariant for each id."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.scenario, self.name = scenario, name
        self.lane = scenario.plan.lanes[scenario.plan.table(name).lane]
        self.skipped = {step for _, step in scenario.overflows}
        steps, trainers = range(1, scenario.steps + 1), range(scenario.trainers)
        trained = [
            [scenario.trained(name, trainer, step) for step in steps] for trainer in trainers
        ]
        self.sent = [
            [ids is not None and step not in self.skipped for step, ids in enumerate(each, 1)]
            for each in trained
        ]
        self.of_id = {
            id_: Invariant(scenario, self.lane, self._changes(id_, trained)) for id_ in IDS
        }

    def _changes(self, id_: int, trained: list[list[list[int] | None]]) -> list[list[int]]:
        return [
            [
                change if ids is not None and id_ in ids else 0
                for change, ids in zip(changes, each, strict=True)
            ]
            for changes, each in zip(self.scenario.changes, trained, strict=True)
        ]

    def final(self, id_: int) -> list[float]:
        """A whole row when all trainers have finished."""
        invariant, trainers = self.of_id[id_], self.scenario.trainers
        return [float(invariant.final(column % trainers)) for column in range(COPIES * trainers)]

    def check_held(self, held: LockedTable, server: int) -> str:
        """The violation in a server's part at the end; "" if there is none.

        It has the rows that a step has touched, and no others; and has counted as many steps as
        there were.
        """
        chunk, _ = held.rows.scan(0, 2 * len(IDS))
        found = dict(zip(chunk["ids"].tolist(), chunk["values"].tolist(), strict=True))
        owner = id_arithmetic.owners(np.array(IDS), self.scenario.servers)
        touched = [
            id_
            for id_, own in zip(IDS, owner, strict=True)
            if own == server and any(self.final(id_))
        ]
        expected = {id_: self.final(id_) for id_ in touched}
        if found != expected:
            return (
                f"server {server} holds at the end: rows of {self.name!r} are {found}, not "
                f"{expected}"
            )
        steps = self.of_id[IDS[0]].table_steps(self.sent)
        return (
            ""
            if steps in (-1, held.rows.step)
            else f"server {server}: {self.name!r} took {held.rows.step} steps, not {steps}"
        )


class TableReader:
    """One trainer's use of one table.

    Args:
        invariants: of the table.
        trainer: its number.
        expect: raises unless its first argument is true: (whether it holds, the step, the
            violation).
    """

    def __init__(
        self, invariants: TableInvariants, trainer: int, communicator: Communicator, expect: Expect
    ) -> None:
        self._invariants, self._trainer, self._expect = invariants, trainer, expect
        self._communicator = communicator
        self._source = communicator.rows_of(invariants.name)
        self._lowest: dict[tuple[int, int], Fraction] = {}  # (id, trainer) -> the last value read
        self.known_as: str | None = invariants.name
        self.num_embeddings: int | None = None
        self.padding_idx: int | None = None

    def ids_to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~trainer.embedding.joined_lookups.AheadTable`."""
        return ids

    def ids(self, step: int) -> torch.Tensor:
        """The ids that it looks up after its step of that number."""
        scenario = self._invariants.scenario
        return torch.tensor(scenario.looked_up(self._invariants.name, self._trainer, step))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of its ids, looked up ahead where the lane says so."""
        look_ahead = self._communicator.look_ahead
        if look_ahead is None or not self._invariants.lane.look_ahead:
            return self._source.pull(ids)
        lookup = look_ahead.claim(self, ids)
        assert lookup is not None, "it was announced"
        return self._source.pull(lookup.ids, lookup.arrived)[torch.from_numpy(lookup.inverse)]

    def read(self, step: int) -> None:
        """Looks rows up after its step of that number."""
        scenario = self._invariants.scenario
        ids = self.ids(step)
        rows = self._rows(ids)
        for id_, row in zip(ids.tolist(), rows, strict=True):
            for trainer in range(scenario.trainers):
                self._check(step, id_, trainer, row[trainer :: scenario.trainers].tolist())

    def _check(self, step: int, id_: int, trainer: int, copies: Iterable[float]) -> None:
        values = {Fraction(copy) for copy in copies}
        what = (
            f"reads {', '.join(map(str, values))} of trainer {trainer} in row {id_} of "
            f"{self._invariants.name!r}"
        )
        self._expect(len(values) == 1, step, f"{what}: half of an update")
        value, allowed = (
            values.pop(),
            self._invariants.of_id[id_].allowed(self._trainer, step, trainer),
        )
        self._expect(value in allowed, step, f"{what}; allowed: {', '.join(map(str, allowed))}")
        lowest = self._lowest.get((id_, trainer), Fraction(0))
        self._expect(value >= lowest, step, f"{what} after {lowest}")
        self._lowest[id_, trainer] = value

    def send(self, step: int) -> None:
        """Sends the gradients of its step of that number, for rows that were read before it."""
        scenario = self._invariants.scenario
        ids = scenario.trained(self._invariants.name, self._trainer, step)
        if ids is None:
            return
        rows = torch.zeros(len(ids), COPIES * scenario.trainers)
        rows[:, self._trainer :: scenario.trainers] = -float(
            scenario.changes[self._trainer][step - 1]
        )
        self._communicator.send_rows(
            {self._invariants.name: RowGradient(torch.tensor(ids, dtype=torch.int64), rows)}
        )

    def check_end(self) -> None:
        """Every row is the sum of all trainers' steps; an id that no trainer trained has its
        initial value.
        """
        lookups = self._communicator.lookups
        assert lookups is not None, "the plan has tables"
        rows = lookups.pull(self._invariants.name, torch.tensor(IDS)).tolist()
        for id_, row in zip(IDS, rows, strict=True):
            expected = self._invariants.final(id_)
            what = (
                f"reads at the end: row {id_} of {self._invariants.name!r} is {row}, not {expected}"
            )
            self._expect(row == expected, self._invariants.scenario.steps, what)
