"""Steps that Ctrl-C interrupts, as in a notebook, in a script that goes on.

Real servers in this process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pserver.client.channel import Channel
from pserver.client.replies import Reply
from tests.support.jobs import (
    HOW,
    MODES,
    Batch,
    Eager,
    How,
    Programmed,
    Script,
    Servers,
    Trainer,
    alone,
    assert_equal,
    end_all,
    join,
    loss_of,
    made,
    sgd,
    values,
)
from trainer.communicator.communicator import Communicator
from trainer.senders import sync_lane
from trainer.senders.async_lane import AsyncSender
from trainer.senders.sync_lane import SyncSender

STEPS = 4
SAID = "step 2 was interrupted.*begin again from a checkpoint"
HERE = tuple(
    f"{Path(__file__).parents[3] / room}/" for room in ("pserver", "trainer", "transpiler")
)


@pytest.fixture(autouse=True)
def no_trainer_stays() -> Iterator[None]:
    """After a failed test, too."""
    yield
    end_all()


# ---- a script that goes on ----


def steps_of(trainer: Trainer) -> int:
    """The steps that the script is told."""
    if isinstance(trainer, Programmed):
        return trainer.executor.steps(trainer.program)
    assert isinstance(trainer, Eager)
    return int(trainer.optimizer.steps)


class Life:
    """A script that takes one step, is interrupted in the second, and goes on from the number of
    steps that it is told.

    Attributes:
        trainer: the only one of its job.
        data: its batches.
    """

    def __init__(self, script: Script, mode: str, endpoints: str, how: How) -> None:
        self._script, self._queued = script, MODES[mode].queued
        self.trainer, self.data = join(script, mode, endpoints, how=how), script.data()
        self._before = steps_of(self.trainer)  # a program's copies share them
        self.take(self.data[0])

    @property
    def steps(self) -> int:
        """Those of this job."""
        return steps_of(self.trainer) - self._before

    def take(self, batch: Batch) -> None:
        """One step, which has landed before the next, as in plain torch."""
        self.trainer.step(batch)
        if self._queued:
            self.trainer.flush()

    def interrupted(self) -> int:
        """The second step, which is; the number of steps then."""
        with pytest.raises(KeyboardInterrupt):
            self.trainer.step(self.data[1])
        return self.steps

    def go_on(self) -> None:
        """All that is left."""
        if self._queued:
            self.trainer.flush()
        while self.steps < STEPS:
            self.take(self.data[self.steps])

    def ends_right(self) -> None:
        """With the values of a script that was not interrupted."""
        self.go_on()
        assert_equal(self.trainer.leave(), alone(self._script))

    def cannot_go_on(self) -> None:
        """The next step says so, and what to do; the job can still end."""
        with pytest.raises(RuntimeError, match=SAID):
            self.go_on()
        self.trainer.leave("interrupted")


# ---- anywhere ----


class Lines:
    """Counts the lines of ours that the script's thread executes; interrupts it at one of them.

    Args:
        last: the line at which it is interrupted; 0: at none.
    """

    def __init__(self, last: int = 0) -> None:
        self.count, self._last = 0, last

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(HERE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        # signals are looked for behind calls, not at the first instruction of a ``try``, nor
        # between the last one of a ``with`` and its end
        if event == "line" and frame.f_lineno not in _compound(frame.f_code):
            self.count += 1
            if self.count == self._last:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


@functools.cache
def _compound(code: Any) -> frozenset[int]:
    """The lines of a function that begin with ``try`` or ``with``."""
    text = Path(code.co_filename).read_text().splitlines()
    lines = {line for _, _, line in code.co_lines() if line}
    return frozenset(n for n in lines if text[n - 1].lstrip().startswith(("try", "with ")))


def traced(trace: Lines, step: Callable[[], object]) -> None:
    """Takes a step under a trace."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)


@functools.cache
def _lines(model: str, mode: str, how: How, endpoints: str) -> int:
    """The lines of a second step."""
    life, trace = Life(Script(model, steps=STEPS), mode, endpoints, how), Lines()
    traced(trace, lambda: life.trainer.step(life.data[1]))
    life.ends_right()
    return trace.count


