"""Gradients of one step from the parts that arrive: small tensors that come together land in one
memory, whatever comes in another order.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pserver.dense.compression import encode
from pserver.errors import CorruptFrame
from pserver.service.tensors import GradientAssembler
from pserver.transport import frames
from pserver.transport.stream import LANDED
from pserver.wire_pb2 import Kind

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": (), "d": (2, 0), "e": (1000,)}


def assembler(
    dtypes: dict[str, torch.dtype] | None = None, compression: str = ""
) -> GradientAssembler:
    updates: dict[str, Any] = {
        name: SimpleNamespace(
            value=torch.zeros(shape, dtype=(dtypes or {}).get(name, torch.float32)),
            compression=compression,
        )
        for name, shape in SHAPES.items()
    }
    return GradientAssembler(updates)


def arrive(
    own: GradientAssembler, step: int, tensors: dict[str, torch.Tensor], chunk: int = 2**21
) -> list[int]:
    """Sends one step's gradients; how many places each frame went to (0: it did not land)."""
    places = []
    for header, payload in frames.frames(Kind.GRADIENT, step, tensors.items(), chunk):
        body = b"".join(payload)
        found = own.land(header, len(body))
        places.append(0 if found is None else len(found))
        own.begin(step)
        if found is not None:
            frames.spread(memoryview(body), found)
        own.take_in(header, body if found is None else LANDED)
    return places


def gradients(names: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=generator) for name in names}


def check(own: GradientAssembler, step: int, sent: dict[str, torch.Tensor]) -> None:
    absent = [name for name in SHAPES if name not in sent]
    found = own.complete(step, absent)
    assert found.keys() == sent.keys()
    for name, value in sent.items():
        assert torch.equal(found[name], value), name


def test_tensors_that_come_together_land_in_one_place() -> None:
    """From the second step on; every value is its own."""
    own = assembler()
    for step in range(1, 5):
        sent = gradients("abcde", step)
        places = arrive(own, step, sent)
        assert places == ([4] if step == 1 else [1])  # one of the five is empty
        check(own, step, sent)


def test_whatever_comes_otherwise_arrives_too() -> None:
    """Other orders, absent tensors, tensors cut into parts: all steps are exact."""
    own, rng = assembler(), random.Random(0)
    for step in range(1, 200):
        names = rng.sample("abcde", rng.randint(0, 5))
        sent = gradients("".join(names), step)
        arrive(own, step, sent, rng.choice([16, 64, 2**21]))
        check(own, step, sent)


def test_tensors_of_two_dtypes_stay_apart() -> None:
    """They have no common memory."""
    own = assembler({"b": torch.float64})
    for step in (1, 2):
        sent = gradients("ab", step)
        sent["b"] = sent["b"].double()
        assert arrive(own, step, sent) == [2]
        check(own, step, sent)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_tensor_that_is_not_finite_is_named(step: int) -> None:
    """Also where all were looked at as one; the next step is whole again."""
    own = assembler()
    for number in range(1, step + 1):
        sent = gradients("abcde", number)
        if number == step:
            sent["b"][3] = float("nan")
        arrive(own, number, sent)
        assert own.nonfinite() == ({"b"} if number == step else set())
        own.complete(number, ())
    arrive(own, step + 1, gradients("abcde", 0))
    assert own.nonfinite() == set()


def test_tensors_that_come_twice_in_a_step_are_refused() -> None:
    """As a group, too."""
    own = assembler()
    for step in (1, 2):
        arrive(own, step, gradients("abe", step))
        with pytest.raises(CorruptFrame, match="expected bytes from 60 on, got them from 0"):
            arrive(own, step, gradients("abe", step))
        own.complete(step, ("c", "d"))


# ---- elements that are not 0 ----


def sparse(names: str, seed: int, zeros: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = gradients(names, seed)
    for value in found.values():
        value[torch.rand(value.shape, generator=generator) < zeros] = 0.0
    return found


def encoded(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        n: part for name, value in sent.items() for n, part in encode(name, value, "sparse").items()
    }


def test_sparse_gradients_may_have_another_size_in_every_step() -> None:
    """And come whole where that is less; cut anywhere, with absent ones among them."""
    own, rng = assembler(compression="sparse"), random.Random(0)
    for step in range(1, 200):
        names = rng.sample("abcde", rng.randint(0, 5))
        sent = sparse("".join(names), step, rng.choice([0.0, 0.6, 0.95, 1.0]))
        arrive(own, step, encoded(sent), rng.choice([16, 64, 2**21]))
        check(own, step, sent)


def test_a_sparse_gradient_that_is_not_finite_is_named() -> None:
    """By its slice."""
    own = assembler(compression="sparse")
    sent = sparse("be", 1, 0.9)
    sent["e"][17] = float("inf")
    arrive(own, 1, encoded(sent))

    assert own.nonfinite() == {"e"}


def test_sparse_gradients_of_a_wrong_size_are_refused() -> None:
    """Longer than a gradient that came whole, of two dimensions, of another dtype, in both forms,
    half of it, or changed half-way: each names the tensor.
    """
    index = torch.arange(3, dtype=torch.int32)
    for tensors, words in (
        ({"e@indices": torch.arange(500, dtype=torch.int32)}, "up to 499 elements"),
        ({"e@indices": index.view(3, 1)}, "one dimension"),
        ({"e@values": index}, "expected dtype float32"),
        ({"e@indices": index, "e@values": torch.ones(3), "e": torch.ones(1000)}, "got both"),
        ({"e@indices": index}, "expected 0 bytes of the gradient of 'e@values'|got 0"),
        ({"e@indices": index, "e@values": torch.ones(2)}, "as many values as positions"),
    ):
        own = assembler(compression="sparse")
        with pytest.raises(CorruptFrame, match=words):
            arrive(own, 1, tensors)
            own.complete(1, "abcd")
    own = assembler(compression="sparse")
    first, *_ = frames.frames(Kind.GRADIENT, 1, {"e@indices": torch.arange(99).int()}.items(), 64)
    other, *_ = frames.frames(Kind.GRADIENT, 1, {"e@indices": torch.arange(98).int()}.items(), 64)
    own.begin(1)
    own.take_in(first[0], b"".join(first[1]))
    with pytest.raises(CorruptFrame, match="as many as before"):
        own.take_in(other[0], b"".join(other[1]))
