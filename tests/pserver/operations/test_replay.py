"""Promises of ``pserver replay``: a recorded log, applied to a checkpoint or to what the job began
with, gives what the servers held, to the bit.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pserver import wire_pb2 as wire
from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, PServerError, Refused
from pserver.operations.replay import ReplayedServer, Target, recorded_log, replay
from pserver.service.server import Server
from pserver.telemetry.job_view import notices
from tests.support.recorded_jobs import MODES, RecordedJob, held_by, program_of, same
from tests.support.reloading_jobs import until
from tests.support.threaded_scripts import Script
from tests.support.tiers import RARE
from trainer.job import save_load
from trainer.job.position import Position

RULES = [("async", "sgd"), ("sync", "momentum"), ("async", "momentum"), ("sync", "adagrad")]


def replayed(
    folder: Path, start: Path | None = None, until: int | None = None
) -> tuple[ReplayedServer, str]:
    """The one server, and what was said."""
    said = io.StringIO()
    console = Console(file=said, width=1000)
    (server,) = replay(folder, console, None if start is None else str(start), None, until)
    return server, said.getvalue()


def recorded(path: Path, mode: str = "async", rule: str = "adam") -> RecordedJob:
    return RecordedJob(path / "log", program_of(mode, rule), data_dir=str(path / "data"))


@pytest.mark.parametrize(
    ("mode", "rule"), [*((mode, "adam") for mode in MODES), *(RARE(*each) for each in RULES)]
)
def test_a_replay_gives_what_the_server_held_to_the_bit(
    tmp_path: Path, mode: str, rule: str
) -> None:
    """From the beginning and from a checkpoint in the middle, in every mode: Adam, buffers, what
    scripts write, skipped steps, tables whose rows wait, fade, expire and are evicted.
    """
    job = recorded(tmp_path, mode, rule)
    job.train(4)
    job.save("middle")
    job.shrink(days=40.0)
    job.train(5)
    held, lanes = held_by(job.installed), len(job.installed.lanes)
    counts = [table.counters() for table in job.installed.tables.values()]
    job.end()

    for event in ("expired", "evicted", "shrunk", "refused"):
        assert sum(each[event] for each in counts), event
    server, _ = replayed(tmp_path / "log")
    assert same(held, held_by(server.installed)) == []
    assert server.steps == {0: 9 * lanes, 1: 9 * lanes}
    server, _ = replayed(tmp_path / "log", tmp_path / "data" / "middle")
    assert same(held, held_by(server.installed)) == []
    assert server.steps == {0: 5 * lanes, 1: 5 * lanes}


def test_a_large_table_that_evicts_is_replayed_from_a_checkpoint(tmp_path: Path) -> None:
    """Which of many rows go, a sample decides: it is the same one, wherever rows lie in memory."""
    program = program_of("async", capacity=17_000)
    job = RecordedJob(tmp_path / "log", program, pushed=5000, data_dir=str(tmp_path / "data"))
    job.train(4)
    job.save("middle")
    before = job.installed.tables["waits"].counters()["evicted"]
    job.train(4)
    held, counts = held_by(job.installed), job.installed.tables["waits"].counters()
    job.end()

    assert counts["evicted"] > before + 100 and counts["rows"] == 17_000
    for start in (None, tmp_path / "data" / "middle"):
        server, _ = replayed(tmp_path / "log", start)
        assert same(held, held_by(server.installed)) == []
        assert server.installed.tables["waits"].counters()["evicted"] == counts["evicted"]


@pytest.mark.parametrize(
    "configs", [{}, {"k_steps": 2}, {"k_steps": 2, "outer_optimizer": {"type": "sgd"}}]
)
def test_a_script_saves_while_its_servers_record(
    tmp_path: Path, configs: dict[str, object]
) -> None:
    """A replay from that checkpoint gives what the server held in the end."""
    with Server(ServerConfig(record_log=str(tmp_path / "log"))) as server:
        script = Script([server], 0, trainers=1, a_sync_configs=configs)
        for _ in range(2):
            script.step()
        script.optimizer.flush()
        save_load.write(script.job, str(tmp_path / "saved"), None, False, Position())
        for _ in range(2):
            script.step()
        script.optimizer.flush()
        held = held_by(server.job.installed())
        script.finish()
        assert server.job.end_recording(30.0)

    again, _ = replayed(tmp_path / "log", tmp_path / "saved")
    assert same(held, held_by(again.installed)) == []


def test_what_is_loaded_stands_in_its_place(tmp_path: Path) -> None:
    """A job that goes back to its own checkpoint, and trains on."""
    job = recorded(tmp_path)
    job.train(2)
    job.save("early")
    job.train(2)
    job.load("early")
    job.train(3)
    held = held_by(job.installed)
    job.end()

    server, said = replayed(tmp_path / "log")
    assert same(held, held_by(server.installed)) == []
    assert "14 steps (trainer 0 7, trainer 1 7)" in said


def test_a_replay_stops_at_a_record(tmp_path: Path) -> None:
    """With what the server held then; a checkpoint behind it is refused, and so is a record behind
    the last one.
    """
    job = recorded(tmp_path)
    job.train(3)
    held, last = held_by(job.installed), job.installed.decisions.last
    job.train(1)
    job.save("late")
    job.shrink()
    job.end()

    server, _ = replayed(tmp_path / "log", until=last)
    assert same(held, held_by(server.installed)) == [] and server.record == last
    with pytest.raises(Refused, match=f"record {last} is before it"):
        replayed(tmp_path / "log", tmp_path / "data" / "late", last)
    with pytest.raises(Refused, match="expected a record up to"):
        replayed(tmp_path / "log", until=last + 50)


# ---- logs that are not whole ----


def test_a_full_disk_is_said_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server's status, and by a replay, which gives what was recorded; a checkpoint that was
    saved later is refused.
    """
    job = recorded(tmp_path)
    job.train(2)
    held = held_by(job.installed)
    job.save("early")

    real = os.writev

    def full(descriptor: int, buffers: list[memoryview]) -> int:
        if sum(map(len, buffers)) > 1000:  # a step; the reason still fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers)

    recorder = job.installed.recording.recorder
    assert recorder is not None
    until(lambda: recorder._written == recorder.entries)
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        job.train(1)
        while not recorder.failure:
            assert recorder._thread.is_alive()
    job.train(1)
    job.save("late")
    status = [each.text for each in notices({"a:1": job.job.status(wire.StatusRequest())})]
    job.end()

    assert any("not recorded any more" in line and "No space left" in line for line in status)
    server, said = replayed(tmp_path / "log", tmp_path / "data" / "early")
    assert same(held, held_by(server.installed)) == []
    assert "the server could write no more" in said and "No space left" in said
    with pytest.raises(Refused, match="--record-log"):
        replayed(tmp_path / "log", tmp_path / "data" / "late")


