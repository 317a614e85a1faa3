"""The bound on the bytes of trainers' texts on server 0: those of each trainer, and of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.meetings import Meetings
from pserver.job.program import MemoryBudget
from pserver.job_log.own_state import MOST_OF_ONE, PastTexts, TextBudget
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership

LONG = "x" * 4_000_000
TIMES = 100


class Room:
    """A meeting place of two trainers, of which one sends any number of texts."""

    def __init__(self, texts: TextBudget) -> None:
        self.members, self.texts = Membership(2, 0.0), texts
        self.there = [Member(number, str(number), "tcp", 0.0) for number in range(2)]
        for each in self.there:
            self.members.add(each)
        self.job = Lifecycle()
        self.meetings = Meetings(self.members, self.job, texts=texts)

    def meet(
        self, trainer: int, key: str, text: str = "", mode: wire.MeetMode = wire.MEET_ALL
    ) -> wire.MeetReply:
        return self.meetings.meet(
            self.there[trainer], wire.MeetRequest(mode=mode, key=key, text=text)
        )

    def at_barriers(self, number: int) -> None:
        self.meet(1, f"{number}: x", LONG)

    def in_saves(self, number: int) -> None:
        self.meet(1, f"automatic save {number}", LONG, wire.MEET_SAVE)

    def about_topics(self, number: int) -> None:
        self.meet(1, f"pass {number}", LONG, wire.MEET_FIRST)

    def about_own_topics(self, number: int) -> None:
        self.meet(1, f"pass {number}", LONG, wire.MEET_SET)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is answered at once."""
    monkeypatch.setattr(timeouts, "LONG_POLL_SECONDS", 0.0)


MORE = [Room.at_barriers, Room.in_saves, Room.about_topics, Room.about_own_topics]


@pytest.mark.parametrize("sends", MORE)
def test_one_session_can_not_fill_the_server(sends: Callable[[Room, int], None]) -> None:
    """It is refused, and the other one's texts are taken as before."""
    room = Room(TextBudget())
    refused = 0
    for number in range(TIMES):
        try:
            sends(room, number)
        except Refused as error:
            refused += 1
            assert "expected at most 33.6 MB of texts that trainer 1 leaves" in str(error)
    assert refused > TIMES - 10
    assert room.texts.bytes_held <= MOST_OF_ONE

    room.meet(0, "1000: y", LONG)
    assert dict(room.meet(0, "mine", "said", wire.MEET_FIRST).texts) == {0: "said"}


def test_barriers_one_after_the_other_may_be_any_number() -> None:
    """Passed barriers and put-off saves are forgotten, and take no room."""
    room = Room(TextBudget())
    for number in range(40):
        assert not room.meet(0, f"{number}: x", LONG).over
        assert room.meet(1, f"{number}: x", LONG).over
        room.in_saves(number)
        with room.job.condition:
            assert room.meetings.put_off(f"automatic save {number}", "so")
        assert room.meet(0, f"automatic save {number}", LONG, wire.MEET_SAVE).problem == "so"
    assert room.texts.bytes_held < 9_000_000


def test_a_name_that_is_kept_again_counts_once() -> None:
    """The room of its earlier texts is free."""
    past = PastTexts()
    for _ in range(3):
        past.keep("a", {0: "text"})
    past.keep("b", {1: "x"})
    assert past.characters == len("atext" + "bx")


def test_a_text_that_its_trainer_replaces_counts_once() -> None:
    """The room of the earlier one is free; another trainer's text stays, and is the answer."""
    room = Room(TextBudget())
    for number in range(20):
        room.meet(1, "address", f"{number} {LONG}", wire.MEET_SET)
    assert room.texts.bytes_held < 5_000_000
    assert dict(room.meet(0, "address", "mine", wire.MEET_SET).texts) == {1: f"19 {LONG}"}
    assert dict(room.meet(1, "address", "mine", wire.MEET_FIRST).texts) == {1: f"19 {LONG}"}


def test_a_mode_of_another_version_is_refused() -> None:
    """The message says which there are."""
    room = Room(TextBudget())
    with pytest.raises(Refused, match="expected a meeting of mode 0 to 7, got 8"):
        room.meetings.meet(room.there[0], wire.MeetRequest(mode=8))  # type: ignore[arg-type]


def test_who_comes_to_a_round_again_has_told_one_text() -> None:
    """The last one; and none when the round is over."""
    room = Room(TextBudget())
    for _ in range(20):
        assert not room.meet(1, "", LONG, wire.MEET_ROUND).over
    assert room.texts.bytes_held < 5_000_000
    assert room.meet(0, "", "y", wire.MEET_ROUND).over
    assert room.texts.bytes_held == 0


def test_texts_and_rows_share_the_memory_of_the_server() -> None:
    """Both take from ``--max-memory``."""
    texts = TextBudget(lambda: budget.left)
    budget = MemoryBudget(10_000_000, 3_000_000, {}, lambda: texts.bytes_held)
    room = Room(texts)

    room.at_barriers(1)
    assert 2_900_000 < budget.left < 3_000_000
    with pytest.raises(Refused, match="a text for 3.0 MB or less .* --max-memory|--max-memory"):
        room.at_barriers(2)
    for key in ("1: x", "2: x"):
        for trainer in range(2):
            room.meet(trainer, key)
    assert budget.left > 6_900_000
