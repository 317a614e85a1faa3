"""The values that a trainer may read after each of its steps, and those at the end: exact, from the
steps of every trainer.

Each trainer adds to its own counters only, and only more than 0.  So a counter's value says how
many of its trainer's steps are in it: the ``ladder`` of a trainer is the list of values that its
counter passes through, after 0, 1, 2, ... messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tests.checker.scenario import Scenario
from transpiler.plan.plan import Lane

Ladder = list[Fraction]


class Invariant:
    """The values that counters may have: those of a lane's parameters, or of one row of a table,
    which only some steps touch.

    Args:
        scenario: the trial's.
        lane: of the parameters, or of the table.
        changes: by trainer, step by step: what is added; 0 is none.  None: what the trial adds to
            every parameter.
    """

    def __init__(
        self, scenario: Scenario, lane: Lane, changes: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._lane = lane
        self._of_row = changes is not None
        self._per_message = self._steps_per_message()
        self._trainers = scenario.trainers
        skipped = {step for _, step in scenario.overflows}
        self._changes = [
            [
                Fraction(0 if step in skipped else change)
                for step, change in enumerate(of_trainer, 1)
            ]
            for of_trainer in (scenario.changes if changes is None else changes)
        ]
        self._ladders = [self._ladder(of_trainer) for of_trainer in self._changes]

    def _steps_per_message(self) -> int:
        if self._lane.kind.steps_on_trainer:
            return self._lane.k_steps
        return self._lane.max_merge_var_num if self._lane.kind.collects else 1

    def _ladder(self, changes: list[Fraction]) -> Ladder:
        """The values of the server's counter, message by message."""
        ladder, every = [Fraction(0)], self._per_message
        for first in range(0, len(changes), every):
            change = sum(changes[first : first + every], Fraction(0))
            # parameters always do, rows when they were trained since the last message
            travels = change > 0 or not self._of_row
            # the trainer's own value, less what it has sent, over the trainers
            if self._lane.kind.servers_add and travels:
                change = sum(changes[: first + every], Fraction(0)) - ladder[-1]
            kind = self._lane.kind
            divisor = self._trainers if kind.waits_for_all or kind.steps_on_trainer else every
            ladder.append(ladder[-1] + change / divisor)
        return ladder

    def allowed(self, reader: int, step: int, trainer: int) -> list[Fraction]:
        """The values that a trainer's counter may have when ``reader`` reads it after its step of
        that number.
        """
        ladder, own = self._ladders[trainer], reader == trainer
        told = step // self._per_message  # messages of a trainer that has taken so many steps
        kind = self._lane.kind
        if kind.servers_add and own:
            return [sum(self._changes[trainer][:step], Fraction(0))]
        if kind.outer_optimizer:  # in between, its own changes are on top
            alone = (
                sum(self._changes[trainer][told * self._per_message : step], Fraction(0))
                if own
                else Fraction(0)
            )
            return [ladder[told] + alone]
        waits = self._lane.send_queue_size == 1 or self._lane.staleness is not None or kind.collects
        if kind.merges_gradients or (own and waits and not kind.servers_add):
            stale = 0 if not self._of_row or self._lane.refreshes_rows else self._lane.look_ahead
            return ladder[max(0, told - stale) : told + 1]
        if self._lane.staleness is not None:
            return ladder[max(0, step - self._lane.staleness) :]
        return ladder[: told + 1] if own else ladder

    def final(self, trainer: int) -> Fraction:
        """A trainer's counter when all trainers have finished."""
        return self._ladders[trainer][-1]

    def version(self, overflowed: int) -> int:
        """The number of updates that the server must have counted at the end; -1 where that depends
        on how steps were merged.
        """
        messages = len(self._ladders[0]) - 1
        if self._lane.kind.waits_for_all:
            return messages - overflowed
        return (
            messages * self._trainers
            if self._lane.max_merge_var_num == 1 or self._lane.kind.collects
            else -1
        )

    def table_steps(self, sent: Sequence[Sequence[bool]]) -> int:
        """The number of steps that a server must have counted for a table at the end; -1 where that
        depends on how steps were merged.

        Args:
            sent: by trainer, step by step: whether it sent a gradient of the table, if only of no
                rows, that counts.
        """
        if self._lane.kind.servers_add:
            return 0  # deltas are added, no rule takes a step
        if self._lane.kind.merges_gradients:
            return sum(map(any, zip(*sent, strict=True)))
        every = self._per_message
        if self._lane.max_merge_var_num > 1 and not self._lane.kind.collects:
            return -1
        return sum(
            any(steps[first : first + every])
            for steps in sent
            for first in range(0, len(steps), every)
        )
