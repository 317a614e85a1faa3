"""``run``: a job on Ray, from its placement group to its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pserver.ray.attempt import Attempt, AttemptFailed
from pserver.ray.company import Company
from pserver.ray.failures import ProcessFailed, by_cause
from pserver.ray.installed import ray_library
from pserver.ray.output import Output
from pserver.ray.placement import placed, wait_for
from pserver.ray.request import JobRequest, Target

MOST_FUNCTION = 65_536  # bytes of a function with its arguments: Ray gives up to 100 KB inline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A job that has ended well: every process with status 0.

    Attributes:
        values: what each trainer's function has returned; None for each script.
        restarts: how often the job was started again.
    """

    values: tuple[Any, ...]
    restarts: int


def run(
    target: Target,
    *,
    servers: int = 1,
    trainers: int = 1,
    arguments: Sequence[Any] = (),
    server_resources: Mapping[str, float] | None = None,
    trainer_resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    server_flags: Sequence[str] = (),
    strategy: str = "PACK",
    start_timeout: float = 300.0,
    log_dir: str | None = None,
) -> Result:
    """Runs a job on the Ray cluster that this process is connected to, until it has ended.

    Where it is not connected, it calls ``ray.init()``, and ``ray.shutdown()`` at the end.  What the
    processes print appears on standard output, as ``trainer 0 | loss 0.03``.  However it ends, no
    process, actor or placement group of the job is left.

    Example::

        import pserver.ray

        pserver.ray.run("train.py", servers=2, trainers=4, trainer_resources={"GPU": 1})

    Args:
        target: the path of a script, which each trainer runs in a process; or a function, which
            each trainer calls in its actor's process.  Ray pickles the function: it may be of the
            driver's own script.
        servers, trainers: how many of each, 1 or more.
        arguments: of the script (texts), or of the function.
        server_resources, trainer_resources: what Ray reserves for each of them: "CPU", "GPU",
            "memory" in bytes, or resources of the cluster's own; one CPU unless said otherwise.  A
            process has as many threads as CPUs.
        max_restarts: how often the whole job is started again after a process has failed, or is
            gone with its node.  The script goes on from its checkpoint, by ``fleet.load``.
        environment: variables of all processes, as PSERVER_TRANSPORT or PSERVER_KEYS.
        server_flags: of ``pserver serve``, as ``("--data-dir", "/shared/job")``.
        strategy: of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        start_timeout: seconds for the cluster to have the resources, and then for the actors and
            servers of each attempt to be there.
        log_dir: a folder, on the driver's machine, for a file of each process's lines.

    Returns:
        What the functions have returned, and how often the job was started again.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: an argument is wrong; one sentence.  Also a function that is too
            large: data does not go through Ray.
        FileNotFoundError: a node does not have the script.
        TimeoutError: the cluster does not have the resources, or an actor or a server is not there
            in time.
        ProcessFailed: a process failed, after all restarts; the message has its number, its node,
            its status and its last lines.
    """
    request = JobRequest(
        target,
        servers,
        trainers,
        tuple(arguments) if isinstance(arguments, list) else arguments,
        server_resources,
        trainer_resources,
        max_restarts,
        environment,
        server_flags,
        strategy,
        start_timeout,
        log_dir,
    )
    _check_size(request)
    width = len(f"trainer {trainers - 1}")
    with _connected(), Output(width, log_dir) as output, placed(request) as group:
        for restarts in range(max_restarts + 1):
            wait_for(group, request)  # after the end of a node Ray looks for others
            try:
                values = Attempt(request, Company(request, group, output.line)).run()
                return Result(values, restarts)
            except AttemptFailed as error:
                if restarts == max_restarts:
                    raise ProcessFailed(error.failures, restarts) from None
                cause = by_cause(error.failures)[0]
                log.warning(
                    "%s; the job starts again (%d of %d)", cause, restarts + 1, max_restarts
                )
    raise AssertionError("the last attempt returns or raises")


def _check_size(request: JobRequest) -> None:
    """Returns if a function is small enough to be told.

    Raises:
        ValueError: it is not.
    """
    if not request.is_function:
        return
    size = len(ray_library().cloudpickle.dumps((request.target, tuple(request.arguments))))
    if size > MOST_FUNCTION:
        raise ValueError(
            f"target: expected a function of at most {MOST_FUNCTION} bytes with its arguments and "
            f"what it refers to, got {size}: Ray carries no data for a job; read it in the function"
        )


@contextmanager
def _connected() -> Iterator[None]:
    """While it lasts this process is connected to Ray."""
    ray = ray_library()
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()
