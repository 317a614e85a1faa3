"""What the tests of a job's saves have in common: a process with few objects."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A save asks the garbage collector for the job's schedulers: what other files' tests have
    left, and what they have imported, is not looked at in each.
    """
    gc.collect()
    gc.freeze()
