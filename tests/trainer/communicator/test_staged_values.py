"""Values of a reply that wait until the script's thread takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.senders.pipeline import StagedValues


def staged() -> StagedValues:
    buffers: Any = SimpleNamespace(give_back=lambda tensors: None)
    return StagedValues(buffers)


def test_a_reply_that_is_being_taken_in_is_not_over() -> None:
    """In a geo lane it is moved by the deltas that left after it, meanwhile: the next reply must
    not arrive in their memory.
    """
    own = staged()
    assert own.idle
    own.put({"w": torch.ones(2), "b": torch.ones(1)}, {}, 7)
    assert not own.idle and not own.empty
    with own.taken() as (values, message):
        assert (list(values), message, own.idle) == (["w", "b"], 7, False)
    assert own.idle and own.empty
    with own.taken() as (values, message):
        assert (values, message) == ({}, 0)


def test_a_message_of_rows_alone_is_taken_too() -> None:
    """It brings no values, and has been answered all the same; once."""
    own = staged()
    own.put({}, {}, 3)
    for expected in (3, 0):
        with own.taken() as (values, message):
            assert (values, message) == ({}, expected)


def test_a_failed_take_is_over() -> None:
    """The error is the caller's."""
    own = staged()
    own.put({"w": torch.ones(2)}, {})

    with pytest.raises(RuntimeError, match="w"), own.taken() as (values, _):
        raise RuntimeError(*values)
    assert own.idle
