"""The order in which trainers that step together read files."""

from __future__ import annotations

from pserver.leases.epoch import Epoch
from trainer.samplers.file_order import FileOrder

Sample = tuple[int, int]  # of a piece, its number there


def epoch(samples: int, batch_size: int, stripes: int, drop_last: bool = False) -> Epoch:
    return Epoch(0, "", "", samples, batch_size, stripes, drop_last)


def shares(made: Epoch, files: list[int], counts: list[int]) -> list[list[Sample]]:
    """The samples of each trainer, in its order."""
    order = FileOrder(made, files, counts, made.stripes)
    found = []
    for trainer in range(made.stripes):
        spans = list(order.spans(*made.divided().of(trainer)))
        assert all(span.place < span.end <= len(order.pieces) for span in spans)
        found.append([(order.pieces[s.place], n) for s in spans for n in range(s.first, s.stop)])
    return found


def test_equal_files_are_read_as_in_jobs_without_leases() -> None:
    """Trainer i of n has files i, i + n, ..., piece by piece."""
    files, counts = [0, 0, 1, 2, 3, 3], [3, 2, 5, 5, 1, 4]
    first, second = shares(epoch(20, 4, 2), files, counts)

    assert first == [(piece, n) for piece in (0, 1, 3) for n in range(counts[piece])]
    assert second == [(piece, n) for piece in (2, 4, 5) for n in range(counts[piece])]


def test_a_dropped_batch_is_the_last_one_of_each_trainer() -> None:
    """The others are what they are without drop_last."""
    files, counts = [0, 1], [7, 7]
    whole = shares(epoch(14, 3, 2), files, counts)

    assert shares(epoch(14, 3, 2, True), files, counts) == [each[:6] for each in whole]
