"""The hash of :mod:`~pserver.table.string_ids` for a whole column of strings: compiled by numba,
without the GIL.

It is XXH3 with 64 bits, the seed 0 and the default secret.  The kernel hashes strings of at most
240 bytes, as the format's description says for each range of lengths; a longer one is rare, and
xxHash's own library hashes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from pserver.table.kernels import Array, folded_product, kernel, load, load_half

LONGEST = 240  # bytes that the kernel hashes
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff"
        "7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9"
        "deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0"
        "fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428af"
        "d7fbcabb4b407e"
    ),
    np.uint8,
)
# the secret's words of 64 bits, by the offsets at which they begin
WORDS = np.array([SECRET[at : at + 8].view("<u8")[0] for at in range(145)], np.uint64)
FIRST, SECOND, THIRD = (
    np.uint64(0x9E3779B185EBCA87),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)
LAST, MIDDLE = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
LOW = np.uint64(2**32 - 1)


@kernel
def swapped(word: Any) -> Any:
    """A uint64 with its bytes in the other order."""
    word = (word >> np.uint64(32)) | (word << np.uint64(32))
    pairs, bytes_ = np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF)
    word = ((word >> np.uint64(16)) & pairs) | ((word & pairs) << np.uint64(16))
    return ((word >> np.uint64(8)) & bytes_) | ((word & bytes_) << np.uint64(8))


@kernel
def avalanche(word: Any) -> Any:
    """The last mixing of strings of more than 8 bytes."""
    word = (word ^ (word >> np.uint64(37))) * LAST
    return word ^ (word >> np.uint64(32))


@kernel
def short_avalanche(word: Any) -> Any:
    """The last mixing of strings of at most 3 bytes."""
    word = (word ^ (word >> np.uint64(33))) * SECOND
    word = (word ^ (word >> np.uint64(29))) * THIRD
    return word ^ (word >> np.uint64(32))


@kernel
def mixed(address: Any, at: Any) -> Any:
    """Sixteen bytes mixed with the secret from an offset on."""
    first = load(address) ^ WORDS[at]
    return folded_product(first, load(address + 8) ^ WORDS[at + 8])


@kernel
def hash_to_8(text: Array, begin: Any, size: Any) -> Any:
    """The hash of at most 8 bytes."""
    if not size:
        return short_avalanche(WORDS[56] ^ WORDS[64])
    if size < 4:
        first, middle = np.uint64(text[begin]), np.uint64(text[begin + size // 2])
        last = np.uint64(text[begin + size - 1])
        word = (first << np.uint64(16)) | (middle << np.uint64(24)) | last
        word |= np.uint64(size) << np.uint64(8)
        return short_avalanche(word ^ ((WORDS[0] & LOW) ^ (WORDS[0] >> np.uint64(32))))
    address = text.ctypes.data + begin
    first, last = load_half(address), load_half(address + size - 4)
    word = (last + (first << np.uint64(32))) ^ (WORDS[8] ^ WORDS[16])
    word ^= ((word << np.uint64(49)) | (word >> np.uint64(15))) ^ (
        (word << np.uint64(24)) | (word >> np.uint64(40))
    )
    word *= MIDDLE
    word ^= (word >> np.uint64(35)) + np.uint64(size)
    word *= MIDDLE
    return word ^ (word >> np.uint64(28))


@kernel
def hash_to_128(address: Any, size: Any) -> Any:
    """The hash of 9 to 128 bytes."""
    end = address + size
    if size <= 16:
        low = load(address) ^ (WORDS[24] ^ WORDS[32])
        high = load(end - 8) ^ (WORDS[40] ^ WORDS[48])
        return avalanche(np.uint64(size) + swapped(low) + high + folded_product(low, high))
    found = np.uint64(size) * FIRST
    for place in range((size - 1) // 32, -1, -1):
        found += mixed(address + 16 * place, 32 * place)
        found += mixed(end - 16 * (place + 1), 32 * place + 16)
    return avalanche(found)


@kernel
def hash_to_240(address: Any, size: Any) -> Any:
    """The hash of 129 to 240 bytes."""
    found = np.uint64(size) * FIRST
    for place in range(8):
        found += mixed(address + 16 * place, 16 * place)
    found = avalanche(found)
    for place in range(8, size // 16):
        found += mixed(address + 16 * place, 16 * (place - 8) + 3)
    return avalanche(found + mixed(address + size - 16, 119))


@kernel
def hash_of(text: Array, begin: Any, size: Any) -> Any:
    """The hash of the at most ``LONGEST`` bytes of ``text`` from ``begin`` on."""
    if size <= 8:
        return np.int64(hash_to_8(text, begin, size))
    if size <= 128:
        return np.int64(hash_to_128(text.ctypes.data + begin, size))
    return np.int64(hash_to_240(text.ctypes.data + begin, size))


@kernel
def hash_column(text: Array, ends: Array, out: Array) -> int:
    """Hashes strings into ``out``; see :func:`hashed`.

    Returns:
        The number of strings that are too long for it; their places in ``out`` are not written.
    """
    long = 0
    for row in range(out.size):
        begin = np.int64(ends[row])
        size = np.int64(ends[row + 1]) - begin
        if size <= LONGEST:
            out[row] = hash_of(text, begin, size)
        else:
            long += 1
    return long


def hash_long(text: Array, ends: Array, out: Array) -> None:
    """Hashes the strings that :func:`hash_column` leaves out."""
    for row in np.flatnonzero(np.diff(ends) > LONGEST):
        digest = xxhash.xxh3_64_intdigest(text[ends[row] : ends[row + 1]].tobytes())
        out[row] = np.uint64(digest).view(np.int64)


def hashed(text: Array, ends: Array) -> Array:
    """int64 [strings]: the ids that ``string_ids`` gives to the strings of a column.

    Args:
        text: uint8 [bytes]: the strings, side by side.
        ends: int32 or int64 [strings + 1]; string i is ``text[ends[i] : ends[i + 1]]``.
    """
    out = np.empty(len(ends) - 1, np.int64)
    if hash_column(text, ends, out):
        hash_long(text, ends, out)
    return out
