"""The numbers of samples of a dataset's files: one trainer counts each file, once.

A trainer counts its own files first, and publishes the counts by server 0.  Then it takes the parts
that no trainer has published yet: so no trainer waits for a slow or lost one, and a trainer that
joins late finds all counts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from trainer.data.datasets import FileDataset
from trainer.data.pieces import Piece, size_of
from trainer.samplers.file_samples import in_words
from transpiler.files import bounded_json

Agree = Callable[[str, str], "str | None"]

log = logging.getLogger(__name__)


class SampleCounts:
    """The samples of a dataset's pieces.

    Args:
        name: of the dataset, the same on every trainer.
        agree: takes a topic and a text, and returns the first trainer's text about it; "" only
            asks.

    Attributes:
        name: of the dataset.
    """

    def __init__(self, name: str, agree: Agree) -> None:
        self.name, self._agree = name, agree
        self._known: tuple[str, list[int]] = "", []

    def of(
        self, dataset: FileDataset, pieces: Sequence[Piece], trainer: int, trainers: int
    ) -> list[int]:
        """The number of samples of each piece.

        Args:
            pieces: of all files.
            trainer, trainers: this trainer's number, and the number of trainers.

        Raises:
            WrongLine, OSError: see :meth:`trainer.data.lines.LineFormat.count`.
            ValueError: another trainer has counted other numbers, or there is no sample.
        """
        paths = dataset.all_files
        packed = [size_of(each.path) for each in pieces if each.end is None]
        what = f"samples of {self.name}: {in_words(pieces, packed, dataset.parsing)}"
        if self._known[0] == what:
            return self._known[1]
        began, counts = time.perf_counter(), dict[int, int]()
        for each in range(trainers):
            index = (trainer + each) % trainers
            mine = set(paths[index::trainers])
            places = [place for place, piece in enumerate(pieces) if piece.path in mine]
            found = self._part(f"{what}, part {index} of {trainers}", dataset, pieces, places)
            counts.update(zip(places, found, strict=True))
        found = [counts[place] for place in range(len(pieces))]
        dataset.check_samples(pieces, found)
        self._known = what, found
        samples, seconds = sum(counts.values()), time.perf_counter() - began
        log.info("counted %d samples of %d files in %.1f s", samples, len(paths), seconds)
        return self._known[1]

    def _part(
        self, topic: str, dataset: FileDataset, pieces: Sequence[Piece], places: Sequence[int]
    ) -> list[int]:
        """The numbers of samples of these pieces, by the first trainer that has counted them."""
        found = list[int]()
        if not places:
            return found
        with closing(dataset.counted(pieces[place] for place in places)) as counted:
            while len(found) < len(places):
                if told := self._agree(topic, ""):
                    return self._told(told, found, pieces, places)
                found.append(next(counted))
        told = self._agree(topic, json.dumps(found)) or json.dumps(found)
        return self._told(told, found, pieces, places)

    def _told(
        self, told: str, found: Sequence[int], pieces: Sequence[Piece], places: Sequence[int]
    ) -> list[int]:
        counts = [int(each) for each in bounded_json.loads(told)]
        for place, theirs, mine in zip(places, counts, found, strict=False):
            if theirs != mine:
                raise ValueError(
                    f"{pieces[place].shown}: expected {theirs} samples, as another trainer has "
                    f"counted, got {mine}: all trainers read the same files"
                )
        return counts
