"""Passes over samples in memory, as processes of :mod:`tests.support.script_world` have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.scripts import Script
from trainer.data.datasets import NUMBER, Parses, SamplePlaces, SharedOrder, Shuffles
from trainer.data.pieces import Piece
from trainer.samplers.leased_part import LeasedPart
from trainer.samplers.memory_samples import Division, HeldSamples, Loaded, MemoryBatches
from trainer.samplers.sample_pass import Pass


def memory_pass(
    script: Script,
    files: tuple[Sequence[Piece], Sequence[int], Sequence[int]],
    batch: int,
    trainers: int,
    shuffled: bool,
    parses: Parses,
) -> Pass[LeasedPart]:
    """A pass.

    Args:
        files: pieces, the number of each one's file, and its samples.
        batch: samples of a batch.
        trainers: of the job.
        shuffled: whether the trainer has in memory what the last shuffle gave it; otherwise it has
            what it has loaded, as one that came later.
        parses: gives the samples of pieces.
    """
    pieces, numbers, counts = files
    shuffles = Shuffles(1, script.epoch, script.epoch)

    def order(of: int, made: Shuffles) -> SharedOrder:
        return SharedOrder(SamplePlaces(numbers, counts, of), made)

    def divided(of: int) -> Division:
        return Division(order(of, shuffles), batch, False)

    places = order(trainers, shuffles).places
    indices = order(trainers, shuffles if shuffled else Shuffles(1)).of(script.number)
    columns: dict[str, Any] = {"n": indices, NUMBER: places.numbers(indices)}
    loaded, together = Loaded(pieces, counts, shuffles, batch, False), bool(script.desk.stripes)
    held = HeldSamples(columns, places, loaded, parses, lambda _: None)
    epoch = loaded.epoch(script.epoch, "", trainers, divided(trainers).batches, together)
    return Pass(MemoryBatches(divided, held), LeasedPart(script.desk, epoch))
