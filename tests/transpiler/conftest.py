"""What the tests of the transpiler share."""

import pytest

from tests.support.distributed import Net, captured
from tests.support.small_captures import uncached as uncached
from transpiler.program import Program


@pytest.fixture(scope="module")
def single() -> tuple[Program, Program, Net]:
    """One capture for all tests of a file: nothing here may change it."""
    return captured()
