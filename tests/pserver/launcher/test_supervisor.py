"""What launch makes of the ends of its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver.launcher.cluster import Cluster
from pserver.launcher.last_word import EndAnswers, EndQuestion, is_done, obstacle, states
from pserver.launcher.processes import killer
from pserver.launcher.started_processes import StartedProcesses
from pserver.launcher.supervisor import Failed, Next, RestartPolicy, Supervisor
from pserver.security.access import OPEN
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
        self.reported_error = ""
        self.status, self.failed, self.stopped = status, status != 0, False
        self.signalled, self.killed, self.suspended = status > 128, False, False
        self.preempted_after: int | None = None

    @property
    def blameless(self) -> bool:
        """Whether a signal has ended it, or the job has dropped it."""
        return self.signalled or self.reported_error.endswith("goes on without it")


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

    status, failed, stopped, suspended = None, False, False, False
    preempted_after: int | None = None


class Asked:
    """A question to the servers that has been answered."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.answer = said

    def end(self) -> None:
        """Its process has ended."""


def answered(watched: Supervisor, monkeypatch: pytest.MonkeyPatch, **said: Any) -> None:
    """The servers say so, when they are asked."""
    monkeypatch.setattr(watched._words, "ask", lambda process, replaced: Asked(said))


class Lost(Ended):
    """A trainer that has ended before its job."""

    name, log, lived_seconds, told, killed = "trainer 1", "trainer-1.log", 9.0, "", False
    tail = ("ValueError: it is wrong",)

    def __init__(self, status: int, signalled: bool) -> None:
        super().__init__(status)
        self.signalled = signalled
        self.preempted_after = 57 if status == 143 and not signalled else None


@pytest.mark.timeout(30)
def test_a_late_trainer_that_ends_by_itself_is_reported_once() -> None:
    """It ends when the job is done, before launch asks it to: launch does not ask again and
    again.
    """
    late, others, said = Lost(9, False), (Ended(0), Ended(0)), list[str]()
    watched = supervisor([others[0], late], [others[1]])
    watched.report = said.append  # type: ignore[method-assign]
    watched.started._away.add(1)
    for each in (*others, late):
        watched.started.events.put(cast(Any, each))

    watched._wait_for_trainers()

    assert said == ["trainer 1 started too late: the job is done without it"]


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
    watched.policy, watched.report = RestartPolicy(restarts, True), lines.append
    watched.ended.append(cast(Any, lost))
    begun: list[int] = []
    monkeypatch.setattr(watched.started, "start_again", begun.append)
    answered(watched, monkeypatch, took_part=status != 143 or signalled, goes_on=True)
    watched._follow(cast(Any, lost))

    assert lines[0].startswith(said) and begun == [1] * again
    assert watched.ended == [] and watched.lost == [lost] * (not again)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (Ended(0), {"took_part": True, "goes_on": True}),
        (Ended(0), {}),  # nobody says anything, and nobody runs
        (Running(), {"took_part": True, "goes_on": False}),
        (Running(), {"took_part": False, "done": False, "goes_on": True}),  # not joined
    ],
)
def test_nobody_goes_on_where_the_servers_do_not_or_nobody_is_left(
    monkeypatch: pytest.MonkeyPatch, others: Any, said: dict[str, Any]
) -> None:
    """Then the job has failed."""
    lost = Lost(137, True)
    watched = supervisor([others, lost], [])
    answered(watched, monkeypatch, **said)

    with pytest.raises(Failed):
        watched._follow(cast(Any, lost))


@pytest.mark.parametrize(("status", "by"), [(137, "SIGKILL"), (143, "SIGTERM"), (3, ""), (128, "")])
def test_the_signal_that_a_status_stands_for(status: int, by: str) -> None:
    """Whether it has killed the process, or a handler has answered it with that status."""
    found = killer(status)
    assert (found.name if found else "") == by and killer(None) is None


