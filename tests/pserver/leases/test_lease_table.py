"""Promises about the lease table of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pserver.leases.epoch import Epoch
from pserver.leases.table import LeaseAsked, LeaseTable

ON_DEMAND = Epoch(0, "", "0", samples=40, batch_size=5)
STRIPED = Epoch(0, "", "0", samples=40, batch_size=5, stripes=2)


def joined(*trainers: int) -> LeaseTable:
    """A table of two trainers, of which these have joined."""
    table = LeaseTable(2)
    for trainer in trainers:
        table.join(trainer, "a")
    return table


def test_who_asks_more_often_gets_more() -> None:
    """On demand, a fast trainer has more batches than a slow one."""
    table = joined(0, 1)
    slow = table.lease(1, "a", LeaseAsked(1, ON_DEMAND, 9))
    fast = [table.lease(0, "a", LeaseAsked(n, ON_DEMAND, 9)) for n in (1, 2, 3)]

    assert slow.ranges == ((0, 5),)
    assert [each.ranges for each in fast] == [((5, 10),), ((10, 15),), ((15, 20),)]


def test_who_asks_ahead_leaves_the_others_their_share_of_pieces() -> None:
    """However many it can hold; who has nothing left gets what there is, and so does who has come
    to the end of what it had.
    """
    table, files = joined(0, 1), Epoch(0, "", "0", 0, 4, segments=5)
    ahead = [table.lease(0, "a", LeaseAsked(n, files)).batches for n in range(1, 6)]
    table.lease(0, "a", LeaseAsked(6, files, ended=((0, 0, 9),)))
    other = [table.lease(1, "a", LeaseAsked(n, files)).batches for n in range(1, 3)]

    assert (ahead, other) == ([1, 1, 1, 0, 0], [1, 1])
    ends = tuple((0, segment, 9) for segment in (1, 2))
    assert not table.lease(0, "a", LeaseAsked(7, files, ended=ends)).batches
    table.remove(1, "a")
    assert [table.lease(0, "a", LeaseAsked(n, files)).batches for n in (8, 9)] == [1, 1]


@pytest.mark.parametrize(
    ("begun", "left"), [(0, 41), (5, 31), (15, 11), (20, 0), (10**9, 0)], ids=str
)
def test_what_a_job_without_leases_had_is_decided(begun: int, left: int) -> None:
    """Of each stripe; the samples beyond a full batch are of the last one."""
    epoch = Epoch(0, "", "0", samples=41, batch_size=5, stripes=2, begun=begun)
    table = joined(0, 1)
    leases = [table.lease(trainer, "a", LeaseAsked(1, epoch, 100, 0)) for trainer in (0, 1)]

    assert sum(b - a for each in leases for a, b in each.ranges) == left
    assert table.accounts[0].decided == 41 - left
    later = Epoch(0, "", "0", samples=41, batch_size=5, stripes=2)  # who knows no checkpoint
    table.lease(0, "a", LeaseAsked(2, later, 100))


def test_what_was_had_of_data_without_a_known_end_is_no_later_end() -> None:
    """The end is behind it."""
    epoch = Epoch(0, "", "0", 0, 1, unit="batches", whole=True, segments=1, begun=7)
    table = joined(0)

    assert table.lease(0, "a", LeaseAsked(1, epoch, 1)).ranges == ((7, 8),)
    with pytest.raises(ValueError, match="expected an end behind at least 7"):
        table.lease(0, "a", LeaseAsked(2, epoch, 1, ended=((0, 0, 6),)))


@pytest.mark.parametrize("uneven", [False, True])
def test_fewer_batches_than_survivors_are_left_out_where_they_step_together(uneven: bool) -> None:
    """Otherwise some of the survivors have them."""
    epoch = Epoch(0, "", "0", 7, 1, 3, unit="batches", positions=9, uneven=uneven)
    table = LeaseTable(3)
    for trainer in range(3):
        table.join(trainer, "a")
        table.lease(trainer, "a", LeaseAsked(1, epoch, 100))
        left = int(trainer == 2)  # the last batch of the last one
        table.decided(trainer, "a", [(0, 3 * trainer, 3 * trainer + 3 - left)])
    table.remove(2, "a")
    asked = [table.lease(each, "a", LeaseAsked(2, epoch, 100, 0)) for each in (0, 1)]
    asked += [table.lease(0, "a", LeaseAsked(3, epoch, 100, 0))]

    assert [each.ranges for each in asked] == [(), (), ((8, 9),) if uneven else ()]
    assert table.accounts[0].left_out == (0 if uneven else 1)


def test_a_replacement_steps_on_from_the_decided_step_at_which_it_was_let_in() -> None:
    """Neither a step that is decided and not applied yet, nor steps that others take before it
    asks, change how many batches it has.
    """
    table = joined(0, 1)
    table.lease(0, "a", LeaseAsked(1, STRIPED, 100))
    table.remove(1, "a")
    table.decided(0, "a", [(0, 0, 5)])
    table.expect(1, {0: [(0, 5, 10)]})
    table.decided(0, "a", [(0, 5, 10)])
    table.decided(0, "a", [(0, 10, 15)])
    table.join(1, "b")

    assert table.lease(1, "b", LeaseAsked(1, STRIPED, 100)).ranges == ((30, 40),)


def test_two_that_come_late_together_have_as_much_as_the_others_have_left() -> None:
    """Those that have stepped on meanwhile do not count as any that have not."""
    table, epoch = LeaseTable(3), replace(STRIPED, samples=60, stripes=3)
    for trainer in range(3):
        table.join(trainer, "a")
    table.lease(0, "a", LeaseAsked(1, epoch, 100))
    for trainer in (1, 2):
        table.remove(trainer, "a")
    for trainer in (1, 2):
        table.expect(trainer, {})
    table.decided(0, "a", [(0, 0, 5)])
    for trainer in (1, 2):
        table.join(trainer, "b", again=True)

    late = [table.lease(trainer, "b", LeaseAsked(1, epoch, 100)) for trainer in (1, 2)]
    assert [each.batches for each in late] == [3, 3]


UNKNOWN_END = Epoch(0, "", "0", 0, 1, unit="batches", whole=True, segments=1)
ABSURD = [
    (ON_DEMAND, {"number": 2**32}, "number: expected 0 to 4294967295, got 4294967296"),
    (ON_DEMAND, {"samples": 0}, "samples: expected 1 to 1099511627776, got 0"),
    (ON_DEMAND, {"samples": 2**40 + 1}, "samples: expected 1 to .*, got 1099511627777"),
    (ON_DEMAND, {"samples": -1}, "samples: expected 1 to .*, got -1"),
    (ON_DEMAND, {"batch_size": 0}, "batch_size: expected 1 to .*, got 0"),
    (ON_DEMAND, {"segments": 1}, "segments: expected 0 .*, got 1"),
    (ON_DEMAND, {"unit": "rows"}, "unit: expected one of samples, batches, got 'rows'"),
    (ON_DEMAND, {"positions": 41}, "positions: expected 0 to 40, got 41"),
    (ON_DEMAND, {"begun": -1}, "begun: expected 0 to .*, got -1"),
    (STRIPED, {"positions": 81}, "positions: expected 0 to 80, got 81"),
    (STRIPED, {"stripes": 3}, "stripes: expected 0, or this job's 2 trainers, got 3"),
    (STRIPED, {"stripes": 2**32 - 1}, "stripes: expected 0, or this job's 2 trainers, got 4294"),
    (UNKNOWN_END, {"begun": 2**40}, "begun: expected 0 to 1099511627774, got 1099511627776"),
    (UNKNOWN_END, {"segments": 2**20 + 1}, "segments: expected 1 to 1048576, got 1048577"),
    (UNKNOWN_END, {"segments": 1, "stripes": 2}, "segments: expected 2 to 2, got 1"),
    (UNKNOWN_END, {"positions": 1}, "positions: expected 0 to 0, got 1"),
]


@pytest.mark.parametrize(("epoch", "wrong", "said"), ABSURD)
def test_an_epoch_that_no_trainer_can_have_is_refused(
    epoch: Epoch, wrong: dict[str, Any], said: str
) -> None:
    """By what is wrong with it, before anything is kept of it; what others ask counts."""
    table = joined(0, 1)
    with pytest.raises(ValueError, match=f"^epoch [0-9]+, {said}"):
        table.lease(1, "a", LeaseAsked(1, replace(epoch, **wrong), 1))

    assert not table.accounts
    assert table.lease(0, "a", LeaseAsked(1, STRIPED, 1)).ranges == ((0, 5),)
    with pytest.raises(ValueError, match="^epoch"):  # nor does it change one that there is
        table.lease(1, "a", LeaseAsked(1, replace(STRIPED, stripes=2**32 - 1), 1))
    assert table.lease(1, "a", LeaseAsked(1, STRIPED, 1)).ranges == ((20, 25),)


def test_a_checkpoint_with_an_epoch_that_no_trainer_can_have_is_refused() -> None:
    """Before memory is taken for it."""
    table = joined(0, 1)
    table.lease(0, "a", LeaseAsked(1, STRIPED, 100))
    plain = table.plain()
    plain["epochs"][0]["epoch"]["stripes"] = 2**40

    with pytest.raises(ValueError, match="epoch 0, stripes: expected 0 to 1048576, got 10995116"):
        LeaseTable.of(plain, 2)


def test_an_end_that_no_data_has_is_refused() -> None:
    """A segment begins every 2**40 positions."""
    table = joined(0)
    table.lease(0, "a", LeaseAsked(1, UNKNOWN_END, 1))

    with pytest.raises(ValueError, match="expected an end before 1099511627776, got 1099511627776"):
        table.lease(0, "a", LeaseAsked(2, UNKNOWN_END, 1, ended=((0, 0, 2**40),)))


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_handed_back_counts_when_its_end_is_known(saved: bool) -> None:
    """From where the steps of the lost one have come to; also when the job begins again between."""
    table = joined(0, 1)
    files = Epoch(0, "", "0", 0, 4, segments=2)
    for number in (1, 2):
        table.lease(1, "a", LeaseAsked(number, files, unstepped=0))
    table.decided(1, "a", [(0, 0, 4)])
    table.remove(1, "a")
    assert table.accounts[0].handed_back == 0
    if saved:
        table = LeaseTable.of(json.loads(json.dumps(table.plain())), 2)
        table.join(0, "a")
    for number in (1, 2):
        table.lease(0, "a", LeaseAsked(number, files, ended=((0, 0, 10),) if number == 2 else ()))

    assert table.accounts[0].handed_back == 6
    table.lease(0, "a", LeaseAsked(3, files, ended=((0, 1, 5),)))
    assert table.accounts[0].handed_back == 11


@pytest.mark.parametrize(
    ("consumed", "kept"), [({}, (30, 40)), ({0: [(0, 10, 15)]}, (35, 40))], ids=["", "decided"]
)
def test_who_returns_has_as_many_batches_left_as_the_others(
    consumed: dict[int, list[tuple[int, int, int]]], kept: tuple[int, int]
) -> None:
    """It gives up the first of its stripe; steps that are decided and not counted yet, too."""
    table = joined(0, 1)
    for trainer in (0, 1):
        table.lease(trainer, "a", LeaseAsked(1, STRIPED, 100))
        table.decided(trainer, "a", [(0, 20 * trainer, 20 * trainer + 5)])
    table.remove(1, "a")
    table.decided(0, "a", [(0, 5, 10)])

    assert table.admits(1, consumed)
    table.expect(1, consumed)
    table.join(1, "b")
    assert table.lease(1, "b", LeaseAsked(1, STRIPED, 100)).ranges == (kept,)


def test_a_process_that_takes_a_number_takes_no_lease_with_it() -> None:
    """The earlier one of that number is lost: what it had is dealt again."""
    table = joined(0)
    table.lease(0, "a", LeaseAsked(1, ON_DEMAND, 1))
    table.join(0, "b")

    assert table.lease(0, "b", LeaseAsked(1, ON_DEMAND, 1)).ranges == ((0, 5),)
    with pytest.raises(ValueError, match="expected incarnation b, got a"):
        table.lease(0, "a", LeaseAsked(2, ON_DEMAND, 1))


def test_a_saved_table_goes_on_in_batches_of_another_size() -> None:
    """As where a script divides its batch size by the number of trainers.  Not where trainers that
    step together had divided the pass, nor where one of several says another size.
    """
    table = joined(0)
    table.remove(1, "")
    table.lease(0, "a", LeaseAsked(1, ON_DEMAND, 2))
    table.decided(0, "a", [(0, 0, 5)])
    for stripes in (0, 2):
        other = LeaseTable.of(json.loads(json.dumps(table.plain())), 2)
        other.join(0, "b")
        smaller = replace(ON_DEMAND, batch_size=2, stripes=stripes)
        got = other.lease(0, "b", LeaseAsked(1, smaller, 1, 0)).ranges
        assert got == (() if stripes else ((5, 7),))
        with pytest.raises(ValueError, match="or the checkpoint has it"):
            other.lease(0, "b", LeaseAsked(2, replace(smaller, batch_size=3), 1))
    together = joined(0, 1)
    together.lease(0, "a", LeaseAsked(1, STRIPED, 1))
    other = LeaseTable.of(together.plain(), 2)
    other.join(0, "b")
    with pytest.raises(ValueError, match="goes on with a pass of trainers that step together"):
        other.lease(0, "b", LeaseAsked(1, replace(STRIPED, batch_size=2), 1))


def test_dealing_a_large_epoch_keeps_no_list_of_samples() -> None:
    """A state is a few intervals, whatever the number of samples."""
    table = joined(0, 1)
    epoch = Epoch(0, "", "0", samples=10**12, batch_size=1000)
    for number in range(1, 1001):
        lease = table.lease(0, "a", LeaseAsked(number, epoch, 64))
        table.decided(0, "a", [(0, a, b) for a, b in lease.ranges])

    assert len(json.dumps(table.plain())) < 1000
