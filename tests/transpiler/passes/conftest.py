"""What the tests of passes share."""

from __future__ import annotations

import pytest

from tests.support.collectives import Single, captured


@pytest.fixture(scope="module")
def single() -> Single:
    """One capture for all tests of a file: nothing here may change it."""
    return captured()
