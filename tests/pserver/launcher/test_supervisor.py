"""What launch makes of the ends of its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver.launcher.cluster import Cluster
from pserver.launcher.ended_trainers import Answer
from pserver.launcher.last_word import obstacle
from pserver.launcher.restart_policy import RestartPolicy
from pserver.launcher.started_processes import StartedProcesses
from pserver.launcher.supervisor import Failed, Supervisor
from pserver.wire_pb2 import StatusReply, TrainerStatus


def supervisor(trainers: list[Any], servers: list[Any]) -> Supervisor:
    """Of processes that have been started."""
    cluster = Cluster(__file__, (), ("127.0.0.1:0",), ("127.0.0.1:1",))
    parts = cast(Any, SimpleNamespace())
    started = StartedProcesses(cluster, parts, parts, parts, parts, (), 0, "", servers)
    started.trainers = dict(enumerate(trainers))
    return Supervisor(started, RestartPolicy(0, True), {}, parts, print)


class Ended:
    """A process that has ended, by itself."""

    def __init__(self, status: int) -> None:
        self.status, self.failed = status, status != 0
        self.preempted_after: int | None = None


@pytest.mark.parametrize("kind", ["trainer", "server"])
def test_an_end_counts_when_it_has_been_looked_at(kind: str) -> None:
    """A process that has failed ends the job badly although all have ended before launch looks."""
    well, badly = Ended(0), Ended(1)
    watched = supervisor([well, badly], []) if kind == "trainer" else supervisor([], [well, badly])
    for each in (well, badly):
        watched.started.events.put(cast(Any, each))

    with pytest.raises(Failed):
        watched._wait_for_trainers() if kind == "trainer" else watched._wait_for_servers()


class Running:
    """A process that runs."""

    status, failed = None, False


class Lost(Ended):
    """A trainer that has ended before its job."""

    name, log, lived_seconds = "trainer 1", "trainer-1.log", 9.0

    def __init__(self, status: int, signalled: bool) -> None:
        super().__init__(status)
        self.preempted_after = 57 if status == 143 and not signalled else None


@pytest.mark.parametrize(
    ("status", "signalled", "restarts", "said", "again"),
    [
        (
            137,
            True,
            1,
            "trainer 1 failed with status 137 (killed by SIGKILL): starts it again (restart 1 of "
            "1); the others go on; see trainer-1.log",
            True,
        ),
        (3, False, 0, "trainer 1 failed with status 3; the others go on without it; see", False),
        (143, False, 1, "trainer 1 was preempted after step 57; the others go on", False),
        (143, True, 1, "trainer 1 failed with status 143 (killed by SIGTERM): starts it", True),
    ],
)
def test_what_follows_a_lost_trainer_is_done_and_said(
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    signalled: bool,
    restarts: int,
    said: str,
    again: bool,
) -> None:
    """It is started again, or the others go on without it; then launch waits for them."""
    lines: list[str] = []
    lost, other = Lost(status, signalled), Running()
    watched = supervisor([other, lost], [])
    watched.policy, watched.say = RestartPolicy(restarts, True), lines.append
    watched.ended.append(cast(Any, lost))
    begun: list[int] = []
    monkeypatch.setattr(watched.started, "start_again", begun.append)
    answer = Answer(took_part=status != 143 or signalled, goes_on=True)
    monkeypatch.setattr(watched._words, "ask", lambda process, replaced: answer)
    watched._follow(cast(Any, lost))

    assert lines[0].startswith(said) and begun == [1] * again
    assert watched.ended == [] and watched.lost == [lost] * (not again)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (Ended(0), Answer(True, True)),
        (Running(), Answer(took_part=True, goes_on=False)),
        # it had left, and its script failed then
        (Running(), Answer(took_part=False, goes_on=True)),
    ],
)
def test_nobody_goes_on_where_the_servers_do_not_or_nobody_is_left(
    monkeypatch: pytest.MonkeyPatch, others: Any, said: Answer
) -> None:
    """Then the job has failed."""
    lost = Lost(137, True)
    watched = supervisor([others, lost], [])
    monkeypatch.setattr(watched._words, "ask", lambda process, replaced: said)

    with pytest.raises(Failed):
        watched._follow(cast(Any, lost))


@pytest.mark.parametrize(("took_part", "other"), [(True, 0), (False, 0), (True, 1)])
def test_a_job_that_was_done_when_launch_asked_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, took_part: bool, other: int
) -> None:
    """The others waited for nothing but the end of the lost one, and have ended well."""
    lost, running, lines = Lost(137, True), Running(), list[str]()
    watched = supervisor([running, lost], [])
    watched.say = lines.append
    answer = Answer(took_part, goes_on=False)
    monkeypatch.setattr(watched._words, "ask", lambda process, replaced: answer)
    with pytest.raises(Failed):
        watched._follow(cast(Any, lost))
    watched.started.trainers[0] = cast(Any, Ended(other))

    assert watched._done_without() == (took_part and not other)
    assert lines[-1:] == ["the job is done without trainer 1"] * (took_part and not other)


@pytest.mark.parametrize("others", [[Running()], [Ended(137)], []], ids=["run", "end", "none"])
@pytest.mark.parametrize("status", [137, 3])
@pytest.mark.parametrize("done", [True, False])
def test_one_that_is_killed_when_it_has_finished_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, others: list[Any], status: int, done: bool
) -> None:
    """Neither the job, which is done or goes on, nor does it begin again; but a script that fails
    after its end has failed.
    """
    killed, lines = Lost(status, True), list[str]()
    watched = supervisor([killed, *others], [Ended(0)])
    watched.say, watched.policy = lines.append, RestartPolicy(1, True)
    watched.ended.append(cast(Any, killed))
    # servers that have ended with their job say nothing any more
    answer = Answer(took_part=False, goes_on=False, done=done)
    monkeypatch.setattr(watched._words, "ask", lambda process, replaced: answer)
    if status == 3:
        with pytest.raises(Failed):
            watched._follow(cast(Any, killed))
        return
    watched._follow(cast(Any, killed))

    assert lines == ["trainer 1 had finished when it ended"]
    assert watched.ended == [] and watched.lost == [killed]
    watched._say_lost()
    assert len(lines) == 1 and watched.policy.left == 1


def serving(*states: str, word: str = "serving") -> StatusReply:
    """A server whose trainers 0, 1, ... have these states."""
    trainers = [TrainerStatus(trainer_id=n, state=state) for n, state in enumerate(states)]
    return StatusReply(state=word, failure="it is over" * (word == "failed"), trainers=trainers)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (serving("joined", "lost"), ""),
        (serving("joined", "left"), ""),
        (serving("joined", "joined"), None),
        (serving("joined", "finished"), None),
        (serving("joined"), "they had not joined"),
        (serving("joined", "lost", word="failed"), "it is over"),
        (serving(word="installing"), "the server is installing"),
    ],
)
def test_a_job_goes_on_where_a_server_serves_it_without_the_trainer(
    status: StatusReply, expected: str | None
) -> None:
    """None: the server still counts on it, and is asked again."""
    assert obstacle(status, {1}) == expected
