"""``fleet.trace``: one file of what every process of the job does in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainer.collective.peer_meeting import PeerMeeting
from trainer.collective.world import current_peers
from trainer.communicator.trace import TRACING, Alone, Meeting, TraceSettings, asked, meeting_of
from trainer.environment.environment import Connection, Role
from trainer.job.current import present
from trainer.job.eager_spans import watched
from trainer.job.job import Job
from transpiler.plan.settings import check_flag


def trace(path: str, steps: int = 3, profiler: bool = False) -> None:
    """Writes what all processes of the job do in the next steps to one file, on one clock, for
    ui.perfetto.dev or chrome://tracing.

    Every trainer calls this, between the same two steps; trainer 0 writes the file when its steps
    are over and the others' spans have come, while training goes on, and prints a line then.  A
    trainer that leaves none within 30 seconds is named in both.  Before this trainer has joined its
    job the trace waits for the end of the step that joins.  docs/trace.md reads a file.

    Example::

        for number, batch in enumerate(fleet.shard(loader)):
            if number == 10:
                fleet.trace("trace.json")
            ...

    Args:
        path: of the file, or its URL; only trainer 0 writes.
        steps: of each trainer.
        profiler: adds what torch.profiler notes in the trainers.

    Raises:
        TypeError, ValueError: the path names nothing, or ``steps`` is below 1.
        OSError: the file cannot be written.
        RuntimeError: a trace is under way, or there is no job; or another profiler is at work.
    """
    settings = TraceSettings(path, steps, profiler=check_flag("profiler", profiler))
    _begin(present(), settings)


def begin_asked(job: Job) -> None:
    """Begins the trace that PSERVER_TRACE asks for, if it does.

    Raises:
        OSError, ImportError, ValueError: trainer 0 cannot write the file.
    """
    settings = asked(Connection.from_environment())
    if settings is not None and job.role.role is not Role.PSERVER:
        _begin(job, settings)


def _begin(job: Job, settings: TraceSettings) -> None:
    if job.role.role is Role.PSERVER:
        raise RuntimeError("fleet.trace: expected a trainer, and this process is a server")
    meeting, watch = partial(_meeting, job), partial(_watched, job)
    TRACING.begin(settings, job.role.trainer_id, meeting, watch, partial(_counts, job))


def _counts(job: Job, optimizer: object) -> bool:
    """Whether the steps of an optimizer, or of a program, are those of a trace: of several
    optimizers those of the first.
    """
    return optimizer is None or optimizer is job.optimizer


def _meeting(job: Job) -> Meeting | None:
    """How the job's spans come together; None before this trainer has joined."""
    if job.role.role is Role.SINGLE:
        return Alone()
    if job.role.role is Role.COLLECTIVE:
        peers = current_peers()
        return Alone() if peers.size == 1 else PeerMeeting(peers)
    return TRACING.of_programs() if job.communicator is None else meeting_of(job.communicator)


def _watched(job: Job) -> Callable[[], None]:
    return watched(job.models).close
