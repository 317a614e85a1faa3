"""How far another process's clock is ahead of this one's.  See [Note: one clock]."""

from __future__ import annotations

import threading
from dataclasses import dataclass

MOST_ROUNDS = 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """Another clock's offset, as the best round has it.

    Attributes:
        offset_ns: what that clock shows, less what this one shows at the same moment.
        bound_ns: the offset is no further off than this.
        rounds: that were compared.
    """

    offset_ns: int
    bound_ns: int
    rounds: int


class ClockOffset:
    """Rounds of questions for another process's clock.  Any thread may call it.

    Example:
        >>> offset = ClockOffset()
        >>> offset.heard(asked_ns=100, theirs_ns=1_150, answered_ns=300)
        >>> offset.heard(asked_ns=400, theirs_ns=1_430, answered_ns=440)
        >>> offset.estimate()
        Estimate(offset_ns=1010, bound_ns=20, rounds=2)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._best: tuple[int, int] | None = None  # twice the bound, twice the offset
        self._rounds = 0

    def heard(self, asked_ns: int, theirs_ns: int, answered_ns: int) -> None:
        """A round is over.

        Args:
            asked_ns, answered_ns: of this process's clock.
            theirs_ns: of the other's, at some moment between.
        """
        found = answered_ns - asked_ns, 2 * theirs_ns - asked_ns - answered_ns
        with self._lock:
            self._rounds += 1
            self._best = found if self._best is None else min(self._best, found)

    def restart(self) -> None:
        """The rounds until now count no more."""
        with self._lock:
            self._best, self._rounds = None, 0

    def estimate(self) -> Estimate | None:
        """By the shortest round since the restart; None where there was none."""
        with self._lock:
            if self._best is None:
                return None
            width, twice = self._best
            return Estimate(twice // 2, width // 2 + 1, self._rounds)