PARTS = 12


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("model", "mode"), [("dense", "sync"), ("clicks", "async, one slot"), ("dense", "async")]
)
def test_a_step_that_is_interrupted_anywhere_counts_or_does_not(
    servers: Servers, model: str, mode: str, how: How, part: int
) -> None:
    """The script ends with the values of one that was not interrupted; or the next step says that
    it cannot follow.
    """
    lines = _lines(model, mode, how, servers(1))
    life = Life(Script(model, steps=STEPS), mode, servers(1), how)
    trace = Lines(1 + lines * part // PARTS)
    with pytest.raises(KeyboardInterrupt):
        traced(trace, lambda: life.trainer.step(life.data[1]))
    try:
        life.go_on()
    except RuntimeError as error:
        assert "was interrupted, as by Ctrl-C" in str(error)
        life.trainer.leave("interrupted")
    else:
        life.ends_right()


# ---- what is left of it ----


def once(
    patched: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: int = 0,
    by: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Interrupts a call, behind so many; the later ones are made."""
    right, calls = getattr(owner, name), [0]

    def call(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raise by
        return right(*arguments, **named)

    patched.setattr(owner, name, call)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["sync", "async, one slot"])
def test_a_step_whose_answers_are_awaited_counts(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, how: How
) -> None:
    """The script is told so at once, and its next step begins behind it."""
    life = Life(Script("clicks", steps=STEPS), mode, servers(1), how)
    owner, name = (sync_lane, "wait") if mode == "sync" else (AsyncSender, "_wait")
    once(monkeypatch, owner, name)
    assert life.interrupted() == 2
    life.ends_right()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("model", "count", "owner", "name", "after"),
    [
        pytest.param("dense", 2, Channel, "push", 1, id="some gradients"),
        pytest.param("clicks", 1, Communicator, "close_step", 0, id="gradients of rows"),
    ],
)
def test_a_step_of_which_something_has_left_does_not_count(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    count: int,
    owner: type,
    name: str,
    after: int,
    how: How,
) -> None:
    """The servers forget it: the batch is taken once more."""
    life = Life(Script(model, steps=STEPS), "sync", servers(count), how)
    once(monkeypatch, owner, name, after)
    assert life.interrupted() == 1
    life.ends_right()


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        pytest.param(Channel, "push", 1, id="leaves"),
        pytest.param(Channel, "withdraw", 3, id="is withdrawn from a server"),
        pytest.param(SyncSender, "withdraw", 0, id="is withdrawn from a lane"),
    ],
)
def test_a_gradient_that_is_interrupted_on_its_way_leaves_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int
) -> None:
    """With overlap, in backward: what p.grad holds at the step counts."""
    script = Script("dense", configs={"overlap": True})
    trainer, reference = join(script, "sync", servers(2)), made("dense")
    batch = script.data()[0]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        once(patched, owner, name, after)
        for _ in range(2):
            loss_of(trainer.model, *batch).backward()
    for mine, other in zip(trainer.model.parameters(), reference.parameters(), strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    trainer.optimizer.step()
    sgd(reference.parameters()).step()
    assert_equal(trainer.leave(), values(reference))


@pytest.mark.parametrize("how", HOW)
def test_no_step_follows_one_that_some_servers_have(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    """It can be neither completed nor undone."""
    life = Life(Script("dense", steps=STEPS), "sync", servers(2), how)
    once(monkeypatch, Channel, "commit", after=1)
    assert life.interrupted() == 1
    life.cannot_go_on()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["geo", "diloco"])
def test_no_step_follows_one_that_this_trainer_has_taken_in_part(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, how: How
) -> None:
    """Its optimizer has stepped some parameters, as it steps in these modes."""
    life = Life(Script("dense", steps=STEPS), mode, servers(1), how)
    once(monkeypatch, torch.optim.SGD, "_init_group")
    assert life.interrupted() == 1
    life.cannot_go_on()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["geo", "diloco"])
def test_an_error_of_the_script_s_own_interrupts_nothing(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, how: How
) -> None:
    """As its optimizer raises it: whoever catches it may take the next step."""
    life = Life(Script("dense", steps=STEPS), mode, servers(1), how)
    once(monkeypatch, torch.optim.SGD, "_init_group", by=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        life.trainer.step(life.data[1])
    assert life.steps == 1
    life.go_on()
    life.trainer.leave()


def test_values_wait_for_an_interrupted_step(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of the servers' values takes the answers in before."""
    life = Life(Script("dense", steps=STEPS), "sync", servers(1), "eager")
    once(monkeypatch, sync_lane, "wait")
    assert life.interrupted() == 2
    expected = alone(Script("dense", steps=2), life.data[:2])
    assert_equal(life.trainer.served(), expected)
    life.trainer.leave()


def test_a_job_ends_behind_an_interrupted_step(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values have the step."""
    script = Script("dense", steps=2)
    life = Life(script, "sync", servers(1), "eager")
    once(monkeypatch, sync_lane, "wait")
    assert life.interrupted() == 2
    assert_equal(life.trainer.leave(), alone(script))


def test_a_wait_that_is_interrupted_twice_goes_on(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by who presses Ctrl-C again in the next cell."""
    life = Life(Script("dense", steps=STEPS), "sync", servers(1), "eager")
    waits = [0]

    def twice(replies: Sequence[Future[Reply]], *arguments: Any) -> Any:
        waits[0] += 1
        if waits[0] <= 2:
            raise KeyboardInterrupt
        return wait(replies, *arguments)

    monkeypatch.setattr(sync_lane, "wait", twice)
    assert life.interrupted() == 2
    with pytest.raises(KeyboardInterrupt):
        life.trainer.step(life.data[2])
    assert life.steps == 2
    life.ends_right()
