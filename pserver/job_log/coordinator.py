"""The coordinator of a job's log: what it knows, and which records follow from what it is told.

::

    of a step:  staged on some servers --on all--> decided     (a round: of all who are awaited)
                       |
                       `--its process is lost--> dropped

[Note: the job's log]  A trainer sends its step to every server, and may die between two of them.
So no server applies a step by itself.  The coordinator appends a record when all servers have
staged the step.  From then on it counts, whatever happens to its trainer: every server has all of
it.  A record of a loss stands before or behind that one, on all servers alike.  A process that was
lost and goes on all the same, a zombie, is told so: what it stages is ignored, and its number may
join again with another incarnation only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pserver.job_log.records import (
    Decided,
    Joined,
    Lost,
    Process,
    ProcessStep,
    Record,
    Staged,
    What,
)


class Coordinator:
    """Appends the records of one job.  The caller holds a lock, and gives the time.

    Args:
        servers: how many there are.
        rounds: by lane, whether all trainers' steps are one update.
        awaited: the trainers whose step a round of a lane needs.

    Example::

        coordinator = Coordinator(servers=2, rounds=[False], awaited=lambda lane: [])
        step = Staged(0, ProcessStep(Process(0, "a"), 1))
        coordinator.staged(0, step, now=1.0)  # []
        coordinator.staged(1, step, now=2.0)  # [Record(1, 2.0, Decided(0, (step.step,)))]

    Attributes:
        last: the number of the last record.
        lost: processes that were lost.
    """

    def __init__(
        self, servers: int, rounds: Sequence[bool], awaited: Callable[[int], Collection[int]]
    ) -> None:
        self._servers, self._rounds, self._awaited = servers, tuple(rounds), awaited
        self.last = 0
        self._time = 0.0
        self.lost: set[Process] = set()
        self._present: dict[int, Process] = {}  # by trainer
        # by lane: steps that are not decided, with the servers that have staged them
        self._staged: list[dict[ProcessStep, set[int]]] = [{} for _ in rounds]
        # by lane and trainer: the last step that was decided
        self._decided: list[dict[Process, int]] = [{} for _ in rounds]

    def decided(self, process: Process, lane: int) -> int:
        """The last step of a process in a lane that counts; 0: none."""
        return self._decided[lane].get(process, 0)

    def join(self, process: Process, steps: Sequence[int], now: float) -> list[Record]:
        """A trainer joins; nothing where it has joined before.

        Args:
            steps: by lane, the last one that counts as applied.

        Raises:
            ValueError: it was lost; or another process of its number takes part.
        """
        if process in self.lost:
            raise ValueError(f"{process} was lost")
        present = self._present.get(process.trainer)
        if present == process:
            return []
        if present is not None:
            raise ValueError(f"{process} takes part already")
        self._present[process.trainer] = process
        for decided, step in zip(self._decided, steps, strict=False):
            decided[process] = step
        return [self._append(Joined(process, tuple(steps)), now)]

    def lose(self, process: Process, text: str, now: float) -> list[Record]:
        """A trainer is lost: drops what it has staged.  Rounds may be complete without it, once it
        is not awaited any more: see :meth:`complete`.
        """
        if process in self.lost:
            return []
        self.lost.add(process)
        if self._present.get(process.trainer) == process:
            del self._present[process.trainer]
        for staged in self._staged:
            for step in [each for each in staged if each.process == process]:
                del staged[step]
        return [self._append(Lost(process, text), now)]

    def staged(self, server: int, notice: Staged, now: float) -> list[Record]:
        """A server has staged a step.

        Returns:
            The record that decides it, if this was all that was missing.

        Raises:
            ValueError: there is no such lane.
        """
        lane, step = notice.lane, notice.step
        if lane >= len(self._rounds):
            raise ValueError(f"expected a lane below {len(self._rounds)}, got {lane}")
        # a zombie's, or a notice that came twice
        if step.process in self.lost or step.step <= self._decided[lane].get(step.process, 0):
            return []
        self._staged[lane].setdefault(step, set()).add(server)
        if self._rounds[lane]:
            return self.complete(lane, now)
        return [self._decide(lane, [step], now)] if self._everywhere(lane, step) else []

    def complete(self, lane: int, now: float) -> list[Record]:
        """The record of a lane's round, if all who are awaited have staged it everywhere.  A step
        that is its trainer's last one is in the round, too, though nobody awaits its trainer.
        """
        steps = sorted(self._staged[lane])
        everywhere = all(self._everywhere(lane, step) for step in steps)
        missing = set(self._awaited(lane)) - {step.process.trainer for step in steps}
        return [self._decide(lane, steps, now)] if steps and everywhere and not missing else []

    def _everywhere(self, lane: int, step: ProcessStep) -> bool:
        return len(self._staged[lane][step]) == self._servers

    def _decide(self, lane: int, steps: Sequence[ProcessStep], now: float) -> Record:
        for each in steps:
            del self._staged[lane][each]
            self._decided[lane][each.process] = each.step
        return self._append(Decided(lane, tuple(steps)), now)

    def _append(self, what: What, now: float) -> Record:
        self.last += 1
        self._time = max(self._time, now)
        return Record(self.last, self._time, what)
