"""What ``fleet.shrink`` says to arguments that it does not take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trainer import DistributedEmbedding, ShowClickEntry, fleet


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A job of one process with the table "emb"."""
    fleet.init()
    entry = ShowClickEntry("show", "click")
    model = fleet.distributed_model(DistributedEmbedding(2, name="emb", entry=entry))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    yield
    fleet.finish()


DAYS = "days: expected a number of 0 or more that is finite, got "
THRESHOLD = "threshold: expected a number that is finite, got "
TABLES = "tables: expected a list of names, got "
WRONG = [
    ({"days": "x"}, TypeError, f"{DAYS}'x' (str)"),
    ({"days": None}, TypeError, f"{DAYS}None (NoneType)"),
    ({"days": True}, TypeError, f"{DAYS}True (bool)"),
    ({"days": math.nan}, ValueError, f"{DAYS}nan"),
    ({"days": math.inf}, ValueError, f"{DAYS}inf"),
    ({"days": -1}, ValueError, f"{DAYS}-1"),
    ({"days": 10**400}, ValueError, f"{DAYS}1000"),
    ({"threshold": "x"}, TypeError, f"{THRESHOLD}'x' (str)"),
    ({"threshold": False}, TypeError, f"{THRESHOLD}False (bool)"),
    ({"threshold": math.nan}, ValueError, f"{THRESHOLD}nan"),
    ({"threshold": -math.inf}, ValueError, f"{THRESHOLD}-inf"),
    ({"tables": "emb"}, TypeError, f"{TABLES}'emb' (str)"),
    ({"tables": None}, TypeError, f"{TABLES}None (NoneType)"),
    ({"tables": 3}, TypeError, f"{TABLES}3 (int)"),
    ({"tables": [3]}, TypeError, f"{TABLES}[3] (list)"),
    ({"tables": ["other"]}, ValueError, "expected tables among emb, got 'other'"),
]


@pytest.mark.parametrize(("given", "kind", "said"), WRONG, ids=lambda each: str(each)[:30])
def test_a_wrong_argument_is_refused(given: Any, kind: type[Exception], said: str) -> None:
    """By its name, with what was expected and what was given, before anything is dropped."""
    with pytest.raises(kind, match=f"^shrink: {re.escape(said)}"):
        fleet.shrink(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"days": 0, "threshold": -1},
        {"days": np.float32(0.5), "threshold": Fraction(1, 2)},
        {"tables": ("emb",)},
        {"tables": {"emb"}},
        {"tables": np.array(["emb"])},
    ],
    ids=str,
)
def test_numbers_and_collections_of_any_kind_are_taken(given: Any) -> None:
    """As Python's, and numpy's."""
    assert fleet.shrink(**given) == {"emb": 0}
