"""What a script may ask about its job: the role of this process, the job's processes, counters.

``trainer/fleet.py`` offers these calls.  In a process that trains alone::

    fleet.init()
    fleet.is_worker()                           # True
    fleet.worker_index(), fleet.worker_num()    # 0, 1
    fleet.server_num(), fleet.transport()       # 0, "local"
    fleet.finish()
"""

from __future__ import annotations

from trainer.environment.environment import Role
from trainer.job.current import present


def is_worker() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it trains.
    """
    return present().role.role is not Role.PSERVER


def is_server() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it is a parameter server.
    """
    return present().role.role is Role.PSERVER


def is_first_worker() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it is trainer 0.
    """
    return is_worker() and present().role.trainer_id == 0


def worker_index() -> int:
    """The place of this process among the trainers.

    Returns:
        This trainer's number, from 0.
    """
    return present().role.trainer_id


def worker_num() -> int:
    """The size of the job.

    Returns:
        How many trainers it has.
    """
    return present().role.trainers


def server_num() -> int:
    """The size of the job.

    Returns:
        How many servers it has; 0 where the process trains alone.
    """
    return len(present().role.server_endpoints)


def server_index() -> int:
    """The place of this process among the servers.

    Returns:
        This server's place in the list of endpoints, from 0.

    Raises:
        RuntimeError: the process is no server.
    """
    if not is_server():
        raise RuntimeError("this process is a trainer, not a server")
    return present().role.server_index


def server_endpoints() -> list[str]:
    """The servers' control endpoints.

    Returns:
        HOST:PORT of every server.
    """
    return list(present().role.server_endpoints)


def worker_endpoints() -> list[str]:
    """The trainers' endpoints, of which there are none: trainers listen on no port.

    Returns:
        Always an empty list.  The number of trainers is :func:`worker_num`.
    """
    return []


def metrics() -> dict[str, float]:
    """Counters of this trainer.

    Returns:
        By name: see :meth:`trainer.communicator.communicator.Communicator.metrics`.  In a process
        that trains alone there is only "steps".
    """
    job = present()
    if job.communicator is not None:
        return job.communicator.metrics()
    return {"steps": float(sum(each.steps for each in job.optimizers))}


def variable_bytes() -> dict[str, dict[str, int]]:
    """The traffic of each variable since the start.

    Returns:
        By variable: payload "bytes_in" and "bytes_out", after compression.  Empty in a job without
        servers.
    """
    job = present()
    return {} if job.communicator is None else job.communicator.variable_bytes()


def transport() -> str:
    """How tensors travel.

    Returns:
        "shm", "tcp", "grpc"; "gloo" or "nccl" without servers; "local" where the process trains
        alone.
    """
    return present().transport
