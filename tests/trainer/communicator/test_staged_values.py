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
    own, seen = staged(), []
    assert own.idle
    own.put({"w": torch.ones(2), "b": torch.ones(1)}, {}, 7)
    assert not own.idle and not own.empty
    assert own.apply(lambda name, value, message: seen.append((name, message, own.idle))) == 7
    assert seen == [("w", 7, False), ("b", 7, False)]
    assert own.idle and own.empty
    assert own.apply(lambda name, value, message: seen.append(name)) is None


def test_a_message_of_rows_alone_is_taken_too() -> None:
    """It brings no values, and has been answered all the same; once."""
    own = staged()
    own.put({}, {}, 3)
    assert own.apply(lambda name, value, message: None) == 3
    assert own.apply(lambda name, value, message: None) is None


def test_a_failed_take_is_over() -> None:
    """The error is the caller's."""
    own = staged()
    own.put({"w": torch.ones(2)}, {})

    def fail(name: str, value: torch.Tensor, message: int) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="w"):
        own.apply(fail)
    assert own.idle
