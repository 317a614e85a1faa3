"""Of a function with many cases a usual run takes those that its seconds permit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import CASES_SECONDS, FEWEST, taken


@given(cases=st.integers(1, 200), hundredths=st.integers(0, 10_000))
def test_cases_that_fit_and_never_too_few(cases: int, hundredths: int) -> None:
    """The first is always among them; they are as many as fit, and at least ``FEWEST``."""
    seconds = hundredths / 100  # as tests/testdata/times.txt has them
    places = taken(cases, seconds)
    assert places[0] == 0
    assert list(places) == sorted(set(places))
    assert places[-1] < cases
    assert len(places) >= min(cases, FEWEST)
    assert len(places) in (cases, FEWEST) or len(places) * seconds <= CASES_SECONDS
    assert len(places) == cases or (len(places) + 1) * seconds > CASES_SECONDS


def test_cases_lie_evenly() -> None:
    """Axes of a function vary along its cases, so neighbours stand for one another."""
    assert taken(9, 0.25) == [0, 2, 4, 6]
    assert taken(3, 60.0) == [0, 1]
    assert taken(3, 0.0) == [0, 1, 2]
