"""The job that this process takes part in: one at a time."""

from __future__ import annotations

from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer

_job: Job | None = None


def present() -> Job:
    """The job under way.

    Raises:
        RuntimeError: ``fleet.init()`` has not been called.
    """
    if _job is None:
        raise RuntimeError("call fleet.init() first")
    return _job


def is_present(job: Job) -> bool:
    """Whether this is the job under way."""
    return job is _job


def begin(job: Job) -> None:
    """The job is under way.

    Raises:
        RuntimeError: another one is.
    """
    global _job
    if _job is not None:
        raise RuntimeError(
            "fleet.init() was called before; call fleet.finish() to end that job first"
        )
    _job = job


def end() -> Job | None:
    """The job is over; the one that was, if any."""
    global _job
    job, _job = _job, None
    return job


def distributed(job: Job) -> DistributedOptimizer:
    """The job's optimizer.

    Raises:
        RuntimeError: there is none yet.
    """
    if job.optimizer is None:
        raise RuntimeError("call fleet.distributed_optimizer first")
    return job.optimizer
