"""The present job of this process: at most one at a time."""

from __future__ import annotations

from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer

_job: Job | None = None


def present() -> Job:
    """The present job.

    Raises:
        RuntimeError: ``fleet.init()`` has not been called.
    """
    if _job is None:
        raise RuntimeError("call fleet.init() first")
    return _job


def present_or_none() -> Job | None:
    """The present job; None where there is none."""
    return _job


def is_present(job: Job) -> bool:
    """Whether this is the present job."""
    return job is _job


def begin(job: Job) -> None:
    """Makes a job the present one.

    Raises:
        RuntimeError: there is one already.
    """
    global _job
    if _job is not None:
        raise RuntimeError(
            "fleet.init() was called before; call fleet.finish() to end that job first"
        )
    _job = job


def end() -> Job | None:
    """Ends the present job.

    Returns:
        The job that was present, if any.
    """
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
