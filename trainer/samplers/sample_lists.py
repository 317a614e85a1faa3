"""The sources of a loader's pass whose samples are all drawn when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pserver.leases.epoch import Epoch, Range, Stripes
from trainer.samplers.part import Part, dealt
from trainer.samplers.sample_pass import PositionItems


class SampleLists(PositionItems):
    """Positions are samples; a batch is a list of them.

    Args:
        epoch: the pass; its stripes do not matter.
        order: its permutation.
    """

    def __init__(self, epoch: Epoch, order: Sequence[Any]) -> None:
        self._epoch, self._order = epoch, order
        self._divided: dict[int, Stripes] = {}

    def epoch(self, stripes: int) -> Epoch:
        """The pass, for a dealer; ``stripes``: see :class:`~pserver.leases.epoch.Epoch`."""
        return replace(self._epoch, stripes=stripes)

    def at(self, batch: Sequence[Range], stripes: int) -> list[Any]:
        """See :class:`trainer.samplers.sample_pass.PositionItems`."""
        if stripes not in self._divided:
            self._divided[stripes] = self.epoch(stripes).divided()
        places = (place for a, b in batch for place in self._divided[stripes].places(a, b))
        return [sample for a, b in places for sample in self._order[a:b]]


class BatchLists(PositionItems):
    """Positions are batches that the script's sampler has made, lists of samples.

    Trainers that step together have them in the order of jobs without leases: the last ones, fewer
    than trainers, are divided sample by sample.

    Args:
        epoch: the pass; its stripes do not matter.  Where it is ``whole`` each batch is the item of
            one step, of any type, which is never divided.
        batches: all of the pass.
    """

    def __init__(self, epoch: Epoch, batches: Sequence[Any]) -> None:
        self._epoch = replace(epoch, samples=len(batches), batch_size=1)
        self._batches = batches
        self._divided: dict[int, tuple[Sequence[Any], Stripes]] = {}

    def epoch(self, stripes: int) -> Epoch:
        """The pass, for a dealer; ``stripes``: see :class:`~pserver.leases.epoch.Epoch`.

        Raises:
            ValueError: there are fewer samples than trainers.
        """
        if self._epoch.whole:
            return replace(self._epoch, stripes=stripes)
        positions = len(self._of(stripes)[0])
        return replace(self._epoch, stripes=stripes, unit="batches", positions=positions)

    def at(self, batch: Sequence[Range], stripes: int) -> Any:
        """See :class:`trainer.samplers.sample_pass.PositionItems`."""
        mine, divided = self._of(stripes)
        places = (place for a, b in batch for place in divided.places(a, b))
        found = [mine[place] for a, b in places for place in range(a, b)]
        return found[0] if len(found) == 1 else [sample for each in found for sample in each]

    def _of(self, stripes: int) -> tuple[Sequence[Any], Stripes]:
        """The batches of so many trainers that step together, and how they divide them."""
        if stripes not in self._divided:
            batches, of, whole = self._batches, max(1, stripes), self._epoch.whole
            if not whole:
                parts = [dealt(batches, Part(each, of)) for each in range(of)]
                batches = [batch for row in zip(*parts, strict=True) for batch in row]
            self._divided[stripes] = batches, Stripes(len(batches), 1, of, whole)
        return self._divided[stripes]
