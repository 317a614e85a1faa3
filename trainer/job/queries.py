"""What a script may ask about its job: which process this is, how many there are, what was counted.

See trainer/fleet.py.
"""

from __future__ import annotations

from trainer.job.current import present
from trainer.role import Role


def is_worker() -> bool:
    """Whether this process trains."""
    return present().role.role is not Role.PSERVER


def is_server() -> bool:
    """Whether this process is a parameter server."""
    return present().role.role is Role.PSERVER


def is_first_worker() -> bool:
    """Whether this is trainer 0."""
    return is_worker() and present().role.trainer_id == 0


def worker_index() -> int:
    """This trainer's number."""
    return present().role.trainer_id


def worker_num() -> int:
    """Trainers of the job."""
    return present().role.trainers


def server_num() -> int:
    """Servers of the job; 0 where the process trains alone."""
    return len(present().role.server_endpoints)


def server_index() -> int:
    """This server's place in the list of endpoints.

    Raises:
        RuntimeError: the process is no server.
    """
    if not is_server():
        raise RuntimeError("this process is a trainer, not a server")
    return present().role.server_index


def server_endpoints() -> list[str]:
    """HOST:PORT of every server's control endpoint."""
    return list(present().role.server_endpoints)


def worker_endpoints() -> list[str]:
    """Always empty: trainers listen on no port.  Their number is ``worker_num()``."""
    return []


def metrics() -> dict[str, float]:
    """Counters of this trainer; see :meth:`trainer.communicator.communicator.Communicator.metrics`.

    Alone, there are only its steps.
    """
    job = present()
    if job.communicator is not None:
        return job.communicator.metrics()
    return {"steps": float(job.optimizer.steps if job.optimizer is not None else 0)}


def variable_bytes() -> dict[str, dict[str, int]]:
    """Payload "bytes_in" and "bytes_out" of each variable since the start, after compression;
    nothing where no servers are.
    """
    job = present()
    return {} if job.communicator is None else job.communicator.variable_bytes()


def transport() -> str:
    """How tensors travel: "shm", "flight", "grpc"; "gloo" or "nccl" without servers; "local" where
    the process trains alone.
    """
    return present().transport
