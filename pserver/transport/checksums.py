"""Checksums of data that travel without TLS: XXH3 of 64 bits over TCP, CRC32C (RFC 3720, appendix
B.4) over gRPC.

TCP's own checksum has 16 bits, and a proxy, a switch or a network card makes it anew: a change by
these is not detected.

Over TCP both ends are ours, and XXH3 is four times as fast as CRC32C with the processor's own
instruction.  Clients over gRPC are written in any language, which has a library for CRC32C.

[Note: checked messages]  Over gRPC the connecting end asks with the metadata of the call, and the
server answers with its initial metadata whether frames are checked.  Behind each message of a
checked stream, in both directions, stand four bytes: its checksum.  A message of a control call is
alone, so its checksum is in the metadata, in hexadecimal digits: the request's beside the call, the
reply's in the trailing metadata, where the request had one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from crc32c import crc32c
from xxhash import xxh3_64, xxh3_64_intdigest

from pserver.errors import CorruptFrame
from pserver.transport.stream import Buffer

FRAME_CHECKSUM = struct.Struct("<Q")
MESSAGE_CHECKSUM = struct.Struct("<I")
FRAMES = "pserver-checksums"  # metadata: whether the frames of a stream have some
ASKED, ON, OFF, UNASKED = "crc32c", "on", "off", "unasked"
MESSAGE = "pserver-crc32c"  # metadata: the one of a call's message

Metadata = Iterable[tuple[str, str | bytes]]


def checksum(buffers: Sequence[Buffer]) -> int:
    """The checksum over TCP of buffers, one behind another.

    Example:
        >>> checksum([b"ab", b"c"]) == checksum([b"abc"])
        True
    """
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0])
    whole = xxh3_64()
    for buffer in buffers:
        whole.update(buffer)
    return whole.intdigest()


def compare(what: str, got: int, expected: int) -> None:
    """Returns if both are the same.

    Raises:
        CorruptFrame: they are not.
    """
    if got != expected:
        raise CorruptFrame(
            f"expected {what} with the checksum {expected:08x}, got {got:08x}: bits were changed "
            "on the way"
        )


# ---- messages of a stream ----


def sealed(pieces: Sequence[Buffer]) -> bytes:
    """A message of these pieces with its checksum."""
    total = 0
    for piece in pieces:
        total = crc32c(piece, total)
    return b"".join((*pieces, MESSAGE_CHECKSUM.pack(total)))


def opened(message: bytes) -> memoryview:
    """A message without its checksum.

    Raises:
        CorruptFrame: it is another's.
    """
    whole = memoryview(message)
    if len(whole) < MESSAGE_CHECKSUM.size:
        raise CorruptFrame(f"expected a message with a checksum, got {len(whole)} bytes")
    body, behind = whole[: -MESSAGE_CHECKSUM.size], whole[-MESSAGE_CHECKSUM.size :]
    (expected,) = MESSAGE_CHECKSUM.unpack(behind)
    compare("a message", crc32c(body), expected)
    return body


# ---- metadata ----


def value(key: str, metadata: Metadata | None) -> str | None:
    """The value of a key in metadata; None: there is none."""
    found = next((value for name, value in metadata or () if name == key), None)
    return found if found is None or isinstance(found, str) else str(bytes(found), "latin-1")


def of_message(message: bytes) -> tuple[str, str]:
    """The metadata that go with the message of a call."""
    return MESSAGE, f"{crc32c(message):08x}"


def check_message(what: str, message: bytes, metadata: Metadata | None) -> bool:
    """Checks the message of a call.

    Returns:
        Whether it has a checksum.

    Raises:
        CorruptFrame: it has another's.
    """
    expected = value(MESSAGE, metadata)
    if expected is not None and expected != of_message(message)[1]:
        raise CorruptFrame(
            f"expected {what} with the checksum {expected}, got {of_message(message)[1]}: bits "
            "were changed on the way"
        )
    return expected is not None
