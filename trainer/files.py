"""A job's files: saved and gone on from, or exported for plain PyTorch.  See trainer/fleet.py."""

from __future__ import annotations

from typing import Any

from trainer import resume
from trainer.export import export as _export
from trainer.job import Job
from trainer.present import distributed, present


def save(path: str, scheduler: Any | None = None) -> None:
    """Writes parameters, buffers, optimizer state and step to the directory ``path``: whole, or not at all.

    Every trainer calls this, between steps; trainer 0 writes.

    Args:
        scheduler: of torch.optim.lr_scheduler, whose state is written too.

    Raises:
        OSError: the directory cannot be written; the checkpoint that was there stays.
    """
    job = _whole(present())
    optimizer = distributed(job)
    optimizer.flush()
    optimizer.barrier("save")
    if job.role.trainer_id == 0:
        optimizer.flush()  # the others' last steps too
        resume.save(path, job.tensors(), optimizer, scheduler)
    optimizer.barrier("saved")


def load(path: str, scheduler: Any | None = None) -> int:
    """Reads what :func:`save` wrote; the job goes on from there.  Every trainer calls this, between steps, and can read ``path``.

    Args:
        scheduler: takes up the state that was saved with it.

    Returns:
        The step at which it was saved.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is torn, or of another model or optimizer; nothing is changed.
    """
    job = _whole(present())
    optimizer = distributed(job)
    resume.load(path, job.tensors(), optimizer, scheduler)
    if job.communicator is not None:
        job.communicator.push()
    return optimizer.steps


def _whole(job: Job) -> Job:
    if job.divided:
        raise ValueError(
            "fleet.save, fleet.load: expected a model that is whole on every trainer, got one divided by hybrid_configs: export "
            "it with fleet.export, and keep each trainer's optimizer.state_dict()"
        )
    return job


def export(path: str) -> None:
    """Writes the model, with every step that was taken, to one file that torch alone can read: a plain state_dict.

    Every trainer calls this, between steps; trainer 0 writes.  The names are those of the model's own ``state_dict()``; several
    models are numbered: ``model0.fc.weight``.

    Args:
        path: "NAME.safetensors" is written for ``safetensors.torch.load_file``, any other name for ``torch.load``.

    Raises:
        RuntimeError: no model is registered.
        OSError: the file cannot be written; the one that was there stays.
    """
    job = present()
    if not job.models:
        raise RuntimeError("call fleet.distributed_model first")
    if job.optimizer is not None:
        job.optimizer.flush()
        job.optimizer.barrier("export")
    if job.role.trainer_id == 0 or job.divided:
        prefixes = [f"model{index}." if len(job.models) > 1 else "" for index in range(len(job.models))]
        states = zip(prefixes, (job.state_dict(model) for model in job.models), strict=True)  # others' last steps too
        whole = {prefix + name: value for prefix, state in states for name, value in state.items()}
        if job.role.trainer_id == 0:
            _export(path, whole)
    if job.optimizer is not None:
        job.optimizer.barrier("exported")
