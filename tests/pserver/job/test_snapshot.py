"""Readers beside an update."""

from __future__ import annotations

import threading

import torch

from pserver.lane.values import Snapshot

SECONDS = 10.0


def test_a_reader_does_not_wait_for_an_update_and_sees_none_of_it() -> None:
    """Where the slice has been read since the update before: while half of this one has been done,
    readers get the slice as it was; afterwards, as it is.
    """
    value = torch.zeros(4)
    snapshot = Snapshot(value)
    snapshot.read()
    half, read = threading.Event(), threading.Event()

    def update() -> None:
        with snapshot:
            value[:2] = 1
            half.set()
            assert read.wait(SECONDS)
            value[2:] = 1

    thread = threading.Thread(target=update)
    thread.start()
    assert half.wait(SECONDS)
    before = snapshot.read()
    read.set()
    thread.join(SECONDS)

    assert torch.equal(before, torch.zeros(4)) and torch.equal(snapshot.read(), torch.ones(4))


def test_a_first_reader_waits_for_the_update_that_runs() -> None:
    """Where nobody has read since the update before, nothing is copied, and nobody sees a half."""
    value = torch.zeros(4)
    snapshot = Snapshot(value)
    seen: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: seen.append(snapshot.read()))
    with snapshot:
        value[:2] = 1
        thread.start()
        assert not seen
        value[2:] = 1
    thread.join(SECONDS)

    assert torch.equal(seen[0], torch.ones(4))


def test_readers_between_two_updates_share_one_copy() -> None:
    """And one that somebody still holds is never written to."""
    value = torch.zeros(4)
    snapshot = Snapshot(value)
    one, other = snapshot.read(), snapshot.read()
    with snapshot:
        value.add_(1)
    later = snapshot.read()

    assert one is other and one.data_ptr() != value.data_ptr()
    assert torch.equal(one, torch.zeros(4)) and torch.equal(later, torch.ones(4))


def test_what_was_loaded_is_read() -> None:
    """A copy from before a load is forgotten."""
    value = torch.zeros(4)
    snapshot = Snapshot(value)
    snapshot.read()
    value.fill_(2)
    snapshot.discard()

    assert torch.equal(snapshot.read(), torch.full((4,), 2.0))
