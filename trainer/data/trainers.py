"""The trainers that share the files of a dataset."""

from __future__ import annotations

from typing import Protocol

from trainer.collective.process_groups import ProcessGroups


class Trainers(Protocol):
    """The job's trainers, as a dataset asks for them."""

    def part(self) -> tuple[int, int]:
        """Which part of the files this trainer reads, and of how many."""

    def groups(self) -> ProcessGroups:
        """The trainers, connected with one another; all ask for it at the same time.

        Raises:
            RuntimeError: this trainer has not joined the others yet.
            PServerError: a trainer does not come.
        """

    def shows(self) -> bool:
        """Whether this process shows bars."""
