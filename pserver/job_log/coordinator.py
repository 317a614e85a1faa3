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

[Note: a server that comes back]  A server that is lost, and comes back with what a save has of it,
has staged nothing: trainers send it again what was not answered.  So what the process before had
staged does not count, but where it is decided already: that stays decided, and is lost on this
server alone.  It is told where the log stands, and goes on with the next record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

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
from pserver.job_log.standing import ProcessStanding, Standing


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
        lost: processes that were lost, with the reasons.
    """

    def __init__(
        self, servers: int, rounds: Sequence[bool], awaited: Callable[[int], Collection[int]]
    ) -> None:
        self._servers, self._rounds, self._awaited = servers, tuple(rounds), awaited
        self.last = 0
        self._time = 0.0
        self.lost: dict[Process, str] = {}
        self._begun: dict[Process, tuple[int, ...]] = {}  # in the order in which they joined
        self._present: dict[int, Process] = {}  # by trainer
        # by lane: steps that are not decided, with the servers that have staged them, and the rows
        # that they change there
        self._staged: list[dict[ProcessStep, dict[int, int]]] = [{} for _ in rounds]
        # by lane and trainer: the last step that was decided, and by server the rows in all of them
        self._decided: list[dict[Process, int]] = [{} for _ in rounds]
        self._rows: list[dict[Process, list[int]]] = [{} for _ in rounds]

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
        self._present[process.trainer], self._begun[process] = process, tuple(steps)
        for decided, step in zip(self._decided, steps, strict=False):
            decided[process] = step
        return [self._append(Joined(process, tuple(steps)), now)]

    def lose(self, process: Process, text: str, now: float) -> list[Record]:
        """A trainer is lost: drops what it has staged.  Rounds may be complete without it, once it
        is not awaited any more: see :meth:`complete`.
        """
        if process in self.lost:
            return []
        self.lost[process] = text
        if self._present.get(process.trainer) == process:
            del self._present[process.trainer]
        for staged in self._staged:
            for step in [each for each in staged if each.process == process]:
                del staged[step]
        return [self._append(Lost(process, text), now)]

    def leave(self, process: Process) -> None:
        """A trainer has left in good order, with all of its steps decided: its number is free for
        another process.
        """
        if self._present.get(process.trainer) == process:
            del self._present[process.trainer]

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
        self._staged[lane].setdefault(step, {})[server] = notice.rows
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

    # ---- see [Note: a server that comes back] ----

    def server_lost(self, server: int) -> None:
        """A server is lost: what it has staged, and is not decided, it has not any more."""
        for staged in self._staged:
            for servers in staged.values():
                servers.pop(server, None)

    def standing(self, server: int, left: Mapping[Process, int | None]) -> Standing:
        """Where the log stands, for a server that comes back.

        Args:
            left: processes that have left the job, with the step after which they were preempted.
        """
        lanes = range(len(self._rounds))
        none = [0] * self._servers
        return Standing(
            self.last,
            tuple(
                ProcessStanding(
                    process,
                    tuple(self._begun.get(process, ())),
                    tuple(self._decided[lane].get(process, 0) for lane in lanes),
                    tuple(self._rows[lane].get(process, none)[server] for lane in lanes),
                    self.lost.get(process, ""),
                    process in left,
                    left.get(process),
                )
                for process in {**self._begun, **self.lost}
            ),
        )

    def _everywhere(self, lane: int, step: ProcessStep) -> bool:
        return len(self._staged[lane][step]) == self._servers

    def _decide(self, lane: int, steps: Sequence[ProcessStep], now: float) -> Record:
        for each in steps:
            self._decided[lane][each.process] = each.step
            rows = self._rows[lane].setdefault(each.process, [0] * self._servers)
            for server, count in self._staged[lane].pop(each).items():
                rows[server] += count
        return self._append(Decided(lane, tuple(steps)), now)

    def _append(self, what: What, now: float) -> Record:
        self.last += 1
        self._time = max(self._time, now)
        return Record(self.last, self._time, what)
