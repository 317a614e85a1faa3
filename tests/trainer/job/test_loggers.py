"""``fleet.init(loggers=[...])``: a job's values, written by a thread that no step waits for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.threads import PATIENCE
from trainer import fleet
from trainer.environment.environment import Role
from trainer.job import loggers as module
from trainer.job.job import Reported, present
from trainer.job.loggers import Loggers


class Kept:
    """A logger that keeps what it gets.

    Attributes:
        rows: its calls.
        ends: how often it was ended.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ends = 0
        self.thread = threading.get_ident()
        self.logged = threading.Event()

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))
        self.logged.set()

    def finish(self) -> None:
        self.ends += 1

    @property
    def reported(self) -> list[tuple[int, dict[str, float]]]:
        return [(step, v) for step, v in self.rows if "pserver/steps" not in v]


def train(endpoints: str, loggers: Any, steps: int = 3) -> None:
    """A job of one trainer that reports each step."""
    role = None
    if endpoints:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, loggers=loggers)
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        fleet.report(samples=8, loss=0.5**step)


@pytest.mark.parametrize("count", [0, 2])
def test_the_leader_logs_reports_and_metrics(servers: Callable[[int], str], count: int) -> None:
    """In order, at the job's steps, in one thread that is not the script's; what was opened is
    ended with the job, and what the script has opened is left to it.
    """
    given, opened = Kept(), list[Kept]()

    def opens() -> Kept:
        opened.append(Kept())
        return opened[-1]

    train(servers(count) if count else "", [given, opens])
    fleet.finish()

    (made,) = opened
    expected = [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 0.25})]
    assert made.reported == given.reported == expected
    step, metrics = made.rows[-1]
    assert (step, metrics["pserver/steps"], metrics["pserver/samples"]) == (3, 3.0, 24.0)
    assert metrics["pserver/steps_per_second"] > 0 and metrics["pserver/samples_per_second"] > 0
    assert ("pserver/bytes_out" in metrics) == bool(count)
    assert (made.ends, given.ends) == (1, 0)
    assert made.thread != threading.get_ident()


def test_a_class_is_opened_like_a_function() -> None:
    """Though it has ``log``, too."""
    found = list[Kept]()

    class Counted(Kept):
        def __init__(self) -> None:
            super().__init__()
            found.append(self)

    train("", [Counted])
    fleet.finish()

    assert [len(each.reported) for each in found] == [3] and found[0].ends == 1


