"""The trainers that share the files of a dataset."""

from __future__ import annotations

from typing import Any, Protocol

from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.data.pieces import Piece


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

    def elastic(self) -> ElasticGroup | None:
        """Those of the trainers that are there; None: all are there, or the job ends."""

    def counted(self, dataset: Any) -> tuple[list[Piece], list[int]] | None:
        """The pieces of all files of a FileDataset, and how many samples each has, where the
        trainers need not meet to know; None: they meet.
        """

    def shows(self) -> bool:
        """Whether this process shows bars."""
