"""What trainers leave at server 0 for one another is bounded by bytes, of each and of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pserver import timeouts
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job.barriers import Barriers
from pserver.job.kept_texts import MOST_OF_ONE, KeptTexts
from pserver.job.program import MemoryBudget
from pserver.job.store import Store
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership

LONG = "x" * 4_000_000
TIMES = 100


class Room:
    """Where two trainers meet, of which one sends what it likes."""

    def __init__(self, texts: KeptTexts) -> None:
        self.members, self.texts = Membership(2, 0.0), texts
        self.there = [Member(number, str(number), "tcp", 0.0) for number in range(2)]
        for each in self.there:
            self.members.add(each)
        self.job = Lifecycle()
        self.barriers = Barriers(self.members, self.job, texts=texts)
        self.topics = Store(texts)

    def at_barriers(self, number: int) -> None:
        self.barriers.meet(self.there[1], f"{number}: x", 0.0, LONG)

    def apart(self, number: int) -> None:
        self.barriers.meet(self.there[1], f"automatic save {number}", 0.0, LONG, apart=True)

    def about_topics(self, number: int) -> None:
        self.topics.agree(f"pass {number}", LONG, 1)


@pytest.mark.parametrize("sends", [Room.at_barriers, Room.apart, Room.about_topics])
def test_one_session_can_not_fill_the_server(sends: Callable[[Room, int], None]) -> None:
    """It is refused, and the other one's texts are taken as before."""
    room = Room(KeptTexts())
    refused = 0
    for number in range(TIMES):
        try:
            sends(room, number)
        except Refused as error:
            refused += 1
            assert "expected at most 33.6 MB of texts that trainer 1 leaves" in str(error)
    assert refused > TIMES - 10
    assert room.texts.bytes_held <= MOST_OF_ONE

    room.barriers.meet(room.there[0], "1000: y", 0.0, LONG)
    assert room.topics.agree("mine", "said", 0) == "said"


def test_barriers_one_after_the_other_may_be_any_number() -> None:
    """What all have passed, and what was put off, is forgotten and takes no room."""
    room = Room(KeptTexts())
    for number in range(40):
        assert room.barriers.meet(room.there[0], f"{number}: x", 0.0, LONG) is None
        assert room.barriers.meet(room.there[1], f"{number}: x", 0.0, LONG) is not None
        room.apart(number)
        with room.job.condition:
            assert room.barriers.put_off(f"automatic save {number}", "so")
        assert room.barriers.meet(room.there[0], f"automatic save {number}", 0.0, LONG) is None
    assert room.texts.bytes_held < 9_000_000


def test_a_name_that_is_kept_again_counts_once() -> None:
    """The room of its earlier texts is free."""
    barriers = Room(KeptTexts()).barriers
    for _ in range(3):
        barriers._keep("a", {0: "text"})
    barriers._keep("b", {1: "x"})
    assert barriers._kept == len("atext" + "bx")


def test_who_comes_to_a_gathering_again_has_told_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one; and none when the gathering is over."""
    monkeypatch.setattr(timeouts, "LONG_POLL_SECONDS", 0.0)
    room = Room(KeptTexts())
    come = room.barriers.meetings.join
    for _ in range(20):
        assert not come(room.there[1], wire.BarrierRequest(gathers=True, text=LONG)).passed
    assert room.texts.bytes_held < 5_000_000
    assert come(room.there[0], wire.BarrierRequest(gathers=True, text="y")).passed
    assert room.texts.bytes_held == 0


def test_texts_and_rows_share_the_memory_of_the_server() -> None:
    """What is left of ``--max-memory`` to the one is not left to the other."""
    texts = KeptTexts(lambda: budget.left)
    budget = MemoryBudget(10_000_000, 3_000_000, {}, lambda: texts.bytes_held)
    room = Room(texts)

    room.at_barriers(1)
    assert 2_900_000 < budget.left < 3_000_000
    with pytest.raises(Refused, match="a text for 3.0 MB or less .* --max-memory|--max-memory"):
        room.at_barriers(2)
    room.barriers.meet(room.there[0], "1: x", 0.0)
    room.barriers.meet(room.there[1], "1: x", 0.0)
    room.barriers.meet(room.there[0], "2: x", 0.0)
    room.barriers.meet(room.there[1], "2: x", 0.0)
    assert budget.left > 6_900_000
