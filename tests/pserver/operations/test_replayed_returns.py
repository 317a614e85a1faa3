"""Promises of ``pserver replay`` about a job of which a server was lost, and came back while the
job went on: of that server two files tell, one behind the other.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pserver.errors import Refused
from pserver.operations.replay import RecordedPart, recorded_log, replay
from pserver.wire_pb2 import LeaveRequest, StatusRequest
from tests.support.job_frames import DEADLINE
from tests.support.reloading_jobs import World, until

Held = dict[str, torch.Tensor]


class Story:
    """A job with momentum, one of whose servers is lost and comes back.

    Attributes:
        held: by moment, what both servers held.
        records: by moment, the last record.
    """

    def __init__(self, path: Path, victim: int) -> None:
        self.path, self.victim = path, victim
        self.world = World(
            momentum=0.9, record_log=str(path / "log"), write_ahead_log=str(path / "ahead")
        )
        self.steps = [0, 0]
        self.held: dict[str, list[Held]] = {}
        self.records: dict[str, int] = {}

    def step(self, count: int) -> None:
        """Both trainers take so many steps."""
        for _ in range(count):
            for number in (0, 1):
                self.steps[number] += 1
                self.world.step(number, self.steps[number])

    def note(self, moment: str) -> None:
        """What both servers hold, and as of which record."""
        jobs = [each.job.installed() for each in self.world.servers]
        self.held[moment] = [
            {name: each.clone() for name, each in job.slices.tensors()} for job in jobs
        ]
        self.records[moment] = max(job.decisions.last for job in jobs)

    def save(self, name: str) -> Path:
        """A checkpoint of which both servers have written their parts."""
        for server in (0, 1):
            self.world.save(self.path / name, server)
        return self.path / name

    def return_from(self, save: Path) -> None:
        """The server is lost, and comes back."""
        self.world.lose(self.victim)
        self.world.again(str(save / f"server-{self.victim}"), self.victim)
        for number in (0, 1):
            self.world.rejoin(number, self.victim)

    def end(self) -> None:
        """All is written that was recorded."""
        for each in self.world.started:
            assert each.job.end_recording(DEADLINE)
        self.world.end()

    def replayed(
        self, until: int | None = None, start: Path | None = None
    ) -> tuple[list[Held], str]:
        """What both servers held, and what was said."""
        said = io.StringIO()
        console = Console(file=said, width=1000)
        begin = None if start is None else str(start)
        servers = replay(self.path / "log", console, begin, None, until)
        return [dict(each.installed.slices.tensors()) for each in servers], said.getvalue()

    def chain(self) -> list[RecordedPart]:
        return list(recorded_log(self.path / "log").chains[self.victim])


def check_same(mine: list[Held], theirs: list[Held]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys() and len(one) == 2  # the slice, and its velocity
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.fixture(params=[0, 1], ids=["server 0", "server 1"])
def story(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Story]:
    made = Story(tmp_path, request.param)
    yield made
    made.world.end()


def test_a_server_that_has_come_back_is_replayed_to_the_bit(story: Story) -> None:
    """What it held in the end, what it held before it was lost, and what it held when it was back;
    and from checkpoints before and behind that.
    """
    story.step(2)
    story.note("early")
    early = story.save("early")
    story.step(3)
    story.note("lost")
    story.return_from(early)
    story.note("back")
    back = story.save("back")
    story.step(2)
    story.note("late")
    late = story.save("late")
    story.step(1)
    story.note("end")
    story.end()

    for start in (None, early, back, late):
        found, said = story.replayed(start=start)
        check_same(found, story.held["end"])
        assert f"server {story.victim} was lost after record" in said
    for moment, start in (("early", None), ("late", None), ("late", early), ("late", late)):
        check_same(story.replayed(story.records[moment], start)[0], story.held[moment])
    # it came back after the very record after which it was lost
    assert story.records["back"] == story.records["lost"]
    check_same(story.replayed(story.records["lost"])[0], story.held["lost"])
    check_same(story.replayed(story.records["lost"], back)[0], story.held["back"])
    with pytest.raises(Refused, match="is before it"):
        story.replayed(story.records["lost"] - 1, late)
    with pytest.raises(Refused, match="is before it"):
        story.replayed(story.records["lost"] - 1, back)


def test_steps_that_were_not_written_before_the_loss_are_lost_there_alone(story: Story) -> None:
    """A file that ends anywhere, as that of a killed server does; what came later is whole."""
    story.step(2)
    early = story.save("early")
    story.step(3)
    story.return_from(early)
    story.step(2)
    story.note("end")
    story.end()
    first, second = story.chain()
    ends = [p.end for p in first.places() if p.entry.HasField("applied")]
    content = first.path.read_bytes()

    for cut in (ends[-1] - 7, ends[-1] + 3, ends[4] - 1, ends[0] + 9):
        first.path.write_bytes(content[:cut])
        check_same(story.replayed()[0], story.held["end"])
        check_same(story.replayed(start=early)[0], story.held["end"])
    assert second.returned is not None
    with pytest.raises(Refused, match="ends with entry"):
        story.replayed(second.returned, early)
    assert story.chain()[1].returned == second.returned == 2 + 10


def test_a_server_that_comes_back_again_and_again(story: Story) -> None:
    """Each time from what it has saved last, also when nothing was decided in between."""
    story.step(1)
    saves = [story.save("first")]
    for number in range(3):
        story.step(number)  # none before the first return
        story.return_from(saves[-1])
        story.step(number % 2)
        story.note(f"back {number}")
        saves.append(story.save(f"save {number}"))
    story.step(2)
    story.note("end")
    story.end()

    assert len(story.chain()) == 4
    for start in (None, *saves):
        check_same(story.replayed(start=start)[0], story.held["end"])
    for number, save in enumerate(saves[1:]):
        moment = f"back {number}"
        check_same(story.replayed(story.records[moment], save)[0], story.held[moment])


def test_what_was_applied_before_a_loss_is_counted(story: Story) -> None:
    """Also where every server has come back, so that no file has all steps; behind a checkpoint,
    what came behind it.
    """
    story.step(2)
    early = story.save("early")
    story.step(3)
    story.return_from(early)
    middle = story.save("middle")
    story.step(1)
    story.note("middle")
    story.victim = 1 - story.victim
    story.return_from(middle)
    late = story.save("late")
    story.step(2)
    story.end()

    for start, count in ((None, 8), (early, 6), (middle, 3), (late, 2)):
        said = story.replayed(start=start)[1]
        listed = f": {2 * count} steps (trainer 0 {count}, trainer 1 {count}) on 2 servers"
        assert listed in said
    assert "12 steps (trainer 0 6, trainer 1 6)" in story.replayed(story.records["middle"])[1]


def test_damage_in_a_file_counts_where_the_file_does(story: Story) -> None:
    """That of a process that was lost is not read for what the server held later."""
    story.step(2)
    early = story.save("early")
    story.step(2)
    story.note("lost")
    story.return_from(early)
    story.step(2)
    story.note("end")
    story.end()
    first, second = story.chain()
    ends = [p.end for p in first.places() if p.entry.HasField("applied")]
    content = bytearray(first.path.read_bytes())
    content[ends[-2] - 5] ^= 1
    first.path.write_bytes(content)

    check_same(story.replayed()[0], story.held["end"])
    with pytest.raises(Refused, match="is damaged"):
        story.replayed(story.records["lost"])
    shutil.move(first.path, story.path / "away")
    with pytest.raises(Refused, match="expected the parts of all 2 servers"):
        story.replayed()


@pytest.mark.parametrize("what", ["its leaves", "a step"])
def test_a_server_lacks_the_last_records(story: Story, what: str) -> None:
    """A warning names a missing step; a missing leave, which changes no value, gives none."""
    story.step(2)
    servers = story.world.servers
    for server, part in zip(servers, story.world.trainers[1], strict=True):
        server.job.leave(LeaveRequest(session=part.session, success=True))
    last = max(server.job.installed().decisions.last for server in servers)
    until(lambda: all(s.job.installed().decisions.last == last for s in servers))
    story.end()
    (part,) = story.chain()
    ends = [p.end for p in part.places() if p.entry.HasField("applied")]
    assert part.last == last > part.decided
    part.path.write_bytes(part.path.read_bytes()[: ends[-1 if what == "its leaves" else -2]])

    said = story.replayed()[1]
    assert ("not every server has all steps" in said) == (what == "a step"), said


def test_a_checkpoint_that_is_saved_at_once_names_the_record(story: Story) -> None:
    """Of a server that has come back, and has applied nothing since."""
    story.step(2)
    early = story.save("early")
    story.step(1)
    story.return_from(early)

    installed = story.world.servers[story.victim].job.installed()
    assert installed.log_place["record"] == installed.decisions.last == 2 + 6
    assert story.world.servers[story.victim].job.status(StatusRequest()).recording.recording
