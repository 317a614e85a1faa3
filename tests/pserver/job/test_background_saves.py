"""Promises of saves that are written while the job goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.errors import Busy, Refused
from pserver.job import background_saves, job_files
from pserver.job.background_saves import BackgroundSaves, SaveProgress
from pserver.job.job_files import Saving
from pserver.membership.lifecycle import EventLog, Events
from pserver.storage import plain_file
from tests.support.held_servers import MEMBERS, plan, read, server, train

SECONDS = 20.0


def begun(of: Any, path: Path, base: Path | None = None) -> Saving:
    saving = Saving(str(path), of, MEMBERS, "" if base is None else str(base), continues=True)
    saving.cut()
    return saving


@pytest.mark.parametrize("memory_bytes", [None, 20_000], ids=["in memory", "in two tiers"])
def test_a_save_is_of_the_moment_in_which_it_began(
    tmp_path: Path, memory_bytes: int | None
) -> None:
    """Whatever is trained before it is written: rows, what waits, dense values and versions."""
    of = plan(memory_bytes=memory_bytes)
    first, second = server(of, tmp_path / "a", 5.0), server(of, tmp_path / "b")
    train(first, 6)
    before = read(first)
    saving = begun(first, tmp_path / "saved")
    train(first, 6, seed=3)
    first.slices.held["w.block0"].fill_(9.0)
    first.lanes[0].version = 12
    assert saving.write() > 0
    job_files.load(str(tmp_path / "saved"), second, MEMBERS)

    assert torch.equal(read(second), before)
    assert second.slices.held["w.block0"].tolist() == [5.0, 5.0] and second.lanes[0].version == 4


def test_a_shrink_does_not_wait_for_a_save_behind_it(tmp_path: Path) -> None:
    """One that is ready, and whose place in the job's log is behind that of the shrink; it waits
    for one that is being written.
    """
    held = server(plan(), tmp_path / "a")
    train(held, 6)
    saving = Saving(str(tmp_path / "saved"), held, MEMBERS, continues=True)
    held.quiesce.await_cut(0.0)
    with pytest.raises(Busy, match="a save is being written here"):
        Saving(str(tmp_path / "other"), held, MEMBERS)
    saving.cut()
    with pytest.raises(Busy, match="a save is being written here"):
        held.quiesce.await_cut(0.0)
    assert saving.write() > 0

    held.quiesce.await_cut(0.0)


def test_a_chain_of_saves_has_what_the_last_one_saw(tmp_path: Path) -> None:
    """A save with a base has only rows that changed since, and is loaded with those before it."""
    first, second = server(plan(), tmp_path / "a"), server(plan(), tmp_path / "b")
    sizes = []
    for number in range(4):
        train(first, 1 + 5 * (not number), seed=number)
        base = tmp_path / f"saved-{number - 1}" if number else None
        saving = begun(first, tmp_path / f"saved-{number}", base)
        before = read(first)
        train(first, 1, seed=number + 10)
        sizes.append(saving.write())
    job_files.load(str(tmp_path / "saved-3"), second, MEMBERS, str(tmp_path))

    assert torch.equal(read(second), before)
    assert max(sizes[1:]) < 0.8 * sizes[0]


def marked(of: Any, saved: Path) -> None:
    of.tables["emb"].mark_saved()


def loaded(of: Any, saved: Path) -> None:
    job_files.load(str(saved), of, MEMBERS)


def replaced(of: Any, saved: Path) -> None:
    job_files.save(str(saved), of, MEMBERS)


@pytest.mark.parametrize("spoils", [marked, loaded, replaced])
def test_changes_that_are_not_known_are_not_saved_as_a_delta(
    tmp_path: Path, spoils: Callable[[Any, Path], None]
) -> None:
    """Where another has counted rows as saved, or the base is gone: a sentence says to save all,
    which is possible.
    """
    first = server(plan(), tmp_path)
    train(first, 2)
    begun(first, tmp_path / "saved").write()
    train(first, 1)
    spoils(first, tmp_path / "saved")
    with pytest.raises(Refused):
        begun(first, tmp_path / "next", tmp_path / "saved")
    begun(first, tmp_path / "next").write()
    train(first, 1)
    with pytest.raises(Refused, match="base: expected the last save"):
        begun(first, tmp_path / "more", tmp_path / "saved")

    assert begun(first, tmp_path / "more", tmp_path / "next").write() > 0


def test_a_delta_does_not_continue_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are nowhere.  What was saved before is whole, and the next save may be of all."""
    first, second = server(plan(), tmp_path / "a"), server(plan(), tmp_path / "b")
    train(first, 2)
    begun(first, tmp_path / "saved").write()
    before = read(first)
    train(first, 2, seed=4)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(plain_file, "write_bytes", full)
        with pytest.raises(Refused, match="cannot save to .*No space left"):
            begun(first, tmp_path / "saved", tmp_path / "saved").write()
    with pytest.raises(Refused, match="expected the last save that was written here, none"):
        begun(first, tmp_path / "saved", tmp_path / "saved")
    job_files.load(str(tmp_path / "saved"), second, MEMBERS)
    now = read(first)
    begun(first, tmp_path / "saved").write()
    job_files.load(str(tmp_path / "saved"), first, MEMBERS)

    assert torch.equal(read(second), before) and torch.equal(read(first), now)


