"""Where a job's log stands, for a server that was lost and comes back; and what is lost there.

::

    of a process and a lane:   begun ......... in the save ............ decided ...> next
                               |--- in what the server has read ---|--- lost ---|

A process is in the save where the server had applied steps of it by then.  Those that had joined
before it, with its number, had ended: all of theirs is in the save.  Those that have joined since
are not in it at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pserver import job_log_pb2 as message
from pserver.job_log.records import Process


@dataclass(frozen=True, slots=True)
class ProcessStanding:
    """A trainer's process in the log.

    Attributes:
        begun: by lane, the last step that counted as applied when it joined.
        decided: by lane, the last step that is decided.
        rows: by lane, of tables that its decided steps have changed on the server that comes back.
        lost: why it was lost, a sentence; "": it was not.
        left: it has left the job.
        preempted_after: because its host was taken away, after this step; None: it was not.
        calls: by kind, the number of its last control call in the log.
    """

    process: Process
    begun: tuple[int, ...]
    decided: tuple[int, ...]
    rows: tuple[int, ...]
    lost: str = ""
    left: bool = False
    preempted_after: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def present(self) -> bool:
        """Whether it takes part."""
        return not (self.lost or self.left)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the log stands.

    Attributes:
        last: the number of the last record.
        processes: in the order in which they have joined.
    """

    last: int
    processes: tuple[ProcessStanding, ...]

    def to_bytes(self) -> bytes:
        """As it travels: in the place of records."""
        found = message.Records()
        found.standing.last = self.last
        for each in self.processes:
            added = found.standing.processes.add(
                begun=each.begun,
                decided=each.decided,
                rows=each.rows,
                lost=each.lost,
                left=each.left,
                preempted_after=each.preempted_after,
                calls=each.calls,
            )
            added.process.trainer = each.process.trainer
            added.process.incarnation = each.process.incarnation
        return found.SerializeToString()

    @classmethod
    def of(cls, data: bytes) -> Standing | None:
        """What :meth:`to_bytes` wrote; None where it is something else."""
        found = message.Records()
        try:
            found.ParseFromString(data)
        except Exception as error:  # protobuf's DecodeError has another base in each implementation
            raise ValueError(f"expected messages of a job's log: {error}") from error
        if not found.HasField("standing"):
            return None
        return cls(
            found.standing.last,
            tuple(
                ProcessStanding(
                    Process(each.process.trainer, each.process.incarnation),
                    tuple(each.begun),
                    tuple(each.decided),
                    tuple(each.rows),
                    each.lost,
                    each.left,
                    each.preempted_after if each.HasField("preempted_after") else None,
                    dict(each.calls),
                )
                for each in found.standing.processes
            ),
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """What a save has of a trainer's process in one lane.

    Attributes:
        step: the last one that is in it.
        rows: of tables that these steps have changed.
    """

    step: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """Decided steps of one trainer that a server has not.

    Attributes:
        steps: how many, over all lanes.
        rows: of tables that they have changed there, counted in each step.
    """

    steps: int = 0
    rows: int = 0

    def plus(self, other: Loss) -> Loss:
        """Both together."""
        return Loss(self.steps + other.steps, self.rows + other.rows)


def losses(standing: Standing, saved: Mapping[Process, Sequence[Applied]]) -> dict[int, Loss]:
    """What is lost on a server that goes on from a save, by trainer.

    Args:
        saved: of each process in the save, by lane.
    """
    found: dict[int, Loss] = {}
    later: set[int] = set()  # trainers of whom the process in the save has been seen
    for each in reversed(standing.processes):
        trainer = each.process.trainer
        if trainer in later:
            continue  # it had ended before the save
        applied = saved.get(each.process)
        later |= set() if applied is None else {trainer}
        before = applied or [Applied(step) for step in each.begun]
        loss = Loss()
        for lane, (decided, rows) in enumerate(zip(each.decided, each.rows, strict=True)):
            had = before[lane] if lane < len(before) else Applied(0)
            loss = loss.plus(Loss(max(0, decided - had.step), max(0, rows - had.rows)))
        found[trainer] = found.get(trainer, Loss()).plus(loss)
    return found