def test_a_killed_servers_log_is_replayed_to_its_last_whole_step(tmp_path: Path) -> None:
    """Cut off anywhere: one line says so, and the values are those of that step."""
    job = recorded(tmp_path)
    job.train(3)
    held, last = held_by(job.installed), job.installed.decisions.last
    job.train(1)
    job.end()
    part = recorded_log(tmp_path / "log").parts[0]
    ends = {p.entry.applied.record: p.end for p in part.places() if p.entry.HasField("applied")}
    part.path.write_bytes(part.path.read_bytes()[: ends[last + 1] - 10])

    server, said = replayed(tmp_path / "log")
    assert same(held, held_by(server.installed)) == []
    assert said.count("in the middle of an entry: the server was killed") == 1


def test_a_damaged_log_is_refused_and_replayed_before_the_damage(tmp_path: Path) -> None:
    """A bit of a step's gradient: the message says up to where the log is whole."""
    job = recorded(tmp_path)
    job.train(2)
    held, last = held_by(job.installed), job.installed.decisions.last
    job.train(2)
    job.end()
    part = recorded_log(tmp_path / "log").parts[0]
    ends = {p.entry.applied.record: p.end for p in part.places() if p.entry.HasField("applied")}
    changed = bytearray(part.path.read_bytes())
    changed[ends[last + 2] - 5] ^= 1
    part.path.write_bytes(bytes(changed))

    with pytest.raises(Refused, match=rf"is damaged; --until {last + 1} applies"):
        replayed(tmp_path / "log")
    with pytest.raises(Refused, match="is damaged"):
        replayed(tmp_path / "log", until=last + 2)
    server, _ = replayed(tmp_path / "log", until=last)
    assert same(held, held_by(server.installed)) == []


