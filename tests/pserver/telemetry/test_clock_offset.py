"""How far another clock is ahead, and how well that is known."""

from __future__ import annotations

import random

from pserver.telemetry.trace import ClockOffset, Estimate


def test_the_true_offset_is_within_the_bound_however_unequal_the_ways() -> None:
    """Of rounds whose way there and back take anything, up to all of the round trip."""
    draw = random.Random(0)
    for _ in range(200):
        true, clock, at = draw.randrange(-(10**12), 10**12), ClockOffset(), 10**9
        for _ in range(draw.randrange(1, 9)):
            there, back = draw.randrange(10**6), draw.choice((0, draw.randrange(10**6)))
            clock.add_round(at, at + there + true, at + there + back)
            at += 10**7
        found = clock.estimate()

        assert found is not None and abs(found.offset_ns - true) <= found.bound_ns


def test_the_shortest_round_counts_until_the_restart() -> None:
    """Half of its round trip is the bound; later and longer rounds change nothing."""
    clock = ClockOffset()
    assert clock.estimate() is None
    clock.add_round(0, 5_100, 400)
    clock.add_round(1_000, 6_010, 1_020)
    clock.add_round(2_000, 7_900, 3_000)
    assert clock.estimate() == Estimate(offset_ns=5_000, bound_ns=11, rounds=3)
    clock.restart()
    clock.add_round(2_000, 7_900, 3_000)

    assert clock.estimate() == Estimate(offset_ns=5_400, bound_ns=501, rounds=1)
