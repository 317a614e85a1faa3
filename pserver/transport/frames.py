"""Tensors to frames and back: the only file that touches a buffer.

:func:`frames` turns named tensors into headers and views of the tensors' own memory.
:func:`scatter` checks every part of a header and copies its bytes to their destination.  A
transport that moves one run of bytes per frame uses :func:`encode_header` and :func:`decode`.

[Note: the payload stands behind the header]  Protobuf copies a ``bytes`` field when it serialises
and again when it parses, at a tenth of memory's speed.  So no code sets ``Frame.payload``.  Field
15 is the highest, and a serialiser writes it last: the serialised header, field 15's tag, the
length and the bytes, which we write by hand, are what the generated class would write.  On the way
in we walk over the message's top level, cut field 15 out as a view and parse only the rest.  For a
peer that uses generated classes there is no difference.

Bytes are row-major and little-endian, as on every machine that torch runs on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from pserver.errors import CorruptFrame
from pserver.transport.memory import address_of
from pserver.transport.stream import LANDED, Buffer
from pserver.wire_pb2 import Frame, Kind, Part

# protobuf looks each name of an enum up by a call of Python: here it becomes a plain attribute
for _name, _number in Kind.items():
    setattr(Kind, _name, _number)

CHUNK_BYTES = 2**21
ALONE_BYTES = 2**20  # a tensor of at least this size has frames of its own
# while nothing else leaves, tensors that are added one by one share a frame of up to this size only
EAGER_BYTES = 2**16
NOGIL_BYTES = 2**14  # below, copying takes less time than letting the GIL go
ALIGNMENT = 16  # the widest element (complex128): a cut at a multiple of it splits no element
# of a header that is accepted: parsed it may take forty times as much
HEADER_BYTES = 2**22
MOST_PARTS = 2**12  # of a frame that is packed here
PAYLOAD_TAG = 15 << 3 | 2
_MAX_VARINT_BYTES = 10

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint8,
            torch.uint16,
            torch.uint32,
            torch.uint64,
        ),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        ),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)


# ---- tensors to frames ----


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor as a uint8 tensor of shape [bytes]; shared, not copied.

    Raises:
        ValueError: its bytes are not in one run of main memory in row-major order, or its dtype has
            no name on the wire.
    """
    tensor = tensor.detach()
    if (
        tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise ValueError(f"expected a contiguous CPU tensor, got {_describe(tensor)}")
    if tensor.dtype not in NAMES:
        raise ValueError(f"expected one of the dtypes {', '.join(DTYPES)}, got {_describe(tensor)}")
    # one element may have any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a memoryview of bytes; shared, not copied.

    Raises:
        ValueError: as :func:`flat_bytes`.
    """
    if (
        tensor.dtype in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.numel()
    ):
        # the same memory in a third of the time, for most tensors
        return tensor.detach().numpy().data.cast("B")
    return flat_bytes(tensor).numpy().data


Packed = tuple[Frame, list[Buffer]]  # a header, and the payload's buffers


class Packer:
    """Packs tensors into frames as they are added.  One thread uses it.

    Small tensors wait until they fill a frame of ``shared_bytes``, or until :meth:`flush`.  A
    tensor of that size, or of ``alone_bytes``, has frames of its own, cut at ``chunk_bytes``.  It
    does not wait, so it may overtake small ones.  An empty tensor has one part of size 0.  The
    buffers are views of the tensors.

    A frame costs as much as some 100 KB, so tensors wait for others while frames leave anyway.
    Where none does, waiting would leave the network idle: a frame of ``eager_bytes`` is full then.

    Args:
        chunk_bytes: the largest payload of a frame.
        shared_bytes: the payload of a frame of small tensors.
        alone_bytes: of a tensor with frames of its own.
        busy: whether frames are leaving; None: tensors are added at once.
        eager_bytes: in place of ``shared_bytes`` and ``alone_bytes`` while none leave.

    Raises:
        ValueError: ``chunk_bytes`` is below 16.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        shared_bytes: int = CHUNK_BYTES,
        alone_bytes: int = ALONE_BYTES,
        busy: Callable[[], bool] | None = None,
        eager_bytes: int = EAGER_BYTES,
    ) -> None:
        if chunk_bytes < ALIGNMENT:
            raise ValueError(f"chunk_bytes: expected at least {ALIGNMENT}, got {chunk_bytes}")
        self._chunk = chunk_bytes - chunk_bytes % ALIGNMENT
        self._shared = min(self._chunk, shared_bytes)
        self._alone = min(self._shared, alone_bytes)
        self._busy = busy
        self._eager = min(self._alone, eager_bytes)
        # the frame that small tensors share
        self._header, self._payload, self._filled = Frame(), list[Buffer](), 0

    def add(
        self, kind: Kind, step: int, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Packed]:
        """Adds tensors, by name; yields the frames that are complete with them.

        Raises:
            ValueError: a tensor is none that :func:`flat_bytes` accepts.
        """
        if (self._header.kind, self._header.step) != (kind, step):
            yield from self.flush()
            self._header = Frame(kind=kind, step=step)
        for name, tensor in named_tensors:
            whole = buffer_of(tensor)
            size = whole.nbytes
            shared, alone = self._shared, self._alone
            if self._filled + size >= self._eager and self._busy is not None and not self._busy():
                shared = alone = self._eager
                if self._filled > shared:  # it waited while others left
                    yield from self.flush()
            if size >= alone:
                yield from self._cut(name, tensor, whole)
                continue
            if self._filled + size > shared or len(self._payload) == MOST_PARTS:
                yield from self.flush()
            self._header.parts.add(
                name=name, dtype=NAMES[tensor.dtype], shape=tensor.shape, size=size
            )
            self._payload.append(whole)
            self._filled += size

    def _cut(self, name: str, tensor: Tensor, whole: memoryview) -> Iterator[Packed]:
        kind, step = self._header.kind, self._header.step
        for offset in range(0, whole.nbytes, self._chunk):
            chunk = whole[offset : offset + self._chunk]
            part = Part(
                name=name,
                dtype=NAMES[tensor.dtype],
                shape=tensor.shape,
                offset=offset,
                size=chunk.nbytes,
            )
            yield Frame(kind=kind, step=step, parts=[part]), [chunk]

    def flush(self) -> Iterator[Packed]:
        """The frame of small tensors that still waits, if there is one."""
        header, payload = self._header, self._payload
        self._header, self._payload, self._filled = Frame(kind=header.kind, step=header.step), [], 0
        if header.parts:
            yield header, payload


