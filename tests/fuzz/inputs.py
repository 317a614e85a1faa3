"""Inputs for a fuzzer: frames and calls that are wrong in some way.  The same seed and number give
the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pserver.control.calls import CALLS
from pserver.transport.frames import DTYPES
from pserver.wire_pb2 import Frame, Kind
from tests.support.messages import is_repeated

NUMBERS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
REALS = (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), 0.5)
NAMES = ("w", "b", "mean", "emb", "emb@ids", "emb@rows", "emb@values", "w@elements", "w@values")
TEXTS = ("", "x", "\0", "../../etc/passwd", "/", "s3://b/k", "\u00e9" * 40, "{}", "x" * 5000)
DEEPEST = 3  # messages within messages
KINDS = (*Kind.values(), 99)


@dataclass(frozen=True)
class FrameInput:
    """A frame, or what stands in its place.

    Attributes:
        header, payload: as bytes.
    """

    header: bytes
    payload: bytes

    @property
    def kind(self) -> str:
        """Its kind's name, as far as it has one."""
        kind = self.header[1] if self.header[:1] == b"\x08" and len(self.header) > 1 else -1
        return Kind.Name(kind) if kind in Kind.values() else "other"  # type: ignore[arg-type]


@dataclass(frozen=True)
class CallInput:
    """A control call.

    Attributes:
        name: of the call.
        message: its bytes.
    """

    name: str
    message: bytes


class Inputs:
    """The inputs of one number.

    Args:
        seed, number: which.
        sessions: that are known, right or wrong.
    """

    def __init__(self, seed: int, number: int, sessions: Sequence[str]) -> None:
        self.random = Random(f"{seed} {number}")
        self._sessions = sessions

    # ---- messages ----

    def message(self, message: Message, depth: int = 0) -> Message:
        """Fills some fields of a message with anything."""
        for field in message.DESCRIPTOR.fields:
            if self.random.random() < 0.5 or field.name == "payload":
                continue
            self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        held = getattr(message, field.name)
        repeated = is_repeated(held)
        count = self.random.choice((1, 1, 2, 20)) if repeated else 1
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
            for _ in range(count):
                if value.message_type is None:
                    held[self.value(key)] = self.value(value)
                elif depth < DEEPEST:
                    self.message(held[self.value(key)], depth + 1)
        elif kind is not None:
            for _ in range(count if depth < DEEPEST else 0):
                inner = held.add() if repeated else held
                inner.SetInParent()
                self.message(inner, depth + 1)
        elif repeated:
            held.extend(self.value(field) for _ in range(count))
        else:
            setattr(message, field.name, self.value(field))

    def value(self, field: FieldDescriptor) -> Any:
        """Any value of a plain field."""
        random = self.random
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return random.randbytes(random.choice((0, 1, 16, 300)))
            if field.name == "session":
                return random.choice(self._sessions)
            if field.name == "dtype":
                return random.choice((*DTYPES, "float33", ""))
            return random.choice((*NAMES, *TEXTS, str(random.choice(NUMBERS))))
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return random.choice((*REALS, random.random()))
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return random.choice(KINDS)
        number = random.choice((*NUMBERS, random.randrange(8)))
        if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32):
            number &= 2**32 - 1
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
            return number - 2**32 if number >= 2**31 else number
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
            return number - 2**64 if number >= 2**63 else number
        return number

    def mutated(self, data: bytes) -> bytes:
        """Bytes with a few of them changed, cut out, or put in."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            place = self.random.randrange(len(changed) + 1)
            how = self.random.randrange(4)
            if how == 0 and place < len(changed):
                changed[place] ^= 1 << self.random.randrange(8)
            elif how == 1:
                del changed[place : place + self.random.choice((1, 4, 1000))]
            elif how == 2:
                changed[place:place] = self.random.randbytes(self.random.choice((1, 4, 40)))
            else:
                changed[place : place + 1] = b"\xff" * self.random.choice((1, 5, 10))
        return bytes(changed)

    # ---- frames ----

    def frames(self, sequence: int = 0) -> list[FrameInput]:
        """Some frames, one behind another."""
        made: list[FrameInput] = []
        for _ in range(self.random.choice((1, 1, 2, 4, 8))):
            if made and self.random.random() < 0.1:
                made.append(self.random.choice(made))
            else:
                made.append(self.frame(sequence and sequence + len(made)))
        return made

    def frame(self, sequence: int = 0) -> FrameInput:
        """One frame."""
        random = self.random
        kind = random.choice(KINDS)
        frame = Frame(kind=kind, sequence=sequence)
        if random.random() < 0.5:
            frame = self.message(frame)  # type: ignore[assignment]
            frame.kind, frame.sequence = kind, sequence or frame.sequence
        if random.random() < 0.7:
            frame.step = random.randrange(4)
            del frame.parts[:]
            for _ in range(random.choice((0, 1, 1, 2))):
                self._part(frame)
        if kind in (Kind.PULL, Kind.REFRESH):
            frame.lookup = random.choice((0, 1, 1, 2, random.choice(NUMBERS)))
            if random.random() < 0.3:
                frame.after[random.randrange(3)] = random.choice((0, 1, random.choice(NUMBERS)))
        payload = bytes(min(sum(part.size for part in frame.parts), 2**12))
        header = frame.SerializeToString()
        if random.random() < 0.2:
            header = self.mutated(header)
        elif random.random() < 0.05:
            header = random.randbytes(random.randrange(100))
        if random.random() < 0.1:
            payload = random.randbytes(random.choice((0, 1, 24, 5000)))
        return FrameInput(header, payload)

    def _part(self, frame: Frame) -> None:
        """A part that is right, or nearly."""
        random = self.random
        name, shape, dtype = random.choice(
            (
                ("w", [2, 3], "float32"),
                ("b", [3], "float32"),
                ("mean", [3], "float32"),
                ("emb", [2], "int64"),
                ("emb@ids", [2], "int64"),
                ("emb@rows", [2, 4], "float32"),
                ("emb@values", [2, 4], "float32"),
                ("w@elements", [2], "int64"),
                ("w@values", [2], "float32"),
            )
        )
        size = DTYPES[dtype].itemsize
        for each in shape:
            size *= each
        part = frame.parts.add(name=name, shape=shape, dtype=dtype, size=size)
        if random.random() < 0.3:
            setattr(part, random.choice(("offset", "size")), random.choice(NUMBERS))
        if random.random() < 0.2:
            part.shape[:] = [random.choice(NUMBERS) for _ in range(random.choice((0, 1, 2, 70)))]
        if random.random() < 0.1:
            part.dtype = random.choice((*DTYPES, "float33"))

    # ---- calls ----

    def call(self, without: Sequence[str] = (), often: Sequence[str] = ()) -> CallInput:
        """A control call, of any name but some, and of some more often."""
        names = [name for name in CALLS if name not in without]
        name = self.random.choice([*names, *often, *often])
        message = self.message(CALLS[name][1]()).SerializeToString()
        if self.random.random() < 0.2:
            message = self.mutated(message)
        return CallInput(name, message)
