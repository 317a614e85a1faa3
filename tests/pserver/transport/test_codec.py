"""Tensors survive the way through frames to the bit, and nothing that a peer sends breaks more than
its own stream.
"""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pserver.errors import CorruptFrame
from pserver.transport import frames
from pserver.wire_pb2 import DONE, GRADIENT, VALUE, Commit, Done, Frame, GroupHparams, Kind, Part

dtypes = st.sampled_from([*frames.DTYPES.values()])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bytes as a tensor: every bit pattern, NaNs included (bool: only 0 and 1)."""
    size = torch.empty(shape, dtype=dtype).nbytes
    high, chosen = 2 if dtype is torch.bool else 256, torch.Generator().manual_seed(seed)
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=chosen)
    return raw.view(dtype).reshape(shape)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality of bits, NaNs included."""
    kinds = (left.shape, left.dtype) == (right.shape, right.dtype)
    return kinds and torch.equal(frames.flat_bytes(left), frames.flat_bytes(right))


Added = tuple[tuple[Kind, int], list[Tensor]]
calls: st.SearchStrategy[list[Added]] = st.lists(
    st.tuples(
        st.tuples(st.sampled_from([VALUE, GRADIENT]), st.integers(1, 2)),
        st.lists(st.builds(tensor_of, dtypes, shapes, st.integers(0, 99)), min_size=1, max_size=12),
    ),
    max_size=5,
)


@example([((VALUE, 3), [tensor_of(dtype, (3, 5)) for dtype in frames.DTYPES.values()])], 40, 40, 40)
@example([((VALUE, 1), [torch.zeros(1)] * (frames.MOST_PARTS + 1))], 2**21, 2**21, 2**21)
@given(calls, *[st.integers(16, 300) | st.just(2**21)] * 3)
def test_tensors_arrive_as_they_left(
    added: list[Added], chunk: int, shared: int, alone: int
) -> None:
    """Any dtype and shape, in any number of calls, to the bit; no payload exceeds its bound, and no
    frame could have shared the one before it.
    """
    packer = frames.Packer(chunk, shared, alone)
    sent: dict[str, Tensor] = {}
    made = []
    for number, ((kind, step), tensors) in enumerate(added):
        named = {f"{kind} {step} {number}.{at}": tensor for at, tensor in enumerate(tensors)}
        sent |= named
        made += packer.add(kind, step, named.items())
    made += packer.flush()
    assert list(packer.flush()) == []

    most, found = chunk - chunk % 16, dict[str, Tensor]()
    small = min(most, shared, alone)
    for header, payload in made:
        size = sum(len(piece) for piece in payload)
        again, body = frames.decode(frames.encode_header(header, size) + b"".join(payload))
        assert again == header and 0 < len(header.parts) <= frames.MOST_PARTS
        assert all(part.name.startswith(f"{again.kind} {again.step} ") for part in again.parts)
        frames.scatter(again, body, lambda part: found.setdefault(part.name, frames.blank(part)))
        cut = frames.whole_bytes(header.parts[0]) >= small
        assert size <= (most if cut else min(most, shared))
        assert header.parts[0].offset % most == 0
        assert len(header.parts) == 1 or max(part.size for part in header.parts) < small
    assert len(made) <= sum(1 + tensor.nbytes // most for tensor in sent.values())
    assert found.keys() == sent.keys()
    assert all(same_bytes(found[name], sent[name]) for name in sent)
    for _, group in groupby(made, lambda frame: (frame[0].kind, frame[0].step)):
        waits = [header for header, _ in group if frames.whole_bytes(header.parts[0]) < small]
        sizes = [[part.size for part in header.parts] for header in waits]
        for one, other in zip(sizes, sizes[1:], strict=False):
            full = sum(one) + other[0] > min(most, shared)
            assert full or len(one) == frames.MOST_PARTS


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=30))
def test_tensors_wait_for_others_while_frames_leave(added: list[tuple[int, bool]]) -> None:
    """A frame is full at 64 bytes while others leave, and at 16 while none does: then a fuller one
    leaves.  A tensor that fills a frame has its own.
    """
    leaving = False
    packer = frames.Packer(64, 64, 48, busy=lambda: leaving, eager_bytes=16)
    names, sent = iter(range(1000)), dict[str, int]()
    for size, leaving in added:
        name = str(next(names))
        tensor = torch.zeros(size, dtype=torch.uint8)
        made = [header for header, _ in packer.add(GRADIENT, 1, [(name, tensor)])]
        for header in made:
            for part in header.parts:
                sent[part.name] = sent.get(part.name, 0) + part.size
            alone = len(header.parts) == 1
            assert alone or sum(part.size for part in header.parts) <= 64
        assert (name in sent) == (size >= (48 if leaving else 16))
        waiting = [i for i in range(int(name) + 1) if str(i) not in sent]
        held = sum(added[i][0] for i in waiting)
        assert held <= 64 and (leaving or held <= max(16, size))
    for header, _ in packer.flush():
        for part in header.parts:
            sent[part.name] = sent.get(part.name, 0) + part.size
    assert sent == {str(i): size for i, (size, _) in enumerate(added)}


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
        ({"shape": [6]}, r"'w': expected shape \[2, 3\], got \[6\]"),
        ({"offset": 4}, "'w': expected whole elements of 4 bytes within 24, got bytes 4 to 28"),
        ({"size": 2**60}, "bytes of payload as the parts say, got 24"),
    ],
)
def test_a_part_that_contradicts_its_destination_is_refused(
    change: dict[str, object], message: str
) -> None:
    """A wrong part names the variable, what was expected and what came."""
    part = Part(
        **{"name": "w", "dtype": "float32", "shape": [2, 3], "offset": 0, "size": 24, **change}
    )  # type: ignore[arg-type]
    with pytest.raises(CorruptFrame, match=message):
        frames.scatter(Frame(kind=VALUE, parts=[part]), bytes(24), lambda _: torch.zeros(2, 3))


