"""The checker's kernels, before the first trial: its servers have ten seconds for a program, and on
a new machine numba needs longer for the tables of all rules.
"""

import pytest

from tests.checker.trials import warm_up


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    warm_up()
