"""Some seconds of the fuzzer.  ``make fuzz`` goes on for longer, and looks at times and memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz import inprocess, sockets
from tests.fuzz.inputs import Inputs
from tests.fuzz.victim import GUARDS
from tests.support.tiers import RARE

SEED = 1
SECONDS = 2.5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the inputs bring about in the log of this process is no test's output."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_same_seed_gives_the_same_inputs() -> None:
    """A failure can be tried again."""
    for number in range(200):
        first, again = (Inputs(SEED, number, ("a", "b")) for _ in range(2))
        assert first.frames() == again.frames() and first.call() == again.call()


def test_wrong_inputs_harm_no_job_in_this_process() -> None:
    """In each state of a job, with a session and without: every input is refused or taken, and
    strangers leave a job as it is.
    """
    progress = inprocess.fuzz(SEED, SECONDS)
    assert progress.total > 1000


def test_a_commit_before_anything_is_installed_stops_no_later_stream() -> None:
    """These inputs once left a lane as if values were being loaded, and all after them waited."""
    progress = inprocess.fuzz(20261127, SECONDS, first=4400)
    assert progress.number > 4600


@pytest.mark.processes
@pytest.mark.parametrize("guard", [*map(RARE, GUARDS[:-1]), GUARDS[-1]])
def test_attacks_on_all_ports_leave_the_job_its_result(guard: str) -> None:
    """Bytes, frames, calls and connections that say nothing, while a trainer steps; a new trainer
    joins afterwards.
    """
    found = sockets.fuzz(SEED, SECONDS / 2, guard)
    assert found.counts.total() > 100
