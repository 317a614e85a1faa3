"""Where and how often a job saves by itself."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.config import check_seconds
from trainer.environment.environment import Connection


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where and how often a job saves by itself.

    Attributes:
        path: the folder of checkpoints, or its URL.
        every_seconds: between two of them.
        keep: how many of the newest stay.

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
        """What the script says, otherwise what the environment says; None where neither names a
        path.

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