def test_a_load_and_a_second_save_wait_for_one_that_is_written(tmp_path: Path) -> None:
    """Or say that they cannot: a load would have the save copy all that it replaces."""
    first = server(plan(), tmp_path)
    train(first, 2)
    job_files.save(str(tmp_path / "old"), first, MEMBERS)
    saving = begun(first, tmp_path / "saved")
    with pytest.raises(Busy, match="a save is being written here"):
        begun(first, tmp_path / "other")
    with pytest.raises(Busy, match="a save is being written here"):
        first.quiesce.await_cut(0.0)
    waits = threading.Thread(target=loaded, args=(first, tmp_path / "old"))
    waits.start()
    saving.write()
    waits.join(SECONDS)

    assert not waits.is_alive()
    assert begun(first, tmp_path / "other").write() > 0


class SlowSaving:
    """A save that is written when a test says so."""

    pause_seconds, identity = 0.25, "1f"

    def __init__(self, failure: Exception | None = None) -> None:
        self.goes_on, self.failure = threading.Event(), failure

    def write(self, wrote: Callable[[int], None]) -> int:
        wrote(40)
        assert self.goes_on.wait(SECONDS)
        if self.failure is not None:
            raise self.failure
        return 100

    def close(self) -> None: ...


class Saves:
    """A server's saves, and what has come of them."""

    def __init__(self) -> None:
        self.events, self.begun = Events(), 0
        log = EventLog(logging.getLogger("test"), self.events)
        self.saves = BackgroundSaves(threading.Condition(threading.RLock()), log)
        self.took: list[float] = []

    def begin(self, number: int, saving: Any, session: str = "s") -> SaveProgress:
        def begin() -> Any:
            self.begun += 1
            return saving

        return self.saves.begin(session, number, "/data/x", begin, self.took.append)


@pytest.fixture
def held() -> Iterator[Saves]:
    yield Saves()


def test_a_repeated_call_begins_nothing_and_tells_how_far_it_is(held: Saves) -> None:
    """Until it is done, and then that; a lower number and none are refused."""
    saving = SlowSaving()
    first = held.begin(1, saving)
    again = held.begin(1, SlowSaving())
    with pytest.raises(Refused, match="expected the number of a new save"):
        held.begin(0, SlowSaving())
    assert held.saves.under_way and not held.saves.wait(0.0)
    saving.goes_on.set()
    assert held.saves.wait(SECONDS)
    after = held.begin(1, SlowSaving())

    assert held.begun == 1 and (first.done, again.done, after.done) == (False, False, True)
    assert after.bytes == held.saves.bytes_written == 100 and after.pause_seconds == 0.25
    assert held.took == [after.seconds] and held.saves.failed == 0
    saving = SlowSaving()
    held.begin(3, saving)
    with pytest.raises(Refused, match="expected the number of a new save"):
        held.begin(2, SlowSaving())
    saving.goes_on.set()
    assert held.saves.wait(SECONDS) and held.begin(1, saving, "another").number == 1
    assert held.saves.wait(SECONDS) and held.begun == 3


def test_a_save_that_does_not_begin_makes_others_wait_for_a_while(
    held: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that other servers are not ready for, as they were never asked: then it is said."""
    monkeypatch.setattr(background_saves, "BEGIN_SECONDS", 0.05)
    begins, goes_on = threading.Event(), threading.Event()

    def wait() -> Any:
        begins.set()
        assert goes_on.wait(SECONDS)
        raise Refused("withdrawn")

    args = "s", 1, "/data/x", wait, held.took.append
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(held.saves.begin, *args)
        assert begins.wait(SECONDS)
        with pytest.raises(Busy, match="waits for the other servers"):
            held.begin(2, SlowSaving())
        goes_on.set()
        with pytest.raises(Refused, match="withdrawn"):
            first.result(SECONDS)
    saving = SlowSaving()
    saving.goes_on.set()
    assert held.begin(2, saving).number == 2 and held.saves.wait(SECONDS)


@pytest.mark.parametrize("failure", [Refused("cannot save: disk"), MemoryError("no room")])
def test_a_save_that_fails_is_told_and_logged(
    held: Saves, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one begins all the same."""
    saving = SlowSaving(failure)
    saving.goes_on.set()
    with caplog.at_level(logging.ERROR):
        held.begin(1, saving)
        assert held.saves.wait(SECONDS)
    told = held.begin(1, SlowSaving())

    assert told.done and str(failure) in told.failure and not held.took
    assert held.saves.failed == 1 and "a save has failed" in caplog.text
    assert [event.kind for event in held.events.all()] == ["unsaved"]
    saving = SlowSaving()
    saving.goes_on.set()
    assert held.begin(2, saving).number == 2 and held.saves.wait(SECONDS)
