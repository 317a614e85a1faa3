"""The coordinator of a job's log: its state, and the records that follow from servers' notices.

::

    of a step:  staged on some servers --on all--> decided     (a round: of all awaited trainers)
                       |
                       `--its process is lost--> dropped

[Note: the job's log]  A trainer sends its step to every server, and may die between two of them.
So no server applies a step by itself.  The coordinator appends a record when all servers have
staged the step.  From then on it counts, whatever happens to its trainer: every server has all of
it.  A record of a loss stands before or behind that one, on all servers alike.  A lost process that
still runs, a zombie, is notified: what it stages is ignored, and its number may join again with
another incarnation only.

[Note: refused by all]  A server sees the slices that it holds, and its histories of norms are its
own: one that has come back from a checkpoint has none.  So one may refuse a step that another would
apply.  Each says with the staged step whether it refuses it, and why; the record says of which
trainers a server has, and all servers refuse these.

[Note: calls in the log]  A control call that changes what servers hold, or fixes a moment of it, is
staged like a step: each server says that it is ready, and carries it out at the record that follows
when all are.  So a save is of one record on every server, and so is a shrink.

[Note: a server that comes back]  A server that is lost, and comes back with what a save has of it,
has staged nothing: trainers send it again what was not answered.  So what the process before had
staged does not count, but where it is decided already: that stays decided, and is lost on this
server alone.  It receives the state of the log, and continues with the next record.

[Note: a coordinator that comes back]  The coordinator's state follows from its records.  It writes
each of them to a file before any other process receives it, so that its replacement knows them all.
The replacement does not know what was staged: the servers send that again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import add

from pserver import job_log_pb2 as message
from pserver.job_log.records import (
    Call,
    Consumed,
    Decided,
    Joined,
    Left,
    Loaded,
    LogSnapshot,
    Lost,
    Process,
    ProcessSnapshot,
    ProcessStep,
    Record,
    Staged,
    What,
    read_record,
    write_record,
)

RECENT = 8192  # records that are kept for a server that follows again

Rows = Sequence[Sequence[int]]  # that decided steps have changed: by step and server


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
        left: processes that have left, with the step after which they were preempted.
        write: called with each change, before any other process receives it: an entry for
            :meth:`apply`.  None: nothing is written down.
    """

    def __init__(
        self, servers: int, rounds: Sequence[bool], awaited: Callable[[int], Collection[int]]
    ) -> None:
        self._servers, self._rounds, self._awaited = servers, tuple(rounds), awaited
        self.last = 0
        self._time = 0.0
        self.lost: dict[Process, str] = {}
        self.left: dict[Process, int | None] = {}
        self._loaded = 0  # the number of the last load's record
        self.write: Callable[[message.OwnEntry], None] | None = None
        self._recent = deque[Record](maxlen=RECENT)
        self._begun: dict[Process, tuple[int, ...]] = {}  # in the order in which they joined
        self._present: dict[int, Process] = {}  # by trainer
        # by lane: steps that are not decided, with the servers that have staged them, and the rows
        # that they change there
        self._staged: list[dict[ProcessStep, dict[int, int]]] = [{} for _ in rounds]
        self._calls: dict[Call, set[int]] = {}  # that are not in the log, with the ready servers
        self._called: dict[Process, dict[str, int]] = {}  # by kind, the last number in the log
        self._consumed: dict[tuple[int, ProcessStep], Consumed] = {}  # by lane and staged step
        self._refused: dict[tuple[int, ProcessStep], str] = {}  # likewise: why
        # by lane and process: the last step that was decided, and by server the rows in all of them
        self._decided: list[dict[Process, int]] = [{} for _ in rounds]
        self._rows: list[dict[Process, list[int]]] = [{} for _ in rounds]

    def decided(self, process: Process, lane: int) -> int:
        """The last step of a process in a lane that counts; 0: none."""
        return self._decided[lane].get(process, 0)

    def join(self, process: Process, steps: Sequence[int], now: float) -> list[Record]:
        """Adds a trainer; nothing where it has joined before.

        Args:
            steps: by lane, the last one that counts as applied.

        Raises:
            ValueError: it was lost, or has left; or another process of its number is live.
        """
        if process in self.lost:
            raise ValueError(f"{process} was lost")
        if process in self.left:
            raise ValueError(f"{process} has left")
        present = self._present.get(process.trainer)
        if present == process:
            return []
        if present is not None:
            raise ValueError(f"{process} has already joined")
        return [self._append(Joined(process, tuple(steps)), now)]

    def lose(self, process: Process, text: str, now: float) -> list[Record]:
        """Loses a trainer: drops what it has staged.  Rounds may be complete without it, once it
        is not awaited any more: see :meth:`complete`.
        """
        if process in self.lost or process in self.left:
            return []
        for lane, staged in enumerate(self._staged):
            for step in [each for each in staged if each.process == process]:
                del staged[step]
                self._consumed.pop((lane, step), None)
                self._refused.pop((lane, step), None)
        self._calls = {c: ready for c, ready in self._calls.items() if c.process != process}
        return [self._append(Lost(process, text), now)]

    def leave(
        self, process: Process, now: float, preempted_after: int | None = None
    ) -> list[Record]:
        """Removes a trainer that has left in good order, with all of its steps decided: its number
        is free for another process.

        Args:
            preempted_after: its host was taken away, after this step; None: it was not.
        """
        if process in self.lost or process in self.left:
            return []
        return [self._append(Left(process, preempted_after), now)]

    def load(self, now: float) -> list[Record]:
        """Notes that other values have taken the place of those that servers held; once, where no
        other record stands between two loads.
        """
        return [] if self._loaded == self.last > 0 else [self._append(Loaded(), now)]

    def staged(self, server: int, notice: Staged, now: float) -> list[Record]:
        """Notes that a server has staged a step.

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
        if notice.consumed:
            self._consumed[lane, step] = notice.consumed
        if notice.refused:
            self._refused.setdefault((lane, step), notice.refused)
        if self._rounds[lane]:
            return self.complete(lane, now)
        return [self._decide(lane, [step], now)] if self._everywhere(lane, step) else []

    def call(self, server: int, call: Call, now: float) -> list[Record]:
        """Notes that a server is ready for a control call.

        Returns:
            Its record, if all servers are.
        """
        called = self._called.get(call.process, {}).get(call.kind, 0)
        if call.process in self.lost or call.number <= called:
            return []
        ready = self._calls.setdefault(call, set())
        ready.add(server)
        return [self._append(call, now)] if len(ready) == self._servers else []

    def complete(self, lane: int, now: float) -> list[Record]:
        """The record of a lane's round, if all awaited trainers have staged it everywhere.  A
        trainer's last step is in the round, too, though its trainer is not awaited.
        """
        steps = sorted(self._staged[lane])
        everywhere = all(self._everywhere(lane, step) for step in steps)
        missing = set(self._awaited(lane)) - {step.process.trainer for step in steps}
        return [self._decide(lane, steps, now)] if steps and everywhere and not missing else []

    # ---- see [Note: a server that comes back] ----

    def server_lost(self, server: int) -> None:
        """Loses a server: drops what it has staged, unless it is decided."""
        for staged in self._staged:
            for servers in staged.values():
                servers.pop(server, None)
        for ready in self._calls.values():
            ready.discard(server)

    def snapshot(self, server: int) -> LogSnapshot:
        """The state of the log, for a server that comes back."""
        lanes = range(len(self._rounds))
        none = [0] * self._servers
        return LogSnapshot(
            self.last,
            tuple(
                ProcessSnapshot(
                    process,
                    tuple(self._begun.get(process, ())),
                    tuple(self._decided[lane].get(process, 0) for lane in lanes),
                    tuple(self._rows[lane].get(process, none)[server] for lane in lanes),
                    self.lost.get(process, ""),
                    process in self.left,
                    self.left.get(process),
                    self._called.get(process, {}),
                )
                for process in {**self._begun, **self.lost}
            ),
            self._loaded,
        )

    def _everywhere(self, lane: int, step: ProcessStep) -> bool:
        return len(self._staged[lane][step]) == self._servers

    def _decide(self, lane: int, steps: Sequence[ProcessStep], now: float) -> Record:
        staged = [self._staged[lane].pop(each) for each in steps]
        rows = [[each[server] for server in range(self._servers)] for each in staged]
        consumed = tuple(self._consumed.pop((lane, each), ()) for each in steps)
        found = {each.process.trainer: self._refused.pop((lane, each), "") for each in steps}
        refused = tuple((trainer, why) for trainer, why in found.items() if why)
        what = Decided(lane, tuple(steps), consumed if any(consumed) else (), refused)
        return self._append(what, now, rows)

    def _append(self, what: What, now: float, rows: Rows = ()) -> Record:
        record = Record(self.last + 1, max(self._time, now), what)
        self._follow(record, rows)
        if self.write is not None:
            entry = message.OwnEntry()
            write_record(entry.record.record, record)
            for each in rows:
                entry.record.rows.add(servers=each)
            self.write(entry)
        return record

    def _follow(self, record: Record, rows: Rows) -> None:
        """Applies a record."""
        self.last, self._time = record.number, record.time
        self._recent.append(record)
        match record.what:
            case Joined(process, steps):
                self._present[process.trainer], self._begun[process] = process, tuple(steps)
                for decided, step in zip(self._decided, steps, strict=False):
                    decided[process] = step
            case Lost(process, text):
                self.lost[process] = text
                self._goes(process)
            case Left(process, preempted_after):
                self.left[process] = preempted_after
                self._goes(process)
            case Loaded():
                self._loaded = record.number
            case Decided(lane, steps):
                for each, changed in zip(steps, rows, strict=True):
                    self._decided[lane][each.process] = each.step
                    held = self._rows[lane].setdefault(each.process, [0] * self._servers)
                    self._rows[lane][each.process] = list(map(add, held, changed))
            case Call(process, kind, number):
                self._called.setdefault(process, {})[kind] = number
                last = process, kind
                self._calls = {c: r for c, r in self._calls.items() if (c.process, c.kind) != last}

    def _goes(self, process: Process) -> None:
        if self._present.get(process.trainer) == process:
            del self._present[process.trainer]

    # ---- see [Note: a coordinator that comes back] ----

    def since(self, last: int) -> list[Record] | None:
        """The records after one, for a server that follows again; None where they are not kept."""
        missing = self.last - last
        if not 0 <= missing <= len(self._recent):
            return None
        return list(self._recent)[len(self._recent) - missing :]

    def entries(self) -> list[message.OwnEntry]:
        """The entry from which the same state follows."""
        entry = message.OwnEntry()
        for server in range(self._servers):
            self.snapshot(server).write(entry.log.servers.add())
        entry.log.time = self._time
        for record in self._recent:
            write_record(entry.log.recent.records.add(), record)
        return [entry]

    def apply(self, entry: message.OwnEntry) -> None:
        """Applies an entry; see [Note: state = fold(entries)] in own_state.py.

        Raises:
            ValueError: it is of another version.
        """
        if entry.WhichOneof("what") == "record":
            rows = [list(each.servers) for each in entry.record.rows]
            self._follow(read_record(entry.record.record), rows)
        else:
            self._restore_state(entry.log)

    def _restore_state(self, state: message.LogState) -> None:
        self._time = state.time
        self._recent.extend(map(read_record, state.recent.records))
        known = [LogSnapshot.read(each) for each in state.servers]
        self.last, self._loaded = known[0].last, known[0].loaded
        for each in zip(*(snapshot.processes for snapshot in known), strict=True):
            one = each[0]
            process = one.process
            self._begun[process], self._called[process] = one.begun, dict(one.calls)
            for lane, step in enumerate(one.decided):
                self._decided[lane][process] = step
                self._rows[lane][process] = [of_server.rows[lane] for of_server in each]
            if one.lost:
                self.lost[process] = one.lost
            elif one.left:
                self.left[process] = one.preempted_after
            else:
                self._present[process.trainer] = process