@pytest.mark.parametrize("where", ["open", "log", "end"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no network"), "OSError: no network (test_loggers.py:"),
        (SystemExit(3), "RuntimeError: it raised SystemExit(3) (loggers.py:"),
    ],
    ids=["raises", "exits"],
)
def test_a_logger_that_raises_is_ended_and_said_once(
    where: str, error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Training and the other loggers continue; it is counted where it was in use."""
    calls = []

    class Failing:
        def __init__(self) -> None:
            self.step("open")

        def step(self, now: str) -> None:
            calls.append(now)
            if now == where:
                raise error

        def log(self, values: dict[str, float], step: int) -> None:
            self.step("log")

        def finish(self) -> None:
            self.step("end")

    kept = Kept()
    train("", [Failing, kept])
    loggers = present().loggers
    assert isinstance(loggers, Loggers)
    fleet.finish()

    (text,) = [m for m in caplog.messages if "a logger: off from now on" in m]
    assert f"training continues: {words}" in text
    assert loggers.failures == (where != "end")
    (metric,) = loggers.collect()
    assert [sample.value for sample in metric.samples] == [loggers.failures]
    assert calls == {"open": ["open"], "log": ["open", "log", "end"]}.get(where, calls)
    assert len(kept.reported) == 3


def test_what_opens_no_logger_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """With what it gave; the other loggers continue."""
    kept = Kept()
    train("", [lambda: 7, kept])
    fleet.finish()

    (text,) = [m for m in caplog.messages if "a logger: off from now on" in m]
    assert "TypeError: expected a logger with log(values, step), got 7" in text
    assert len(kept.reported) == 3


def test_a_slow_logger_holds_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps and reports go on while it hangs; what waits beyond the queue's room is dropped, and
    the job's end leaves it behind, and the process's end waits no second time.
    """
    monkeypatch.setattr(module, "QUEUED", 2)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    begun, free = threading.Event(), threading.Event()

    class Hanging:
        def log(self, values: dict[str, float], step: int) -> None:
            begun.set()
            free.wait(PATIENCE)

    train("", [Hanging()], steps=1)
    assert begun.wait(PATIENCE)
    for _ in range(5):
        fleet.report(loss=1.0)
    loggers = present().loggers
    assert isinstance(loggers, Loggers)
    fleet.finish()
    loggers.close()  # as at the process's end
    free.set()

    assert [m for m in caplog.messages if "2 reports wait, further ones are dropped" in m] != []
    assert len([m for m in caplog.messages if "not done within" in m]) == 1


def test_metrics_come_between_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every some seconds, without a report."""
    kept = Kept()
    train("", [], steps=1)
    loggers = Loggers(present(), [kept], every_seconds=0.01)
    assert kept.logged.wait(PATIENCE)
    loggers.close()
    loggers.close()

    step, values = kept.rows[0]
    assert step == 1 and values["pserver/steps"] == 1.0 and values["pserver/samples"] == 8.0


def test_steps_never_decrease() -> None:
    """Though metrics are due while reports wait for a slow logger: W&B drops what comes late."""
    due = threading.Event()

    class Slow(Kept):
        def log(self, values: dict[str, float], step: int) -> None:
            super().log(values, step)
            due.wait(PATIENCE)

    slow = Slow()
    train("", [])
    loggers = Loggers(present(), [slow], every_seconds=1e-9)
    model, optimizer = present().models[0], present().optimizers[0]
    assert slow.logged.wait(PATIENCE)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        loggers.add({"loss": 1.0})
    due.set()
    loggers.close()

    steps = [step for step, _ in slow.rows]
    assert steps == sorted(steps) and steps[0] == 3 and steps[-1] == 8
    between = [step for step, values in slow.rows if "pserver/steps" in values and step < 8]
    assert set(between) >= {4, 5, 6, 7}
    assert slow.reported == [(step, {"loss": 1.0}) for step in range(4, 9)]


class Standing(SimpleNamespace):
    """A trainer's job, as its loggers see it.

    Attributes:
        leads: what it says to whoever asks whether this trainer leads, in turn.
    """

    @property
    def is_first(self) -> bool:
        return next(self.leads)


@pytest.mark.parametrize("number", [0, 1])
def test_a_new_leader_opens_a_run_of_its_own(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Until then it opens none, and its reports go nowhere; that it does is said once.  Trainer 0
    is one that was started again while another one led, of which it knows when it has joined.
    """
    opened = list[Kept]()

    def opens() -> Kept:
        opened.append(Kept())
        return opened[-1]

    job: Any = Standing(
        leads=repeat(number == 0),
        role=SimpleNamespace(trainer_id=number, role=Role.TRAINER),
        communicator=None,
        optimizers=[],
        reported=Reported(),
        metrics=lambda: {"steps": 0.0},
    )
    Loggers(job, [opens]).close()
    job.leads, job.communicator = iter([False, False]), object()
    loggers = Loggers(job, [opens])
    loggers.add({"loss": 3.0})
    loggers.close()
    assert not opened
    job.leads = chain([False], repeat(True))
    loggers = Loggers(job, [opens])
    for loss in (3.0, 2.0, 1.0):
        loggers.add({"loss": loss})
    loggers.close()

    assert [[v for _, v in each.reported] for each in opened] == [[{"loss": 2.0}, {"loss": 1.0}]]
    said = f"trainer {number} is the leader now, and opens the loggers"
    assert [m for m in caplog.messages if m == said] == [said]


WRONG = [
    (Kept(), "loggers: expected a list, got Kept"),
    ("csv", "loggers: expected a list, got str"),
    ({"a": 1}, "loggers: expected a list, got dict"),
    ([3], "loggers: expected objects with log(values, step), or functions that open one, got 3"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_is_no_logger_is_refused(given: Any, said: str) -> None:
    """At the start of the job; then there is no job."""
    with pytest.raises(TypeError, match=re.escape(said)):
        fleet.init(loggers=given)
    with pytest.raises(RuntimeError):
        fleet.report(loss=1.0)
