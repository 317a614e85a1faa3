"""Promises of a recorded log's form: what was written is read, and nothing else is."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.job_log.files import HEAD_BYTES, MAGIC, Damaged, EntryPlace, EntryReader, head_of
from pserver.job_log_pb2 import Closing, Entry, ShrunkTable

PAYLOADS = (b"", b"abc", b"x" * 5000)


def entry(number: int, payload: bytes = b"") -> bytes:
    message = Entry(shrunk=ShrunkTable(table=f"t{number}", days=number)).SerializeToString()
    return head_of(number, message, [memoryview(payload)]) + message + payload


def file_of(*entries: bytes) -> bytes:
    return MAGIC + b"".join(entries)


def read(data: bytes) -> tuple[list[EntryPlace], bool]:
    reader = EntryReader("server-0.log", io.BytesIO(data).read, Entry)
    return list(reader.entries()), reader.torn


WHOLE = file_of(*(entry(number + 1, payload) for number, payload in enumerate(PAYLOADS)))


def test_entries_come_back_as_they_were() -> None:
    """In their order, each with the bytes of its arrays and where it ends."""
    found, torn = read(WHOLE)

    assert [place.entry.shrunk.table for place in found] == ["t1", "t2", "t3"]
    assert [bytes(place.payload) for place in found] == list(PAYLOADS)
    assert [place.number for place in found] == [1, 2, 3]
    assert found[-1].end == len(WHOLE) and not torn


def test_a_payload_in_pieces_is_one_run_of_bytes() -> None:
    """The checksum does not see where a piece ends."""
    message = Entry(closing=Closing()).SerializeToString()
    pieces = [memoryview(b"ab"), memoryview(b""), memoryview(b"c")]

    assert head_of(1, message, pieces) == head_of(1, message, [memoryview(b"abc")])


@given(st.integers(len(MAGIC), len(WHOLE) - 1))
def test_a_torn_end_leaves_what_stands_before_it(cut: int) -> None:
    """Wherever a killed process has stopped to write."""
    found, torn = read(WHOLE[:cut])
    ends = [len(MAGIC), *(place.end for place in read(WHOLE)[0])]

    assert len(found) == sum(end <= cut for end in ends) - 1
    assert torn == (cut not in ends)


@given(st.integers(0, 199) | st.integers(0, len(WHOLE) - 1), st.integers(0, 7))
def test_a_changed_bit_is_damage(place: int, bit: int) -> None:
    """In the magic, a head, a message or an array: nothing at or behind it is read."""
    changed = bytearray(WHOLE)
    changed[place] ^= 1 << bit
    reader, ends = EntryReader("server-0.log", io.BytesIO(bytes(changed)).read, Entry), [0]
    with pytest.raises(Damaged, match=r"server-0\.log"):
        ends.extend(each.end for each in reader.entries())
    assert ends[-1] <= place


@pytest.mark.parametrize("order", [(1, 3), (2,), (1, 1), (1, 2, 4)])
def test_a_gap_is_damage(order: tuple[int, ...]) -> None:
    """An entry that is missing, or comes twice."""
    with pytest.raises(Damaged, match="entries are missing"):
        read(file_of(*map(entry, order)))


def test_a_wrong_length_takes_no_memory() -> None:
    """A head says so itself; one that lies about its length, with a right checksum, is torn."""
    whole = entry(1, b"x" * 100)
    found, torn = read(file_of(whole[: HEAD_BYTES + 10]))

    assert found == [] and torn
    assert read(MAGIC) == ([], False)
    assert read(MAGIC[:5]) == ([], True)
