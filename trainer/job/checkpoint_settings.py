"""The settings of automatic checkpoints: folder, interval, number."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.config import check_seconds
from trainer.environment.environment import Connection


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """The settings of automatic checkpoints: folder, interval, number.

    Attributes:
        path: the folder of checkpoints, or its URL.
        every_seconds: the time between two checkpoints.
        keep: the number of newest checkpoints that stay.

    Raises:
        ValueError: a number is out of range.
    """

    path: str
    every_seconds: float
    keep: int

    def __post_init__(self) -> None:
        check_seconds("every", self.every_seconds)
        if self.keep < 1:
            raise ValueError(f"keep: expected 1 checkpoint or more, got {self.keep}")

    @classmethod
    def of(
        cls, path: str | None, every: float | None, keep: int | None, connection: Connection
    ) -> CheckpointSettings | None:
        """The script's settings, otherwise the environment's; None if neither names a path, and if
        only a plan or a probe is asked for.

        Raises:
            ValueError: a number is out of range, or one is given without a path.
        """
        chosen = path if path is not None else connection.checkpoint
        if not chosen:
            for name, value in (("every", every), ("keep", keep)):
                if value is not None:
                    raise ValueError(f"{name}: has no effect without checkpoint=")
            return None
        if connection.plan_only or connection.probe:
            return None  # it ends before its first step, or it is a trial
        return cls(
            str(chosen),
            connection.checkpoint_every_seconds if every is None else every,
            connection.checkpoint_keep if keep is None else keep,
        )
