"""The number of processes by other launchers' variables, where this one trains alone.

Nothing here reads such a variable for a process's place in a job: a launcher that is not ours says
nothing of servers, and one rank too many is found by nobody.  But where it says that there are
several, and this process is about to train as the only one, then each of them does, and the models
are none of the job's: that is said.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from trainer.environment.world import is_collective
from transpiler.files import bounded_json

log = logging.getLogger(__name__)

# By whose variables they are: names of a number of processes; the first that is set counts.
NUMBERS = {
    "Paddle's": ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINERS"),
    "Open MPI's": ("OMPI_COMM_WORLD_SIZE",),
    "MPICH's": ("PMI_SIZE",),
    "MVAPICH's": ("MV2_COMM_WORLD_SIZE",),
    "Horovod's": ("HOROVOD_SIZE",),
    # of a step, which may be smaller than the allocation that it is in
    "Slurm's": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "LSF's": ("JSM_NAMESPACE_SIZE",),
    "MXNet's": ("DMLC_NUM_WORKER",),
}
TORCHRUN = ("WORLD_SIZE",)  # where a script gives its role itself, or a plain program runs
ENDPOINTS = ("PADDLE_TRAINER_ENDPOINTS",)  # comma-separated
CLUSTER = ("TF_CONFIG",)  # TensorFlow's, as JSON
WAY_OUT = "start them by `pserver launch` or torchrun, or set the variables of docs/environment.md"

_told = False  # since the last job has ended


def several(environ: Mapping[str, str]) -> Iterator[str]:
    """The variables that say that there are several processes, each as NAME=VALUE.

    Beside a job's own role only torchrun's counts: what started ``pserver launch``, once a host,
    may have another number.
    """
    own = bool(environ.get("TRAINING_ROLE"))
    for names in (TORCHRUN,) if own else (*NUMBERS.values(), TORCHRUN):
        name = next((each for each in names if environ.get(each)), "")
        if _number(environ.get(name, "")) > 1:
            yield f"{name}={environ[name]}"
    for name in () if own else ENDPOINTS:
        if len(environ.get(name, "").split(",")) > 1:
            yield f"{name}={environ[name]}"
    for name in () if own else CLUSTER:
        if (workers := _workers(environ.get(name, ""))) > 1:
            yield f"{name} with {workers} workers"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0


def _workers(text: str) -> int:
    """The workers of a TF_CONFIG; 0 where it is none."""
    try:
        cluster = bounded_json.loads(text)["cluster"]
        return sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def is_ours(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says this process's place by the variables that are read: those of a
    job with servers, or torchrun's.
    """
    environ = os.environ if environ is None else environ
    return bool(environ.get("TRAINING_ROLE")) or is_collective(environ)


def said(way_out: str = WAY_OUT) -> str:
    """The words of other launchers, as the end of a sentence about training alone; "" where none of
    them says that there are several.
    """
    found = ", ".join(several(os.environ))
    return f", although there are several by {found}: {way_out}" if found else ""


def warn(what: str, way_out: str = WAY_OUT) -> None:
    """Warns that this process trains alone, once for each job, where another launcher says that
    there are several.

    Args:
        what: trains alone, as the beginning of a sentence.
        way_out: what to do so that they train together.
    """
    global _told
    several_said = "" if _told else said(way_out)
    if several_said:
        _told = True
        log.warning("%s: training alone, in this process only%s", what, several_said)


def told() -> None:
    """Somebody else has warned of it."""
    global _told
    _told = True


def forget() -> None:
    """A job has ended: the next one warns anew."""
    global _told
    _told = False
