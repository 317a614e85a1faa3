"""Questions to servers that launch asks by another process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest

from pserver.config import HEARTBEAT_TIMEOUT_SECONDS
from pserver.errors import TimedOut, Unreachable
from pserver.launcher import last_word
from pserver.launcher.lost_server import status_of
from pserver.launcher.question import Question, patience
from pserver.launcher.supervisor import EndAnswer
from pserver.security.access import OPEN
from pserver.wire_pb2 import StatusReply, TrainerStatus

SAYS = "import json; print(json.dumps({'took_part': True, 'goes_on': None}))"


def asked(script: str) -> Question:
    """A question that is over."""
    over = threading.Event()
    question = Question([sys.executable, "-c", script], over.set)
    assert over.wait(60.0)
    return question


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (SAYS, EndAnswer(took_part=True)),
        ("print('no JSON')", EndAnswer()),
        ("raise SystemExit(1)", EndAnswer()),
        ("print('{}')", EndAnswer()),
    ],
)
def test_what_is_not_said_is_unknown(script: str, expected: EndAnswer) -> None:
    """Whatever becomes of the process that asks."""
    question = asked(script)
    question.end()

    assert EndAnswer.of(question.answer or {}) == expected


@pytest.mark.processes
def test_a_question_may_be_given_up() -> None:
    """Its process ends, and it has no answer."""
    over = threading.Event()
    question = Question([sys.executable, "-c", "import time; time.sleep(600)"], over.set)
    assert question.answer is None
    question.end()

    assert over.wait(60.0) and EndAnswer.of(question.answer or {}) == EndAnswer()


def test_servers_have_two_heartbeat_timeouts_to_answer() -> None:
    """Of the job, or those of a job that names none."""
    assert patience(5.0) == 10.0
    assert patience(None) == 2 * HEARTBEAT_TIMEOUT_SECONDS


class Busy:
    """A server that answers every third time, and has lost its trainer by then."""

    def __init__(self) -> None:
        self.asked, self.told = 0, list[int]()

    def __call__(self, *_: object, **__: object) -> Busy:
        return self

    def status(self) -> StatusReply:
        """Its own."""
        self.asked += 1
        if self.asked % 3:
            raise (TimedOut if self.asked % 2 else Unreachable)("busy")
        state = "lost" if self.told else "joined"
        return StatusReply(
            state="serving", trainers=[TrainerStatus(trainer_id=1, state=state)], fingerprint="f"
        )

    def announce(self, request: object) -> None:
        """Hears of an end."""
        self.told.append(getattr(request, "trainer_id", -1))

    def close(self) -> None:
        """Forgets what is open."""


def questions(server: Busy, monkeypatch: pytest.MonkeyPatch) -> Sequence[last_word.EndQuestion]:
    """To that server."""
    monkeypatch.setattr(last_word, "ControlClient", server)
    return [last_word.EndQuestion(OPEN, "h:1", ["1=killed"], False)]


def test_a_server_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has said what the trainer was, has heard of its end, and goes on without it."""
    server = Busy()
    said = last_word.ask(questions(server, monkeypatch), 30.0)

    assert (said.took_part, said.done, said.goes_on) == (True, False, True)
    assert set(server.told) == {1} and server.asked >= 4


def test_one_that_never_answers_has_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither yes nor no."""
    server = Busy()
    monkeypatch.setattr(server, "status", lambda: (_ for _ in ()).throw(TimedOut("busy")))
    said = last_word.ask(questions(server, monkeypatch), 0.3)

    assert (said.took_part, said.done, said.goes_on, said.reason) == (None, None, None, "")


def test_a_dead_server_s_others_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they do not say in time is an error, which names the server."""
    server = Busy()
    monkeypatch.setattr("pserver.launcher.lost_server.ControlClient", server)
    assert status_of(OPEN, "h:1", 30.0).fingerprint == "f" and server.asked == 3

    monkeypatch.setattr(server, "status", lambda: (_ for _ in ()).throw(TimedOut("h:1: busy")))
    with pytest.raises(TimedOut, match="h:1"):
        status_of(OPEN, "h:1", 0.3)
