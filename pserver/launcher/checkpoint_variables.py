"""The variables by which trainers learn that their job saves by itself, and where."""

from __future__ import annotations

from pserver.config import check_seconds


def variables_of(path: str | None, every: float | None, keep: int | None) -> dict[str, str]:
    """What ``--checkpoint``, ``--every`` and ``--keep`` say, as trainers read it.

    Args:
        path: of the folder, or its URL; None: the job does not save by itself.
        every: seconds between two checkpoints; None: the trainers' own choice.
        keep: how many of the newest stay; None: likewise.

    Returns:
        Values by name; none without a path.

    Raises:
        ValueError: a number is out of range, or has no effect.
    """
    if path is None:
        for flag, value in (("--every", every), ("--keep", keep)):
            if value is not None:
                raise ValueError(f"{flag}: has no effect without --checkpoint")
        return {}
    said = {"PSERVER_CHECKPOINT": path}
    if every is not None:
        check_seconds("--every", every)
        said["PSERVER_CHECKPOINT_EVERY"] = repr(every)
    if keep is not None:
        if keep < 1:
            raise ValueError(f"--keep: expected 1 or more, got {keep}")
        said["PSERVER_CHECKPOINT_KEEP"] = str(keep)
    return said