near = st.integers(0, 26) | st.sampled_from([2**60, 2**63, 2**64 - 1])


@given(
    st.lists(
        st.builds(
            Part,
            name=st.just("w"),
            dtype=st.sampled_from(["float32"] * 9 + ["int32", "object", ""]),
            shape=st.sampled_from([(2, 3)] * 9 + [(6,), (3, 2), (2**62, 3)]),
            offset=near,
            size=near,
        ),
        max_size=3,
    ),
    st.integers(0, 30) | st.none(),
)
def test_a_frame_is_written_whole_or_not_at_all(parts: list[Part], payload: int | None) -> None:
    """Each part is of its destination, whole elements within it, and all are the payload; or a
    CorruptFrame.
    """
    total = sum(part.size for part in parts)
    size = min(total, 100) if payload is None else payload
    fits = size == total and all(
        (part.dtype, [*part.shape]) == ("float32", [2, 3])
        and part.offset % 4 == part.size % 4 == 0
        and part.offset + part.size <= 24
        for part in parts
    )
    target, expected = torch.zeros(2, 3), bytearray(24)
    source = bytes(range(1, size + 1))
    try:
        frames.scatter(Frame(kind=VALUE, parts=parts), source, lambda _: target)
    except CorruptFrame:
        assert not fits
    else:
        assert fits
        at = 0
        for part in parts:
            expected[part.offset : part.offset + part.size] = source[at : at + part.size]
            at += part.size
    assert bytes(frames.buffer_of(target)) == expected


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


def test_fields_may_follow_the_payload() -> None:
    """Other serialisers may order fields as they like; of two payloads the last counts, as protobuf
    says.
    """
    first = frames.encode_header(Frame(kind=VALUE), 3) + b"abc"
    message = first + Frame(step=9).SerializeToString() + frames.encode_header(Frame(), 2) + b"xy"
    header, payload = frames.decode(message)

    assert (header, bytes(payload)) == (Frame(kind=VALUE, step=9), b"xy")
    assert Frame.FromString(message).payload == b"xy"


GOOD = frames.encode_header(full_header(), 64) + bytes(range(64))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message that was cut, changed, or continued by another."""
    message = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 3))):
        message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
    whole = bytes(message[: draw(st.integers(0, len(message)))])
    return draw(st.sampled_from([whole, whole + GOOD, GOOD + whole]))


@example(GOOD)
@given(st.binary(max_size=80) | damaged())
def test_a_message_is_what_protobuf_reads_or_a_corrupt_frame(message: bytes) -> None:
    """Whatever bytes come; of a payload nothing is copied."""
    try:
        header, payload = frames.decode(message)
    except CorruptFrame as error:
        assert str(error).startswith("expected a ")
        # of what protobuf takes, only groups, which no message of ours has, are refused
        assert message != GOOD
        return
    whole = Frame.FromString(message)
    assert whole.payload == bytes(payload)
    assert payload.obj is message
    whole.ClearField("payload")
    assert whole == header


@given(st.integers(0, 300) | st.sampled_from([127, 128, 16383, 16384, 3_000_000]))
def test_messages_are_the_generated_classes_own(size: int) -> None:
    """Our bytes are what protobuf writes and reads, for payloads of any size."""
    ours = frames.encode_header(full_header(), size) + bytes(size)
    whole = Frame.FromString(ours)

    assert whole.payload == bytes(size) and whole.SerializeToString() == ours


def test_a_long_header_is_refused_unread() -> None:
    """Parsed it may take forty times as much."""
    with pytest.raises(CorruptFrame, match="expected a header of up to 4194304 bytes, got 4194305"):
        frames.parse_header(bytes(frames.HEADER_BYTES + 1))


def test_a_header_that_came_beside_its_payload_holds_none() -> None:
    """A transport that moves the payload apart refuses a second one inside the header."""
    with pytest.raises(
        CorruptFrame, match="expected a header without a payload, got one of 3 bytes"
    ):
        frames.parse_header(Frame(payload=b"abc").SerializeToString())
