"""What ``launch`` says of a failed job: the cause first, then one line for each process that was
told of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pserver.launcher.process import Process, killer
from pserver.launcher.restart_policy import Next


def by_cause(ended: Sequence[Process], servers: Collection[Process]) -> list[Process]:
    """The processes that failed by themselves, the likeliest cause first: those that a signal
    killed, those that nobody told of another's end, then the others; of each trainers, then
    servers, in the order in which they ended.

    Args:
        ended: in this order.
    """
    return sorted(
        (process for process in ended if process.failed),
        key=lambda process: (
            (process.status or 0) < 128,
            bool(process.told),
            process in servers,
        ),
    )


def sentences(
    failed: Sequence[Process],
    suspended: Sequence[Process],
    killed: Sequence[Process],
    grace_seconds: float,
) -> Iterator[str]:
    """The report, line by line.

    Args:
        failed: by cause; see :func:`by_cause`.
        suspended: neither ran nor ended when another process failed.
        killed: had not ended ``grace_seconds`` after they were told to.
    """
    for process in suspended:
        yield (
            f"{process.name} was suspended (by SIGSTOP, or in a debugger) and sent no heartbeat; "
            f"it was killed; its output is in {process.log}"
        )
    for process in failed:
        if process.preempted_after is not None:
            yield preemption(process)
            continue
        status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
        if process.told and (suspended or process is not failed[0]):
            yield f"{status}, told by others: {process.told} (see {process.log})"
            continue
        log = f"the last lines of {process.log}:" if process.tail else f"{process.log} is empty"
        yield f"{status}; {log}"
        yield from (f"    {line}" for line in process.tail)
    for process in killed:
        yield (
            f"{process.name} had not ended {grace_seconds:g} s after it was told to, and was "
            f"killed; its output is in {process.log}"
        )


def preemption(process: Process) -> str:
    """That a trainer has left in order, because somebody asked it to."""
    return f"{process.name} was preempted after step {process.preempted_after}"


def lost(process: Process, what: Next, counted: str) -> str:
    """What is said of a trainer without which its job goes on.

    Args:
        what: ALONE or WITHOUT.
        counted: which restart it is, in words.
    """
    if process.preempted_after is not None:
        return f"{preemption(process)}; the others go on"
    status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
    if what is Next.ALONE:
        return f"{status}: starts it again ({counted}); the others go on; see {process.log}"
    return f"{status}; the others go on without it; see {process.log}"


def ended_after_job(process: Process) -> str:
    """The end of the sentence about a trainer of a job without servers that had finished it."""
    status = f"ended with status {process.status}{_killer(process.status)}"
    return f"{status} when it had finished the job; see {process.log}"


def unanswered(process: Process, seconds: float) -> str:
    """The line for a trainer of which no server says whether the job goes on without a trainer.

    Args:
        seconds: for how long they were asked.
    """
    return (
        f"the servers have not said within {seconds:g} s whether the job goes on without "
        f"{process.name}: the processes that run are believed"
    )


def reloads(process: Process, path: str, counted: str) -> str:
    """What is said of a server that is started again while its job goes on.

    Args:
        path: of the save that it goes on from.
        counted: which restart it is, in words.
    """
    status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
    return f"{status}: starts it again from {path} ({counted}); the others wait for it"


def _killer(status: int | None) -> str:
    """The signal that a status of 128 and more stands for, as part of a sentence."""
    found = killer(status)
    return f" (killed by {found.name})" if found else ""
