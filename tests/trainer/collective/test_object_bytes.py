"""Objects that travel between trainers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainer.collective.object_bytes import from_bytes, to_bytes

OBJECT: dict[Any, Any] = {
    "none": None,
    "list": [True, -(2**70), 0.1, "\u00e4\n", b"\x00\xff", [], {}],
    "tuple": (1, (2.5, ()), [3]),
    7: {"tensor": 0, "dict": [1]},  # words of the format itself
    None: math.inf,
    False: "key",
}


def test_an_object_is_what_it_was() -> None:
    """Types and values, those included that JSON does not know."""
    found = from_bytes(to_bytes(OBJECT))

    assert found == OBJECT and repr(found) == repr(OBJECT)
    assert math.isnan(from_bytes(to_bytes(math.nan)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.arange(12).reshape(3, 4).t(),
        torch.zeros(0, 3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_keep_dtype_and_shape(tensor: torch.Tensor) -> None:
    """Of any strides, also where two share memory."""
    one, other = from_bytes(to_bytes([tensor, tensor]))

    assert one.dtype == tensor.dtype and torch.equal(one, tensor) and torch.equal(other, tensor)
    assert not one.requires_grad


def test_numpy_is_numpy_again() -> None:
    """Arrays and numbers; an array is the receiver's own, and may be written to."""
    array, number = from_bytes(to_bytes((np.arange(6, dtype=np.int16)[::2], np.float32(0.1))))

    assert isinstance(array, np.ndarray) and array.dtype == np.int16
    array += 1
    assert array.tolist() == [1, 3, 5]
    assert isinstance(number, np.float32) and number == np.float32(0.1)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [object()]}, r"the object\['a'\]\[0\]: expected numbers, texts, .* got object"),
        ({(1, 2): 0}, "expected keys that are None, bool, int, float or str, got tuple"),
        (np.array(["text"]), "got a numpy array of <U4"),
        (torch.zeros(2, 2).to_sparse(), "got a tensor of layout torch.sparse_coo"),
        ({1, 2}, "got set"),
    ],
)
def test_other_things_are_refused(value: Any, said: str) -> None:
    """And the error says where they are."""
    with pytest.raises(TypeError, match=said):
        to_bytes(value)
