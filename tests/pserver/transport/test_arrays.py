"""The arrays of a request as they arrive: in memory of one frame or their own, landed or copied."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.errors import CorruptFrame, PServerError, Refused, Unprepared
from pserver.transport import frames
from pserver.transport.arrays import ArrayAssembler
from pserver.transport.stream import LANDED
from pserver.wire_pb2 import Frame, Kind, Part

SOME = ((torch.int64, (3,)), (torch.float32, (3, 2)), (torch.float16, (1, 3)), (torch.uint8, (0,)))


def named(forms: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """An array of each form, with bytes that differ."""
    random, made = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for number, (dtype, shape) in enumerate(forms):
        size = int(np.prod(shape)) * dtype.itemsize
        whole = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        made[f"a{number}"] = whole.view(dtype).view(shape)
    return made


def bits(arrays: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The dtype, shape and bytes of each array: they compare NaN, too."""
    return {
        name: (str(each.dtype), tuple(each.shape), bytes(frames.buffer_of(each)))
        for name, each in arrays.items()
    }


def arrive(assembler: ArrayAssembler, header: Frame, payload: bytes, landed: bool) -> None:
    """A frame, read to where it lands or to any memory."""
    places = assembler.land(header, len(payload)) if landed else None
    if places is None:
        assembler.take_in(header, payload)
        return
    frames.spread(memoryview(payload), places)
    assembler.take_in(header, LANDED)


@given(st.lists(st.sampled_from(SOME), max_size=6), st.sampled_from([16, 32, 2**21]), st.data())
def test_arrays_arrive_as_they_were(
    forms: list[tuple[torch.dtype, tuple[int, ...]]], chunk: int, data: st.DataObject
) -> None:
    """Cut anywhere, small ones together, whichever frames land; twice, as requests follow."""
    assembler, arrays = ArrayAssembler(), named(forms)
    for _ in range(2):
        for header, payload in frames.frames(Kind.ROWS, 1, arrays.items(), chunk):
            arrive(assembler, header, b"".join(payload), data.draw(st.booleans()))
        assert bits(assembler.take_out()) == bits(arrays)


def test_arrays_of_a_frame_share_a_memory() -> None:
    """They are read at once, and aligned as kernels need them."""
    assembler, arrays = ArrayAssembler(), named([SOME[0], SOME[1], SOME[0]])
    ((header, payload),) = frames.frames(Kind.ROWS, 1, arrays.items())
    places = assembler.land(header, sum(memoryview(each).nbytes for each in payload))
    assert places is not None and len(places) == 1
    frames.spread(memoryview(b"".join(payload)), places)
    assembler.take_in(header, LANDED)
    found = assembler.take_out()
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 1
    assert all(each.numpy().flags.carray for each in found.values())
    assert bits(found) == bits(arrays)


def part(name: str, dtype: str, shape: list[int], size: int, offset: int = 0) -> Part:
    return Part(name=name, dtype=dtype, shape=shape, size=size, offset=offset)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([part("x", "int64", [2], 16)], Unprepared),
        ([part("a", "int64", [2], 16), part("a", "int64", [2], 16)], CorruptFrame),
        ([part("a", "int64", [9], 72)], Refused),
        ([part("a", "int64", [2], 16), part("b", "nothing", [0], 0)], CorruptFrame),
        ([part("a", "int64", [2], 16), part("b", "int64", [2**63, 0], 0)], CorruptFrame),
        ([part("a", "int64", [2], 8), part("b", "int64", [2], 16)], CorruptFrame),
        ([part("a", "int64", [2], 16, offset=8)], CorruptFrame),
    ],
    ids=["unknown", "twice", "too large", "no dtype", "no shape", "not whole", "not its begin"],
)
def test_what_fits_no_array_is_refused(
    parts: list[Part], error: type[PServerError], landed: bool
) -> None:
    """At the latest where the arrays are taken out."""
    assembler = ArrayAssembler(lambda name: name in ("a", "b"), most_bytes=64)
    header = Frame(kind=Kind.ROWS, parts=parts)
    with pytest.raises(error):
        arrive(assembler, header, bytes(sum(each.size for each in parts)), landed)
        assembler.take_out()
