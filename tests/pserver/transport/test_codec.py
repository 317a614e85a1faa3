"""Tensors survive the way through frames to the bit, and nothing that a peer sends breaks more than
its own stream.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pserver.errors import CorruptFrame
from pserver.transport import frames
from pserver.wire_pb2 import DONE, GRADIENT, VALUE, Commit, Done, Frame, GroupHparams, Kind, Part

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bytes as a tensor: every bit pattern, NaNs included (bool: only 0 and 1)."""
    numel = torch.empty(shape, dtype=dtype).numel()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(
        0, high, (numel * torch.empty((), dtype=dtype).element_size(),), dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality of bits, NaNs included."""
    kinds = (left.shape, left.dtype) == (right.shape, right.dtype)
    return kinds and torch.equal(frames.flat_bytes(left), frames.flat_bytes(right))


def gather(kind: Kind, named: dict[str, Tensor], chunk_bytes: int) -> dict[str, Tensor]:
    """Through frames, messages and back."""
    result: dict[str, Tensor] = {}
    for header, payload in frames.frames(kind, 3, named.items(), chunk_bytes):
        size = sum(len(piece) for piece in payload)
        message = b"".join([frames.encode_header(header, size), *payload])
        again, body = frames.decode(message)
        assert (again.kind, again.step) == (kind, 3)
        frames.scatter(again, body, lambda part: result.setdefault(part.name, frames.blank(part)))
    return result


@pytest.mark.parametrize("dtype", frames.DTYPES.values(), ids=frames.DTYPES)
def test_every_dtype_and_shape_survives(dtype: torch.dtype) -> None:
    """A tensor of any dtype, scalars and empty ones included, arrives with the same bits, dtype and
    shape.
    """
    named = {f"v{index}": tensor_of(dtype, shape) for index, shape in enumerate(SHAPES)}
    for chunk_bytes in (16, 40, 2**21):
        result = gather(VALUE, named, chunk_bytes)

        assert result.keys() == named.keys()
        assert all(same_bytes(result[name], named[name]) for name in named)


def test_a_buffer_is_the_tensors_own_memory() -> None:
    """Nothing is copied on the way out: a write to the tensor shows in its buffer."""
    tensor = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    buffer = frames.buffer_of(tensor)
    (_, payload), *_ = frames.frames(VALUE, 1, [("x", tensor)])
    with torch.no_grad():
        tensor[3] = 1.0

    assert bytes(buffer) == bytes(payload[0]) == b"\0" * 6 + b"\x80\x3f"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t()[:, 1:],
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
    ],
    ids=["strided", "conjugated", "not on the CPU"],
)
def test_a_tensor_whose_memory_is_not_its_value_is_refused(tensor: Tensor) -> None:
    """A view that no single run of bytes represents is an error that says what was expected."""
    with pytest.raises(ValueError, match="expected a contiguous CPU tensor, got torch"):
        frames.buffer_of(tensor)


def test_small_tensors_share_frames_and_large_ones_are_cut() -> None:
    """No payload exceeds the chunk; small tensors share frames, also with those behind a large one,
    which has its own.
    """
    named = [(f"s{index}", torch.zeros(10)) for index in range(60)] + [
        ("large", torch.zeros(600)),
        ("last", torch.zeros(1)),
    ]
    made = [(header, payload) for header, payload in frames.frames(GRADIENT, 1, named, 1024)]
    sizes = [sum(len(piece) for piece in payload) for _, payload in made]
    names = [sorted({part.name for part in header.parts}) for header, _ in made]

    assert sizes == [1000, 1000, 1024, 1024, 352, 404]
    assert names[2:5] == [["large"]] * 3 and "last" in names[5]
    cuts = [(part.offset, part.size) for header, _ in made[2:5] for part in header.parts]
    assert cuts == [(0, 1024), (1024, 1024), (2048, 352)]
    assert all(len(payload) == 1 for _, payload in made[2:5])


def test_tensors_that_come_one_by_one_share_frames() -> None:
    """What is added in several calls is packed as in one; another kind or step starts another
    frame.
    """
    packer = frames.Packer(1024)
    named = [(f"s{index}", torch.full((10,), float(index))) for index in range(60)]
    made = [frame for pair in named for frame in packer.add(GRADIENT, 1, [pair])]
    made += packer.add(GRADIENT, 2, named[:1])
    made += packer.flush()

    assert [(header.step, len(header.parts)) for header, _ in made] == [
        (1, 25),
        (1, 25),
        (1, 10),
        (2, 1),
    ]
    assert [bytes(piece) for _, payload in made[:3] for piece in payload] == [
        bytes(frames.buffer_of(t)) for _, t in named
    ]
    assert list(packer.flush()) == []


def test_no_tensors_make_no_frame_and_a_chunk_has_a_minimum() -> None:
    """There is nothing to send for no tensors; a chunk that cannot hold the widest element is
    refused.
    """
    assert list(frames.frames(VALUE, 1, [])) == []
    with pytest.raises(ValueError, match="expected at least 16, got 8"):
        list(frames.frames(VALUE, 1, [], 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int32"}, "'w': expected dtype float32, got 'int32'"),
        ({"dtype": "object"}, "'w': expected dtype float32, got 'object'"),
        ({"shape": [6]}, r"'w': expected shape \[2, 3\], got \[6\]"),
        ({"offset": 4}, "'w': expected whole elements of 4 bytes within 24, got bytes 4 to 28"),
        ({"offset": 2**63}, "'w': expected whole elements of 4 bytes within 24"),
        ({"offset": 2, "size": 4}, "expected 4 bytes of payload as the parts say, got 24"),
        ({"size": 2**60}, "bytes of payload as the parts say, got 24"),
    ],
)
def test_a_part_that_contradicts_its_destination_is_refused(
    change: dict[str, object], message: str
) -> None:
    """A wrong part names the variable, what was expected and what came, and nothing is written."""
    target = torch.zeros(2, 3)
    part = Part(
        **{"name": "w", "dtype": "float32", "shape": [2, 3], "offset": 0, "size": 24, **change}
    )  # type: ignore[arg-type]
    with pytest.raises(CorruptFrame, match=message):
        frames.scatter(Frame(kind=VALUE, parts=[part]), b"\1" * 24, lambda _: target)

    assert torch.equal(target, torch.zeros(2, 3))


def test_a_wrong_part_leaves_the_right_ones_before_it_unwritten() -> None:
    """A frame is checked whole before any of it is copied."""
    target = torch.zeros(2)
    good = Part(name="a", dtype="float32", shape=[2], size=8)
    bad = Part(name="b", dtype="float32", shape=[2], offset=1, size=4)
    with pytest.raises(CorruptFrame, match="'b': expected whole elements"):
        frames.scatter(Frame(parts=[good, bad]), b"\1" * 12, lambda _: target)

    assert torch.equal(target, torch.zeros(2))


@pytest.mark.parametrize(
    "part",
    [
        Part(name="w", dtype="object"),
        Part(name="w", dtype="int8", shape=[2**62]),
        Part(name="w", dtype="int8", shape=[2**64 - 1]),
    ],
    ids=["dtype", "memory", "dimension"],
)
def test_an_impossible_variable_is_a_corrupt_frame(part: Part) -> None:
    """A part whose variable no memory can hold is refused, not tried."""
    with pytest.raises(CorruptFrame, match="'w': "):
        frames.blank(part)


def full_header() -> Frame:
    """A header with something in many fields."""
    commit = Commit(
        hparams=[GroupHparams(group=1)], absent=["a", "b"], overflow=True, scale={"": 0.5}
    )
    parts = [
        Part(name=f"p{index}", dtype="float32", shape=[2, 3], offset=index, size=24)
        for index in range(40)
    ]
    return Frame(kind=DONE, step=2**40, parts=parts, commit=commit, done=Done(version=7))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16384, 3_000_000])
def test_messages_are_the_generated_classes_own(size: int) -> None:
    """Our bytes are what protobuf writes and reads, for payloads of any size."""
    header, payload = full_header(), random.Random(size).randbytes(size)
    ours = frames.encode_header(header, size) + payload
    whole = Frame.FromString(ours)
    again, body = frames.decode(ours)

    assert whole.payload == payload == bytes(body)
    assert whole.SerializeToString() == ours
    assert again == header
    whole.ClearField("payload")
    assert whole == header


def test_fields_may_follow_the_payload() -> None:
    """Other serialisers may order fields as they like; of two payloads the last counts, as protobuf
    says.
    """
    first = frames.encode_header(Frame(kind=VALUE), 3) + b"abc"
    message = first + Frame(step=9).SerializeToString() + frames.encode_header(Frame(), 2) + b"xy"
    header, payload = frames.decode(message)

    assert (header, bytes(payload)) == (Frame(kind=VALUE, step=9), b"xy")
    assert Frame.FromString(message).payload == b"xy"


def test_the_payload_is_a_view() -> None:
    """A payload of megabytes is located, not copied."""
    message = bytearray(frames.encode_header(full_header(), 4) + b"\0" * 4)
    _, payload = frames.decode(message)
    message[-1] = 5

    assert bytes(payload) == b"\0\0\0\5"


def test_hostile_bytes_are_corrupt_frames_and_nothing_else() -> None:
    """Whatever bytes come, decode either agrees with protobuf or raises CorruptFrame."""
    rng = random.Random(0)
    good = frames.encode_header(full_header(), 64) + rng.randbytes(64)
    cases = [rng.randbytes(rng.randrange(1, 80)) for _ in range(3000)]
    cases += [good[: rng.randrange(len(good))] for _ in range(300)]
    for _ in range(1000):
        broken = bytearray(good)
        broken[rng.randrange(len(good))] = rng.randrange(256)
        cases.append(bytes(broken))
    refused = 0
    for case in cases:
        try:
            header, payload = frames.decode(case)
        except CorruptFrame as error:
            refused += 1
            assert str(error).startswith("expected a ")
        else:
            whole = Frame.FromString(case)
            assert whole.payload == bytes(payload)
            assert (whole.kind, whole.step) == (header.kind, header.step)

    assert 2000 < refused < len(cases)


def test_a_header_that_came_beside_its_payload_holds_none() -> None:
    """A transport that moves the payload apart refuses a second one inside the header."""
    with pytest.raises(
        CorruptFrame, match="expected a header without a payload, got one of 3 bytes"
    ):
        frames.parse_header(Frame(payload=b"abc").SerializeToString())
