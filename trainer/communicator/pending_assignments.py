"""Assignments on their way to the servers: a reply to a message before theirs lacks them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pserver.transport.arrays import Assignment


@dataclass(slots=True)
class Departure:
    """When a message left.

    Attributes:
        number: of the message; None: it has not left yet.
    """

    number: int | None = None


class PendingAssignments:
    """What a script has written and a lane's servers may not have yet.

    The script's thread calls it; the lane's thread says when a message leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the numbers of departures
        self._under_way: list[tuple[Departure, Mapping[str, Assignment]]] = []

    def add(self, assignments: Mapping[str, Assignment]) -> Departure:
        """Takes the assignments of one message, by slice."""
        departure = Departure()
        self._under_way.append((departure, assignments))
        return departure

    def left(self, departure: Departure | None, number: int) -> None:
        """A message leaves now, with this number; one without assignments has no departure."""
        if departure is not None:
            with self._lock:
                departure.number = number

    def write(self, values: Mapping[str, Tensor], message: int) -> None:
        """Writes into values that came after a message the assignments that left behind it; earlier
        ones are in the values.

        Args:
            values: by slice.
        """
        with self._lock:
            self._under_way = [
                (departure, assignments)
                for departure, assignments in self._under_way
                if departure.number is None or departure.number > message
            ]
        for _, assignments in self._under_way:
            for name, assignment in assignments.items():
                if name in values:
                    assignment.write(values[name])
