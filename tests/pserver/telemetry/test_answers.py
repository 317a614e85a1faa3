"""The five answers about a job: each verdict, from what servers say; no sockets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from pserver.telemetry.job_view import JobView
from pserver.wire_pb2 import StatusReply
from tests.support.samples import HERE, THERE, reply, sample

QUESTIONS = ("healthy", "limit", "slow", "model", "stop")
Said = dict[str, tuple[str, str]]


def answered(view: JobView) -> Said:
    """Verdict and sentence of each question."""
    now = view.page(0)["now"]
    assert [each["question"] for each in now["answers"]] == [
        "Is it healthy?",
        "What limits it?",
        "Who is slow?",
        "Is the model fine?",
        "Can I stop it now?",
    ]
    found = [(each["verdict"], each["text"]) for each in now["answers"]]
    return dict(zip(QUESTIONS, found, strict=True))


def after(
    seconds: int,
    made: Callable[[float], StatusReply | None] = reply,
    other: Callable[[float], StatusReply | None] = reply,
) -> Said:
    """The answers after a job of two servers was view for some seconds.

    Args:
        made, other: what the servers say at each second.
    """
    view = JobView([HERE, THERE])
    for second in range(seconds + 1):
        view.add(sample(second, made(second), other(second)))
    return answered(view)


def test_all_is_well() -> None:
    """A job that runs, computes, learns and has nothing saved."""
    said = after(30, *[lambda second: reply(second, values={"loss": 1 / (1 + second)})] * 2)

    assert said["healthy"] == ("good", "Yes: 2 servers and 2 trainers are at work")
    assert said["limit"] == ("good", "The trainers' own computing: 80% of a step of 50 ms")
    assert said["slow"] == ("good", "Nobody: no trainer and no server holds up the others")
    assert said["model"] == ("good", "Yes: loss falls, from 0.1833 to 0.03775 in 30 s")
    assert said["stop"] == (
        "warn",
        "Not without loss: no checkpoint is known, all 300 steps would be gone; save first",
    )


def test_a_server_that_does_not_answer() -> None:
    """It is named; what it has said before does not count as now."""
    said = after(10, other=lambda second: reply(second) if second < 5 else None)
    assert said["healthy"] == ("bad", f"No: 1 of 2 servers does not answer: {THERE}")

    nobody = after(3, lambda second: None, lambda second: None)
    assert nobody["healthy"] == ("bad", f"No: 2 of 2 servers do not answer: {HERE}, {THERE}")
    assert nobody["stop"] == ("unknown", "No server answers")


def test_a_trainer_that_is_lost() -> None:
    """One server's word is enough; and the job's end is told first."""

    def lost(second: float) -> StatusReply:
        made = reply(second)
        made.trainers[1].state = "lost"
        return made

    assert after(3, lost)["healthy"] == ("bad", "No: trainer 1 is lost")

    def failed(second: float) -> StatusReply:
        return reply(second, state="failed", failure="trainer 1 ended", kept_seconds=90.0)

    said = after(3, failed)
    assert said["healthy"] == ("bad", "No: the job has failed: trainer 1 ended")
    assert said["stop"] == ("warn", "It has stopped: its values are kept for another 2 min")
    assert said["limit"][0] == said["slow"][0] == "unknown"


def test_a_job_that_begins() -> None:
    """Trainers are missing, or nobody is there at all."""
    begins = after(3, lambda second: reply(0, {0: 0.0}, trainers_expected=3, version=0))
    assert begins["healthy"] == ("warn", "It begins: 2 of 3 trainers joined")  # by both servers

    empty = StatusReply(state="empty", uptime_seconds=1.0)
    said = after(3, lambda second: empty, lambda second: empty)
    assert said["healthy"] == ("unknown", "No job runs: the servers are up and empty")
    assert said["stop"] == ("good", "Yes: no job runs")


def test_a_silent_trainer() -> None:
    """Before it counts as lost."""

    def silent(second: float) -> StatusReply:
        made = reply(second)
        made.trainers[1].silence_seconds = 8.0
        return made

    said = after(3, silent, silent)
    assert said["healthy"] == ("warn", "Perhaps not: no message from trainer 1")


@pytest.mark.parametrize(
    ("late", "limit", "slow"),
    [
        (
            {0: 0.0, 1: 0.150},
            "The trainers' own computing: 57% of a step of 200 ms",
            "Trainer 1: the first one waits 150 ms of each step of 200 ms for it",
        ),
        (
            {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.150},
            "Waiting for other trainers: 56% of a step of 200 ms",
            "Trainer 3: the first one waits 150 ms of each step of 200 ms for it",
        ),
    ],
)
def test_a_trainer_that_holds_up_the_others(
    late: Mapping[int, float], limit: str, slow: str
) -> None:
    """It is named, with what it costs; many that wait make waiting the limit."""
    said = after(6, lambda second: reply(second, late), lambda second: reply(second, late))

    assert said["slow"] == ("warn", slow)
    assert said["limit"][1] == limit


def test_a_server_that_holds_up_all() -> None:
    """Its answers take longer than the others'."""

    def slow(second: float) -> StatusReply:
        made = reply(second)
        for trainer in made.trainers:
            trainer.report.lanes[0].wait_seconds += 10 * second * 0.030
        return made

    said = after(6, other=slow)
    assert said["slow"] == (
        "warn",
        f"Server {THERE}: it answers after 40 ms, the fastest after 10 ms",
    )


def test_nothing_moves() -> None:
    """It says for how long, and what trainers do."""
    said = after(20, *[lambda second: reply(min(second, 5))] * 2)

    assert said["limit"] == (
        "warn",
        "Nothing moves: no step was applied for 15 s; trainers say: step 50",
    )


@pytest.mark.parametrize(
    ("loss", "verdict", "text"),
    [
        (lambda second: math.nan, "bad", "No: loss of trainer 0 is nan"),
        (lambda second: 1 + second, "warn", "Doubtful: loss rises, from 5.5 to 26.5 in 30 s"),
        (lambda second: 0.5, "good", "Yes: loss stays, from 0.5 to 0.5 in 30 s"),
    ],
)
def test_the_model(loss: Callable[[float], float], verdict: str, text: str) -> None:
    """By the loss that the script reports."""

    def made(second: float) -> StatusReply:
        return reply(second, values={"loss": loss(second), "auc": 0.8})

    assert after(30, made, made)["model"] == (verdict, text)


def test_a_model_of_which_nothing_is_said() -> None:
    """Refused steps tell something; without them the answer says how to tell."""
    assert after(3)["model"][0] == "unknown" and "fleet.report" in after(3)["model"][1]

    def refusing(second: float) -> StatusReply:
        made = reply(second)
        for trainer in made.trainers:
            trainer.counts["refused_nonfinite"] = 1
        return made

    said = after(3, refusing, refusing)
    assert said["model"] == ("warn", "Doubtful: 2 steps had a NaN or an infinity")
    assert said["healthy"][0] == "warn"


def test_stopping_after_a_checkpoint() -> None:
    """What would be lost is counted in steps since then."""

    def saved(second: float) -> StatusReply:
        made = reply(second)
        if second >= 20:
            made.trainers[0].report.saves = 1
            made.trainers[0].report.since_save_seconds = second - 20 + 0.01
        return made

    assert after(30, saved)["stop"] == (
        "good",
        "Yes: a checkpoint was written 10 s and 110 steps ago",
    )
    assert after(200, saved)["stop"] == (
        "warn",
        "Save first: the last checkpoint was 3 min and 1,810 steps ago",
    )