@pytest.mark.parametrize(("took_part", "other"), [(True, 0), (False, 0), (True, 1)])
def test_a_job_that_was_done_when_launch_asked_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, took_part: bool, other: int
) -> None:
    """The others waited for nothing but the end of the lost one, and have ended well."""
    lost, running, lines = Lost(137, True), Running(), list[str]()
    watched = supervisor([running, lost], [])
    watched.report = lines.append
    answered(watched, monkeypatch, took_part=took_part, goes_on=False)
    with pytest.raises(Failed):
        watched._follow(cast(Any, lost))
    watched.started.trainers[0] = cast(Any, Ended(other))

    assert watched._done_without() == (took_part and not other)
    assert lines[-1:] == ["the job is done without trainer 1"] * (took_part and not other)


@pytest.mark.parametrize("others", [[Running()], [Ended(137)], []], ids=["run", "end", "none"])
@pytest.mark.parametrize("done", [True, False])
def test_one_that_is_killed_when_it_has_finished_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, others: list[Any], done: bool
) -> None:
    """Neither the job, which is done or goes on, nor does it begin again."""
    killed, lines = Lost(137, True), list[str]()
    watched = supervisor([killed, *others], [Ended(0)])
    watched.report, watched.policy = lines.append, RestartPolicy(1, True)
    watched.ended.append(cast(Any, killed))
    # servers that have ended with their job say nothing any more
    answered(watched, monkeypatch, took_part=False, goes_on=False, done=done)
    watched._follow(cast(Any, killed))

    said = " when it had finished" if done else ", and the job is done; see trainer-1.log"
    assert lines == [f"trainer 1 ended with status 137 (killed by SIGKILL){said}"]
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
        (serving("joined", "finished"), ""),  # no step waits for it
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


def over(kind: str) -> StatusReply:
    """A server whose last job has ended so."""
    reply = StatusReply(state="empty")
    reply.events.add(kind="joined 1", text="")
    reply.events.add(kind=kind, text="")
    return reply


def test_a_server_whose_job_is_done_has_no_obstacle() -> None:
    """It has no trainers any more, and says so by its last event."""
    assert is_done(over("done")) and obstacle(over("done"), {1}) == ""
    assert states(over("done"), {1}) == {1: "done"}
    assert not is_done(over("failed")) and obstacle(over("failed"), {1}) == "the server is empty"


def question(word: str | None, found: str | None) -> EndQuestion:
    """What one server has said of trainer 1: what it was, and what is in its way."""
    asked = EndQuestion(OPEN, "127.0.0.1:1", ["1=killed"], False)
    asked.were = None if word is None else {1: word}
    asked.told, asked.obstacle = word is not None, found
    return asked


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("joined", ""), ("lost", "")], (True, False, True)),
        ([("finished", ""), ("done", "")], (False, True, True)),
        ([("finished", ""), ("joined", "")], (True, False, True)),
        ([("", "they had not joined")], (False, False, False)),
        ([("joined", ""), (None, None)], (None, None, None)),
        ([("joined", "it failed"), (None, None)], (None, None, False)),
        ([("joined", None), ("joined", "")], (True, False, None)),
    ],
)
def test_what_a_server_has_not_said_is_not_known(
    answers: list[tuple[str | None, str | None]], expected: tuple[bool | None, ...]
) -> None:
    """One that has said no is enough for a no; for a yes all are needed."""
    said = EndAnswers.of([question(*each) for each in answers])

    assert (said.took_part, said.done, said.goes_on) == expected


