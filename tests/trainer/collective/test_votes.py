"""What follows from what trainers tell one another when they gather."""

from __future__ import annotations

import itertools

import pytest

from trainer.collective.vote import HELD, NONE, SEALED, Verdict, Vote, verdict_of


def verdict(**standings: Vote) -> Verdict:
    """Of the trainers ``t0``, ``t1``, ..."""
    return verdict_of({int(name[1:]): each for name, each in standings.items()})


def at(count: int, result: str = NONE, **more: object) -> Vote:
    """A trainer with so many counted averages, which servers number likewise."""
    return Vote(f"process {more}", count, count, result, **more)  # type: ignore[arg-type]


def numbers(found: Verdict) -> list[int]:
    return [each.trainer for each in found.members]


def test_a_job_begins_with_all_and_nobody_gets_values() -> None:
    """All are new then."""
    found = verdict(t0=at(0, new=True), t1=at(0, new=True))

    assert numbers(found) == [0, 1] and not found.arrived and found.values_from is None


def test_before_the_first_average_a_new_process_has_what_all_have() -> None:
    """One that replaces another before the first round is over."""
    found = verdict(t0=at(0, new=True), t1=at(0, new=True, late=True))

    assert numbers(found) == [0, 1] and found.values_from is None and not found.problem


def test_where_only_new_ones_are_left_nobody_has_the_values() -> None:
    """The job cannot go on."""
    found = verdict(t1=at(0, new=True, late=True), t2=at(0, new=True, late=True))

    assert "no live trainer has the values" in found.problem and not found.members


def test_who_has_counted_an_average_tells_it_to_those_who_have_not() -> None:
    """A lost trainer's part counts for all then; a new process is let in when they have it."""
    new = Vote("new", 0, 8, new=True)
    found = verdict(t0=at(7), t1=at(8), t2=at(8), t3=new)

    assert (found.result_from, found.takers, found.again) == (1, {0}, False)
    assert found.values_from is None and found.waiting == {3}


def test_a_certain_result_is_told_like_a_counted_one() -> None:
    """One that is sealed."""
    found = verdict(t0=at(7, HELD), t1=at(7, SEALED), t2=at(7))

    assert (found.result_from, found.takers, found.again) == (1, {0, 2}, False)


def test_an_undecided_step_is_averaged_again() -> None:
    """One has no result, so it has not committed the step, and the servers have not decided it."""
    found = verdict(t0=at(7, HELD), t1=at(7))

    assert found.again and found.result_from is None and not found.decided


def test_held_results_stay_where_all_have_one() -> None:
    """The servers decide the step."""
    found = verdict(t0=at(7, HELD), t1=at(7, HELD))

    assert not found.again and found.result_from is None


def test_a_new_process_that_a_step_needs_makes_all_average_it_again() -> None:
    """With the values before that step."""
    found = verdict(t0=at(7, HELD), t1=at(7, HELD), t2=Vote("new", 0, 7, new=True))

    assert found.again and found.values_from == 0 and found.arrived == {2}


def test_a_new_process_waits_until_the_step_before_its_first_is_settled() -> None:
    """The others go on without it until then."""
    found = verdict(t0=at(7, HELD), t1=at(7, HELD), t2=Vote("new", 0, 8, new=True))

    assert numbers(found) == [0, 1] and found.waiting == {2} and not found.again


def test_a_decided_step_is_averaged_again_and_that_counts() -> None:
    """Also by those that have not heard of the decision."""
    found = verdict(t0=at(7, decided=True, wants=True), t1=at(7, HELD))

    assert found.again and found.decided


def test_who_wants_more_steps_than_another_is_told_so() -> None:
    """But not where it wants the result of the last one."""
    found = verdict(t0=at(7, ends=True), t1=at(7, wants=True))

    assert "all trainers run the same number of steps" in found.problem
    assert not verdict(t0=at(7, ends=True), t1=at(6, wants=True)).problem


def test_all_end_when_all_say_so() -> None:
    """And nobody is new."""
    assert verdict(t0=at(7, ends=True), t1=at(7, ends=True)).over
    assert not verdict(t0=at(7, ends=True), t1=at(7)).over
    assert not verdict(t0=at(7, ends=True), t1=Vote("new", 0, 7, new=True)).over


def test_a_group_stays_where_all_have_the_same() -> None:
    """And it is whole on all."""
    assert verdict(t0=at(7, group=3), t1=at(7, group=3)).same_group
    assert not verdict(t0=at(7, group=3), t1=at(7)).same_group


@pytest.mark.parametrize("count", [2, 3])
def test_everybody_knows_what_to_do_in_every_case(count: int) -> None:
    """Whoever lacks a result that another one has counted takes it, from one who has it; and
    otherwise all of them make the average anew, or none.
    """
    states = [at(7), at(7, HELD), at(7, SEALED), at(8), at(7, decided=True)]
    for standings in itertools.product(states, repeat=count):
        found = verdict_of(dict(enumerate(standings)))
        has = {t for t, each in enumerate(standings) if each.count == 8}
        if len(has) == count:
            continue  # nobody lacks anything
        has = has or {t for t, each in enumerate(standings) if each.result == SEALED}
        if has:
            assert found.result_from in has and not found.again
            assert found.takers == set(range(count)) - has
        else:
            kept = all(each.result == HELD for each in standings)
            assert found.again is not kept and found.result_from is None


def test_what_is_told_is_what_was_said() -> None:
    """As text."""
    said = Vote("a", 3, 4, HELD, wants=True, group=2)

    assert Vote.of(said.text()) == said