def frames(
    kind: Kind,
    step: int,
    named_tensors: Iterable[tuple[str, Tensor]],
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Packed]:
    """All the frames of these tensors.  See :class:`Packer`.

    Raises:
        ValueError: ``chunk_bytes`` is below 16, or a tensor is none that :func:`flat_bytes`
            accepts.
    """
    packer = Packer(chunk_bytes)
    yield from packer.add(kind, step, named_tensors)
    yield from packer.flush()


# ---- frames to tensors ----


def scatter(header: Frame, payload: Buffer, destination: Callable[[Part], Tensor]) -> None:
    """Copies every part of a frame to its place in ``destination(part)``, a contiguous CPU tensor
    of the whole variable.

    Every part is checked before the first is copied; nothing is copied where the payload has
    landed.

    Raises:
        CorruptFrame: see :func:`targets`.
    """
    if payload is LANDED:
        return
    source = memoryview(payload)
    spread(source, targets(header, source.nbytes, destination))


def spread(source: memoryview, places: Iterable[memoryview]) -> None:
    """Copies a payload to its places, one behind another."""
    position = 0
    for place in places:
        end = position + place.nbytes
        if place.nbytes < NOGIL_BYTES:
            place[:] = source[position:end]
        else:
            copy_bytes(place, source[position:end])
        position = end


def targets(
    header: Frame, payload_bytes: int, destination: Callable[[Part], Tensor]
) -> list[memoryview]:
    """The memory for the parts of a frame that are not empty: a piece of ``destination(part)``
    each, which may raise any error for an unknown name.

    Raises:
        CorruptFrame: a part's dtype or shape is not its destination's, a part reaches beyond it or
            is cut inside an element, or the sizes do not add up to the payload.
    """
    parts = list(header.parts)
    total = sum([part.size for part in parts])
    if total != payload_bytes:
        name = parts[0].name if parts else ""
        raise CorruptFrame(
            f"{name!r} and what follows: expected {total} bytes of payload as the parts say, got "
            f"{payload_bytes}"
        )
    places = []
    for part in parts:
        whole, size = _checked(part, destination(part)), part.size
        if size:
            places.append(whole if size == whole.nbytes else whole[part.offset :][:size])
    return places


def land(
    header: Frame, payload_bytes: int, destination: Callable[[Part], Tensor]
) -> list[memoryview] | None:
    """The same for :data:`~pserver.transport.stream.Land`: None where a frame does not fit, which
    :func:`scatter` then reports.
    """
    try:
        return targets(header, payload_bytes, destination)
    except Exception:  # whatever it is, it comes again when the payload is there
        return None


