"""Promises of the thread that writes a recorded log: bounded memory, and never a silent gap."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.job_log.files import EntryPlace, EntryReader
from pserver.job_log_pb2 import Entry, LoadedValues
from pserver.lane import recorder as writing
from pserver.lane.recorded_steps import arrays_of, entry_of_arrays
from pserver.lane.recorder import Recorder
from pserver.membership.lifecycle import EventLog, Events


@pytest.fixture
def events() -> Events:
    return Events()


def recorder(path: Path, events: Events, most_bytes: int = 2**20) -> Recorder:
    return Recorder(str(path / "log"), 0, EventLog(writing.logging.getLogger(), events), most_bytes)


def add(to: Recorder, value: float, count: int = 100) -> None:
    named = {"w": torch.full((count,), value)}
    if to.make_room():
        to.append(entry_of_arrays(Entry(values=LoadedValues()), named))


def read(path: Path) -> list[EntryPlace]:
    with path.open("rb") as file:
        return list(EntryReader(path.name, file.read, Entry).entries())


def values(places: list[EntryPlace]) -> list[float]:
    return [
        float(tensor[0]) for place in places for _, tensor in arrays_of(place.entry, place.payload)
    ]


def test_all_is_written_in_order_and_the_end_is_said(tmp_path: Path, events: Events) -> None:
    """A file that only its owner reads; a tensor that changes later is in it as it was."""
    own = recorder(tmp_path, events)
    tensor = torch.zeros(2**17)
    for step in range(5):
        tensor.fill_(step)
        assert own.make_room()
        own.append(entry_of_arrays(Entry(values=LoadedValues()), {"w": tensor}))
    own.close()
    add(own, 9.0)

    assert own.wait(30.0) and own.entries == 6 and not own.failure
    found = read(own.path)
    assert values(found) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found[-1].entry.closing.failure == ""
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o600


def test_steps_wait_where_the_disk_is_slower(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that are not written take a bounded room; nothing is left out."""
    goes_on, real = threading.Event(), os.writev

    def slow(*arguments: Any) -> int:
        assert goes_on.wait(30.0)
        return real(*arguments)

    monkeypatch.setattr(writing.os, "writev", slow)
    own = recorder(tmp_path, events, most_bytes=3000)
    done = threading.Event()

    def steps() -> None:
        for step in range(50):
            add(own, step)
        done.set()

    thread = threading.Thread(target=steps)
    thread.start()
    assert not done.wait(0.3)
    assert own._waiting <= 3000 + 600
    goes_on.set()
    thread.join(30.0)
    own.close()
    assert own.wait(30.0)
    assert values(read(own.path)) == [float(step) for step in range(50)]


@pytest.mark.parametrize("room", [0, 5, 700, 1500])
def test_a_full_disk_ends_the_recording_and_not_the_job(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """An error says so once; the file has whole entries, and its last one says why it ends; who
    waits for room goes on.
    """
    real, left = os.writev, room

    def full(descriptor: int, buffers: Any) -> int:
        nonlocal left
        if left <= 0:
            left = 2000  # the torn entry is cut off
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, bytes(buffers[0])[:left])
        left -= written
        return written

    monkeypatch.setattr(writing.os, "writev", full)
    own = recorder(tmp_path, events, most_bytes=1000)
    for step in range(50):
        add(own, step)
    own.close()

    assert own.wait(30.0) and "No space left on device" in own.failure
    assert [event.kind for event in events.all()] == ["unrecorded"]
    assert "the job goes on" in events.all()[0].text
    monkeypatch.setattr(writing.os, "writev", real)
    found = read(own.path)
    assert values(found) == [float(step) for step in range(len(found) - 1)]
    assert "No space left" in found[-1].entry.closing.failure


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, events: Events) -> None:
    """Nothing waits for it."""
    (tmp_path / "log").write_text("a file")
    own = recorder(tmp_path, events)
    add(own, 1.0)
    own.close()

    assert own.wait(30.0) and own.failure
    assert [event.kind for event in events.all()] == ["unrecorded"]