@pytest.mark.parametrize("told", ["", "TrainerLost: silent; the job goes on without it"])
@pytest.mark.parametrize("server", [Running(), Ended(137)])
@pytest.mark.parametrize("restarts", [0, 1])
def test_no_answer_is_no_no(
    monkeypatch: pytest.MonkeyPatch, restarts: int, server: Any, told: str
) -> None:
    """The processes that run are believed; a server that has failed meanwhile is looked at next.
    So it is where the job has dropped the trainer, as that says itself.
    """
    lost, lines, begun = Lost(1 if told else 137, not told), list[str](), list[int]()
    lost.reported_error = told
    watched = supervisor([Running(), lost], [server])
    watched.policy, watched.report = RestartPolicy(restarts, True), lines.append
    watched.ended.append(cast(Any, lost))
    monkeypatch.setattr(watched.started, "start_again", begun.append)
    answered(watched, monkeypatch)
    watched._follow(cast(Any, lost))

    assert begun == [1] * restarts and watched.lost == [lost] * (not restarts)
    assert lines[0].startswith("the servers have not reported") == (server.status is None)
    assert "the others go on" in lines[-1]


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize(("status", "expected"), [(137, 0), (3, 3)])
def test_a_trainer_that_had_done_its_part_ends_no_job(
    monkeypatch: pytest.MonkeyPatch, status: int, expected: int, done: bool
) -> None:
    """Whether it dies while others go on, or when all servers have ended well: nothing is begun
    again; the status is 0, or that of its script.
    """
    lost, lines = Lost(status, status > 128), list[str]()
    watched = supervisor([Ended(0) if done else Running(), lost], [Ended(0) if done else Running()])
    watched.policy, watched.report = RestartPolicy(3, True), lines.append
    watched.ended.extend(cast(Any, watched.started.trainers.values()))
    if not done:
        answered(watched, monkeypatch, took_part=False, done=True, goes_on=True)
    else:
        answered(watched, monkeypatch)
    if done and status == 3:
        with pytest.raises(Failed):
            watched._follow(cast(Any, lost))
        assert not watched._done_without() and watched._report() == 3
    else:
        watched._follow(cast(Any, lost))
        assert watched.lost == [lost] and watched._well() == expected
        end = f"ended with status {status}{' (killed by SIGKILL)' * (status == 137)}"
        when = "the job was done" if done else "it had finished"
        assert lines[0] == f"trainer 1 {end} when {when}"

    assert watched.policy.used == 0 and watched.next is Next.FAIL
    assert any("failed with status 3; the last lines" in line for line in lines) == (status == 3)


@pytest.mark.parametrize("going", [False, True])
@pytest.mark.parametrize("servers", [0, 1])
def test_a_trainer_that_was_lost_ends_no_job_that_is_done(
    monkeypatch: pytest.MonkeyPatch, servers: int, going: bool
) -> None:
    """It was stopped, and says when it wakes that the job has ended without it; the other one may
    still be on its way out.  A job whose servers have failed has failed.
    """
    lost, lines = Lost(1, False), list[str]()
    lost.reported_error = "pserver.errors.TrainerLost: this trainer did not run for 10.1 s"
    watched = supervisor([Running() if going else Ended(0), lost], [Ended(servers)])
    watched.policy, watched.report = RestartPolicy(3, True), lines.append
    watched.ended.append(cast(Any, lost))
    answered(watched, monkeypatch)
    if servers:
        with pytest.raises(Failed):
            watched._follow(cast(Any, lost))
        return
    watched._follow(cast(Any, lost))

    assert watched.lost == [lost] and watched._well() == 0 and watched.policy.used == 0
    assert lines == ["trainer 1 was lost, and the job is done without it; see trainer-1.log"]


def test_what_ends_while_servers_are_asked_is_followed_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two trainers that die at once each is asked for, and none is forgotten."""
    trainers = [Running(), Lost(137, True), Lost(137, True)]
    watched = supervisor(cast(Any, trainers), [Running()])
    watched.report = lambda text: None

    class Late(Asked):
        """Is answered when the other one's end was taken."""

        def __getattribute__(self, name: str) -> Any:
            if name == "answer" and trainers[2] not in watched.ended:
                return None
            return super().__getattribute__(name)

    def ask(process: Any, replaced: bool) -> Asked:
        if process is trainers[1]:
            watched.started.events.put(cast(Any, trainers[2]))
        return Late({"took_part": True, "goes_on": True})

    monkeypatch.setattr(watched._words, "ask", ask)
    watched.started.events.put(cast(Any, trainers[1]))
    watched._until(lambda: len(watched.lost) == 2, 5.0)

    assert watched.lost == trainers[1:]