def received_bytes(header: Frame, payload: Buffer) -> int:
    """The bytes of a payload, wherever it is."""
    if payload is LANDED:
        return sum([part.size for part in header.parts])
    return memoryview(payload).nbytes


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies one run of bytes to another of the same size; from ``NOGIL_BYTES`` on other threads
    run meanwhile, and what is there already stays.
    """
    if target.nbytes < NOGIL_BYTES:
        target[:] = source
    elif address_of(target) != address_of(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def whole_bytes(part: Part) -> int:
    """Bytes of the whole variable that a part belongs to; 0 for an unknown dtype."""
    dtype = DTYPES.get(part.dtype)
    return 0 if dtype is None else math.prod(part.shape) * dtype.itemsize


def blank(part: Part) -> Tensor:
    """A new tensor, not initialised, of the whole variable that a part belongs to: a destination
    where the plan has none.

    Raises:
        CorruptFrame: no tensor has such a dtype or shape.
    """
    dtype = DTYPES.get(part.dtype)
    if dtype is None:
        raise CorruptFrame(
            f"{part.name!r}: expected one of the dtypes {', '.join(DTYPES)}, got {part.dtype!r}"
        )
    try:
        return torch.empty(list(part.shape), dtype=dtype)
    # a dimension beyond 2**63, or more than memory holds
    except (RuntimeError, TypeError) as error:
        raise CorruptFrame(
            f"{part.name!r}: cannot hold shape {list(part.shape)} of {part.dtype}"
        ) from error


def _checked(part: Part, target: Tensor) -> memoryview:
    """``target``'s bytes, where ``part`` fits them."""
    if DTYPES.get(part.dtype) is not target.dtype:
        raise CorruptFrame(
            f"{part.name!r}: expected dtype {NAMES.get(target.dtype, target.dtype)}, got "
            f"{part.dtype!r}"
        )
    if list(part.shape) != list(target.shape):
        raise CorruptFrame(
            f"{part.name!r}: expected shape {list(target.shape)}, got {list(part.shape)}"
        )
    itemsize, nbytes = target.itemsize, target.nbytes
    if part.offset % itemsize or part.size % itemsize or part.offset + part.size > nbytes:
        raise CorruptFrame(
            f"{part.name!r}: expected whole elements of {itemsize} bytes within {nbytes}, "
            f"got bytes {part.offset} to {part.offset + part.size}"
        )
    return buffer_of(target)


def _describe(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {list(tensor.shape)}, strides {list(tensor.stride())} on "
        f"{tensor.device}"
    )


# ---- headers, for transports ----


def encode_header(header: Frame, payload_bytes: int) -> bytes:
    """The bytes of a message up to its payload's, which follow.

    See [Note: the payload stands behind the header].
    """
    assert not header.payload, "a frame's payload travels beside its header"
    head = header.SerializeToString()
    return head + bytes((PAYLOAD_TAG,)) + _varint(payload_bytes) if payload_bytes else head


def decode(message: Buffer) -> tuple[Frame, memoryview]:
    """A whole message as a header without its payload, and the payload as a view into ``message``.

    Raises:
        CorruptFrame: the bytes are not a ``Frame``.
    """
    data = memoryview(message)
    head, payload, position, kept = b"", data[:0], 0, 0
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        end, body = _field_end(data, tag, position)
        if tag == PAYLOAD_TAG:
            head, payload, kept = head + bytes(data[kept:start]), data[body:end], end
        position = end
    return parse_header(head + bytes(data[kept:])), payload


def parse_header(head: bytes) -> Frame:
    """A header whose payload, if any, came beside it.

    Raises:
        CorruptFrame: the bytes are not a ``Frame``, or hold a payload themselves; or they are more
            than ``HEADER_BYTES``.
    """
    if len(head) > HEADER_BYTES:
        raise CorruptFrame(f"expected a header of up to {HEADER_BYTES} bytes, got {len(head)}")
    try:
        header = Frame.FromString(head)
    except DecodeError as error:
        raise CorruptFrame(
            f"expected a frame, got {len(head)} bytes that are none: {head[:16].hex(' ')}"
        ) from error
    if header.payload:
        raise CorruptFrame(
            f"expected a header without a payload, got one of {len(header.payload)} bytes inside it"
        )
    return header


def _field_end(data: memoryview, tag: int, position: int) -> tuple[int, int]:
    """The end of the field whose tag ends at ``position``, and the begin of its contents."""
    wire_type = tag & 7
    if wire_type == 0:
        end = body = _read_varint(data, position)[1]
    elif wire_type == 2:
        size, body = _read_varint(data, position)
        end = body + size
    elif wire_type in (1, 5):
        end = body = position + (8 if wire_type == 1 else 4)
    else:  # 3 and 4 are groups, which no message of ours has
        raise CorruptFrame(
            f"expected a frame, got wire type {wire_type} at byte {position} of {len(data)}"
        )
    if end > len(data):
        raise CorruptFrame(f"expected a frame of at least {end} bytes, got {len(data)}")
    return end, body


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise CorruptFrame(
        f"expected a frame, got a number without an end at byte {position} of {len(data)}"
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
