"""Promises about leased data of every kind in a world of losses, with the code that trainers run:
each sample counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pserver.errors import PServerError
from pserver.lane.leases import JobLeases
from pserver.leases.epoch import EpochSegments, place_of
from pserver.leases.table import EpochRange
from tests.support.script_world import ScriptWorld
from tests.support.tiers import RARE
from trainer.data.batches import Columns
from trainer.data.datasets import SamplePlaces
from trainer.data.lines import Parsed
from trainer.samplers.counted_reader import CountedReader
from trainer.samplers.file_order import FileOrder
from trainer.samplers.file_samples import CountedFiles, FilePieces
from trainer.samplers.leased_part import LeasedPart

SEEDS = [range(100), *(RARE(range(first, first + 490)) for first in range(100, 5000, 490))]
CAUGHT_WITHIN = 500  # seeds
WORLDS = [
    (kind, together)
    for kind in ("samples", "batches", "iterable", "files", "memory")
    for together in (False, True)
]
NAMES = [f"{kind}, {'sync' if together else 'async'}" for kind, together in WORLDS]


def schedule(seed: int, kind: str, together: bool) -> None:
    """One schedule, and its account.

    Raises:
        AssertionError: a sample is lost, or counts twice.
    """
    world = ScriptWorld(seed, together, kind)
    world.run()
    world.check()


@pytest.mark.parametrize(("kind", "together"), WORLDS, ids=NAMES)
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"seeds {seeds.start} to {seeds.stop}")
def test_each_sample_is_in_one_decided_step_or_counts_as_skipped(
    seeds: range, kind: str, together: bool
) -> None:
    """Epoch by epoch, over random schedules of kills, restarts, joins, leaves, requests that come
    twice, and restarts of the whole job from what it saved.
    """
    for seed in seeds:
        try:
            schedule(seed, kind, together)
        except Exception as error:
            error.add_note(f"seed {seed}, {kind}, together={together}")
            raise


def caught(kind: str, together: bool) -> bool:
    """Whether a schedule shows that the code is wrong."""
    for seed in range(CAUGHT_WITHIN):
        try:
            schedule(seed, kind, together)
        except (AssertionError, ValueError, IndexError, PServerError):
            return True
    return False


def written_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """A server counts what a commit names as soon as it comes."""

    def check(
        leases: JobLeases, trainer: int, incarnation: str, ranges: Sequence[EpochRange]
    ) -> None:
        decided(leases, trainer, incarnation, ranges)

    decided = JobLeases.decided
    patch.setattr(JobLeases, "check", check)
    patch.setattr(JobLeases, "decided", lambda *_: None)


def given_away_while_a_step_is_decided(patch: pytest.MonkeyPatch) -> None:
    """A lost trainer's lease is dealt out again while a step of it is being applied."""
    patch.setattr("pserver.lane.leases._is_applied", lambda member: False)


@pytest.mark.parametrize(("kind", "together"), WORLDS, ids=NAMES)
@pytest.mark.parametrize("wrong", [written_before_the_step, given_away_while_a_step_is_decided])
def test_schedules_find_a_server_that_counts_wrongly(
    wrong: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the data is."""
    wrong(monkeypatch)

    assert caught(kind, together)


def begins_again_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Data that is read again from its beginning is counted from the batch behind it."""
    begin = CountedReader._begin

    def wrong(reader: CountedReader) -> None:
        again = reader._reading is not None
        begin(reader)
        reader._next = int(again)

    patch.setattr(CountedReader, "_begin", wrong)


def counts_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A position is the batch behind it."""
    monkey = "trainer.samplers.counted_reader.place_of"
    patch.setattr(monkey, lambda position, stripes: place_of(position, stripes) + 1)


def ends_early(patch: pytest.MonkeyPatch) -> None:
    """The last batch is taken for the end."""
    end = EpochSegments.end
    patch.setattr(
        EpochSegments, "end", lambda it, segment, length: end(it, segment, max(length - 1, 1))
    )


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("wrong", [begins_again_off_by_one, counts_off_by_one, ends_early])
def test_schedules_find_an_iterable_that_is_positioned_wrongly(
    wrong: Callable[[pytest.MonkeyPatch], None], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one batch."""
    wrong(monkeypatch)

    assert caught("iterable", together)


def reads_on_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """A file of which another trainer has read some samples is read whole."""

    def wrong(
        files: FilePieces, dealer: LeasedPart, parsed: Parsed, start: int, stop: int
    ) -> Iterator[Any]:
        skipped = start % 2**40
        whole = leased(files, dealer, parsed, start - skipped, stop)
        blocks: list[tuple[int, Columns]] = list(whole)
        left = sum(len(block["n"]) for _, block in blocks) - skipped
        for at, block in blocks:
            taken = {name: column[:left] for name, column in block.items()}  # type: ignore[index]
            if left > 0:
                yield at + skipped, taken
            left -= len(block["n"])

    leased = FilePieces._leased
    patch.setattr(FilePieces, "_leased", wrong)


def takes_the_next_piece_for_this_one(patch: pytest.MonkeyPatch) -> None:
    """Where a lease goes on elsewhere in the files, it reads on where it was."""

    def wrong(files: CountedFiles, order: FileOrder, place: int, end: int) -> None:
        files._place = place - 1 if files._reading is not None else files._place
        go_to(files, order, place, end)

    go_to = CountedFiles._go_to
    patch.setattr(CountedFiles, "_go_to", wrong)


def begins_a_sample_late(patch: pytest.MonkeyPatch) -> None:
    """But for the first trainer, each begins its share with its second sample."""

    def wrong(order: FileOrder, *arguments: Any) -> None:
        made(order, *arguments)
        order._begins = [begin + (trainer > 0) for trainer, begin in enumerate(order._begins)]

    made = FileOrder.__init__
    patch.setattr(FileOrder, "__init__", wrong)


def reads_the_sample_before(patch: pytest.MonkeyPatch) -> None:
    """Of a piece that is read again."""

    def wrong(places: SamplePlaces, indices: Any) -> Any:
        pieces, at = pieces_of(places, indices)
        return pieces, np.maximum(at - 1, 0)

    pieces_of = SamplePlaces.pieces
    patch.setattr(SamplePlaces, "pieces", wrong)
    numbers = SamplePlaces.numbers

    def numbered(places: SamplePlaces, indices: Any) -> Any:
        with pytest.MonkeyPatch.context() as right:
            right.setattr(SamplePlaces, "pieces", pieces_of)
            return numbers(places, indices)

    patch.setattr(SamplePlaces, "numbers", numbered)


@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
def test_schedules_find_samples_that_are_read_again_wrongly(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one sample."""
    reads_the_sample_before(monkeypatch)

    assert caught("memory", together)


@pytest.mark.parametrize(
    ("wrong", "together"),
    [
        (reads_on_from_the_beginning, False),
        (takes_the_next_piece_for_this_one, True),
        (begins_a_sample_late, True),
    ],
)
def test_schedules_find_a_file_that_is_read_on_wrongly(
    wrong: Callable[[pytest.MonkeyPatch], None], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lost trainer has left of a file is what its records have not."""
    wrong(monkeypatch)

    assert caught("files", together)
