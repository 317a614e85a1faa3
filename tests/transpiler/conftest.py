"""What the tests of the transpiler share."""

import pytest

from tests.support.distributed import Net, captured
from transpiler.program import Program


@pytest.fixture(scope="module")
def single() -> tuple[Program, Program, Net]:
    """One capture for all tests of a file: nothing here may change it."""
    return captured()