def test_a_log_and_a_checkpoint_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Of another run, of another plan, of a job that recorded nothing; and no log at all."""
    jobs = {name: recorded(tmp_path / name) for name in ("one", "two")}
    jobs["three"] = recorded(tmp_path / "three", "sync")
    jobs["none"] = RecordedJob(None, program_of("async"), data_dir=str(tmp_path / "none" / "data"))
    for job in jobs.values():
        job.train(1)
        job.save("saved")
        job.end()

    log = tmp_path / "one" / "log"
    for other, kind, text in (
        ("two", Refused, "of another run"),
        ("three", Refused, "of another run"),
        ("none", Refused, "--record-log"),
        ("nothing", FileNotFoundError, "checkpoint"),
    ):
        with pytest.raises(kind, match=text):
            replayed(log, tmp_path / other / "data" / "saved")
    with pytest.raises(FileNotFoundError, match="files of a recorded log"):
        replayed(tmp_path / "one" / "data")
    shutil.copytree(tmp_path / "two" / "log", tmp_path / "both")
    shutil.copytree(log, tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(Refused, match="expected"):
        replayed(tmp_path / "both")
    server, _ = replayed(tmp_path / "both", tmp_path / "two" / "data" / "saved")
    assert same(held_by(jobs["two"].installed), held_by(server.installed)) == []


def test_a_checkpoint_of_a_replay_is_one_that_fleet_load_reads(tmp_path: Path) -> None:
    """Named as ``fleet.save`` names tensors, whole, with the tables' rows."""
    job = recorded(tmp_path)
    job.train(2)
    held = held_by(job.installed)
    job.end()
    replay(tmp_path / "log", Console(quiet=True), None, Target(str(tmp_path / "to")))

    reader = checkpoint.reading(tmp_path / "to")
    tensors = reader.tensors()
    assert torch.equal(tensors["model/fc.weight"], held["fc.weight"])
    assert torch.equal(tensors["state/exp_avg/fc.weight"], held["fc.weight@exp_avg"])
    assert sorted(reader.tables) == ["emb", "shown", "waits"] and reader.meta["step"] == 2
    with pytest.raises((PServerError, FingerprintMismatch), match="--record-log"):
        replayed(tmp_path / "log", tmp_path / "to")  # it is of no job


def test_a_replay_replaces_nothing_that_it_was_not_told_to(tmp_path: Path) -> None:
    """A checkpoint, or other files, at the target: refused at once, and all stays; --overwrite
    takes the checkpoint's place.  An empty directory is as good as none.
    """
    job = recorded(tmp_path)
    job.train(1)
    job.end()
    log, quiet, to = tmp_path / "log", Console(quiet=True), str(tmp_path / "to")
    (tmp_path / "to").mkdir()
    replay(log, quiet, None, Target(to))
    first = (tmp_path / "to" / "checkpoint.json").read_bytes()
    with pytest.raises(Refused, match="an empty one, and .*/to has a checkpoint: --overwrite"):
        replay(tmp_path / "none", quiet, None, Target(to))
    assert (tmp_path / "to" / "checkpoint.json").read_bytes() == first
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(Refused, match="notes has mine.txt: --overwrite"):
        replay(log, quiet, None, Target(str(tmp_path / "notes")))

    replay(log, quiet, None, Target(to, overwrites=True))
    assert (tmp_path / "to" / "checkpoint.json").read_bytes() != first
    assert checkpoint.reading(to).tensors()
