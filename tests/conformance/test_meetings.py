"""The promises of what a job's trainers do together: meetings, where they exchange texts; values,
which they reduce, gather and broadcast; and agreements, where the first one's text counts.

Three trainers of one job in this process, over its servers and over the trainers' own store.  A
new way to meet is one more of MEETINGS, a new link one more of LINKS.
"""

from __future__ import annotations

import logging
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from pserver.config import ServerConfig
from pserver.errors import JobFailed, PServerError, TrainerLost
from pserver.job.job import Job
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.transport import inprocess
from pserver.wire_pb2 import (
    FinishRequest,
    HeartbeatRequest,
    LeaveRequest,
    MeetMode,
    MeetReply,
    MeetRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of
from tests.support.load import patiently, result
from tests.support.metric_trainers import TRAINERS, AllSay, three_trainers
from tests.support.table_trainers import Servers
from tests.support.waiting import eventually
from trainer import fleet
from trainer.collective.rendezvous import Peers, rendezvous
from trainer.collective.values import KINDS, NoLink, TrainerValues
from trainer.environment.environment import Connection
from trainer.job.collective import CollectiveJob
from transpiler import DistributedStrategy

Texts = dict[int, str]
LONG = "é" * 50_000


# ---- meetings ----


class Meeting(ABC):
    """Trainers that meet.

    Attributes:
        goes_on: whether the others meet without a trainer that is lost, or has left.
        keeps: whether the text of a trainer stays that has left since.
    """

    goes_on, keeps = True, True

    def __init__(self, stack: ExitStack) -> None:
        self._pool = stack.enter_context(ThreadPoolExecutor(TRAINERS))

    def come(self, trainer: int, topic: str, text: str = "-") -> Future[Texts]:
        """Lets a trainer come, which waits for the others."""
        return self._pool.submit(self.give, trainer, topic, text)

    def all_come(self, topic: str, text: Callable[[int], str]) -> list[Texts]:
        """The texts that each of them hears."""
        come = [self.come(trainer, topic, text(trainer)) for trainer in range(TRAINERS)]
        return [result(each, DEADLINE) for each in come]

    @abstractmethod
    def give(self, trainer: int, topic: str, text: str) -> Texts:
        """The texts of all."""

    @abstractmethod
    def agree(self, trainer: int, topic: str, text: str) -> str | None:
        """The first trainer's text about a topic."""

    @abstractmethod
    def waits_for(self, trainer: int) -> list[int]:
        """For whom a trainer says that it waits."""

    @abstractmethod
    def lose(self, trainer: int) -> None:
        """Ends a trainer without a word."""

    @abstractmethod
    def leave(self, trainer: int, failure: str = "") -> None:
        """Ends a trainer, which says so."""


class Barrier(Meeting):
    """Over server 0, whose clock the test moves."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self._clock = Clock()
        listener = inprocess.listen(lambda stream: handle(stream, self.job, WorkingStreams()))
        stack.callback(listener.close, 0.0)
        config = ServerConfig(heartbeat_timeout_seconds=DEADLINE)
        self.job = Job(config, {"inprocess": listener.port}, self._clock)
        stack.callback(self.job.lifecycle.drain)
        plan = plan_of(TRAINERS, "async")
        trainers = [Trainer(self.job, listener, plan, number) for number in range(TRAINERS)]
        self.sessions = [each.session for each in trainers]
        self._left = set[int]()

    def asked(self, trainer: int, topic: str, text: str) -> MeetReply:
        """One call, which waits for a moment."""
        session = self.sessions[trainer]
        return self.job.meet(MeetRequest(session=session, key=topic, text=text))

    def give(self, trainer: int, topic: str, text: str) -> Texts:
        return dict(self.passed(trainer, topic, text).texts)

    def passed(self, trainer: int, topic: str, text: str) -> MeetReply:
        """Asks until all have come, as a client does."""
        while trainer not in self._left:
            if (reply := self.asked(trainer, topic, text)).over:
                return reply
        raise TrainerLost("it has left while it waited")

    def agree(self, trainer: int, topic: str, text: str) -> str | None:
        session, mode = self.sessions[trainer], MeetMode.MEET_FIRST
        asked = MeetRequest(session=session, mode=mode, key=topic, text=text)
        return next(iter(self.job.meet(asked).texts.values()), "")

    def waits_for(self, trainer: int) -> list[int]:
        waits = self.job.status(StatusRequest()).waits
        return [rank for each in waits if each.trainer_id == trainer for rank in each.for_whom]

    def lose(self, trainer: int) -> None:
        self._clock.time += DEADLINE + 1
        for other in range(TRAINERS):
            if other != trainer:
                self.job.heartbeat(HeartbeatRequest(session=self.sessions[other]))
        self.job.tick()

    def leave(self, trainer: int, failure: str = "") -> None:
        session = self.sessions[trainer]
        if not failure:
            self.job.finish(FinishRequest(session=session))
        self._left.add(trainer)
        self.job.leave(LeaveRequest(session=session, success=not failure, failure=failure))


class Round(Barrier):
    """Over server 0, without a name: whoever is there."""

    keeps = False

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.after = [0] * TRAINERS

    def asked(self, trainer: int, topic: str, text: str) -> MeetReply:
        session, after = self.sessions[trainer], self.after[trainer]
        asked = MeetRequest(session=session, mode=MeetMode.MEET_ROUND, text=text, number=after)
        return self.job.meet(asked)

    def give(self, trainer: int, topic: str, text: str) -> Texts:
        reply = self.passed(trainer, topic, text)
        self.after[trainer] = reply.number
        return dict(reply.texts)


@contextmanager
def captured(name: str) -> Iterator[list[str]]:
    """The messages that a module logs."""
    found: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(heard)
    try:
        yield found
    finally:
        log.removeHandler(heard)


class Exchange(Meeting):
    """Over the trainers' store."""

    goes_on = False

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        limit = timedelta(seconds=DEADLINE)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._store = store  # ends with this

        def met(rank: int) -> Peers:
            return rendezvous(
                store.clone(),
                rank,
                [""] * TRAINERS,
                Connection(start_timeout_seconds=DEADLINE),
                ends_process=False,
            )

        comes = [self._pool.submit(met, rank) for rank in range(TRAINERS)]
        self.peers = [result(each, DEADLINE) for each in comes]
        for peers in self.peers:
            stack.callback(peers.close, "the test is over")
        self._said = stack.enter_context(captured("trainer.collective.rendezvous"))

    def give(self, trainer: int, topic: str, text: str) -> Texts:
        return dict(enumerate(self.peers[trainer].meet(topic, text, range(TRAINERS))))

    def agree(self, trainer: int, topic: str, text: str) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trainer.job.collective.current_peers", lambda: self.peers[trainer])
            return CollectiveJob.agree(cast(Any, None), topic, text)

    def waits_for(self, trainer: int) -> list[int]:
        said = [each.partition(f": trainer {trainer} waits for ")[2] for each in self._said]
        return [int(rank) for rank in re.findall("trainer ([0-9]+)", " ".join(said))]

    def lose(self, trainer: int) -> None:
        watch = self.peers[trainer].membership
        assert watch is not None
        for each in watch._peers.values():
            each.connection.shutdown(socket.SHUT_RDWR)

    def leave(self, trainer: int, failure: str = "") -> None:
        if failure:
            self.peers[trainer].close("it has failed", failure)
        self.peers[trainer].leave("it has finished")


MEETINGS: dict[str, type[Meeting]] = {
    "barrier": Barrier,
    "round": Round,
    "trainers' store": Exchange,
}
SHORT = 0.05  # seconds that a call waits


@pytest.fixture(params=MEETINGS)
def meeting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """Each in turn; calls end soon, and waits are told soon."""
    monkeypatch.setattr("pserver.timeouts.LONG_POLL_SECONDS", SHORT)
    monkeypatch.setattr("pserver.polling.NOTICE_SECONDS", SHORT)
    with ExitStack() as stack:
        yield MEETINGS[request.param](stack)


def error_of(come: Future[Texts]) -> PServerError:
    """The error with which a meeting ends for a trainer."""
    error = patiently(come.exception, DEADLINE)
    assert isinstance(error, PServerError)
    return error


def test_each_hears_what_all_have_said(meeting: Meeting) -> None:
    """By trainer; long texts, and such that are no ASCII."""
    said = [f"of {trainer}: {LONG[: 10**trainer]}" for trainer in range(TRAINERS)]

    assert meeting.all_come("1: epoch", said.__getitem__) == [dict(enumerate(said))] * TRAINERS


def test_meetings_one_after_another_do_not_mix(meeting: Meeting) -> None:
    """However fast each trainer goes on to the next one."""

    def all_of(trainer: int) -> list[Texts]:
        return [meeting.give(trainer, f"{n}: x", f"{trainer} in {n}") for n in range(1, 13)]

    with ThreadPoolExecutor(TRAINERS) as pool:
        come = [pool.submit(all_of, trainer) for trainer in range(TRAINERS)]
        heard = [result(each, DEADLINE) for each in come]
    expected = [{t: f"{t} in {n}" for t in range(TRAINERS)} for n in range(1, 13)]

    assert heard == [expected] * TRAINERS


@pytest.mark.parametrize("last", range(TRAINERS))
def test_nobody_passes_before_all_have_come(meeting: Meeting, last: int) -> None:
    """Each that waits says for whom."""
    first, second = (trainer for trainer in range(TRAINERS) if trainer != last)
    come = [meeting.come(first, "1: x", "early")]
    eventually(lambda: set(meeting.waits_for(first)) >= {second, last})
    come.append(meeting.come(second, "1: x", "later"))
    eventually(lambda: meeting.waits_for(second)[-1:] == [last])
    assert not any(each.done() for each in come)
    come.append(meeting.come(last, "1: x", "at last"))

    expected = {first: "early", second: "later", last: "at last"}
    assert [result(each, DEADLINE) for each in come] == [expected] * TRAINERS


@pytest.mark.parametrize("before", [False, True], ids=["meanwhile", "before"])
def test_a_lost_trainer_is_not_awaited_or_fails_all(meeting: Meeting, before: bool) -> None:
    """Lost before the meeting, or while the others wait for it."""
    if before:
        meeting.lose(2)
    come = [meeting.come(trainer, "1: x", f"of {trainer}") for trainer in range(2)]
    if not before:
        eventually(lambda: all(2 in meeting.waits_for(trainer) for trainer in range(2)))
        meeting.lose(2)

    if meeting.goes_on:
        assert [result(each, DEADLINE) for each in come] == [{0: "of 0", 1: "of 1"}] * 2
    else:
        assert all("trainer 2" in str(error_of(each)) for each in come)


def test_a_trainer_that_has_finished_is_not_awaited_or_missed(meeting: Meeting) -> None:
    """Over servers its script may end before the others'; in a job of trainers alone all of them
    make the same calls.
    """
    come = [meeting.come(trainer, "1: x", f"of {trainer}") for trainer in range(2)]
    eventually(lambda: all(2 in meeting.waits_for(trainer) for trainer in range(2)))
    meeting.leave(2)

    if isinstance(meeting, Barrier):
        assert [result(each, DEADLINE) for each in come] == [{0: "of 0", 1: "of 1"}] * 2
    else:
        for each in come:
            assert isinstance(error_of(each), TrainerLost)
            assert str(error_of(each)) == "trainer 2 has left the job: it has finished"


def test_a_text_stays_when_its_trainer_leaves(meeting: Meeting) -> None:
    """At a meeting of a name; a round is of those who are there."""
    early = meeting.come(2, "1: x", "of 2")
    eventually(lambda: set(meeting.waits_for(2)) >= {0, 1})
    meeting.leave(2)
    come = [meeting.come(trainer, "1: x", f"of {trainer}") for trainer in range(2)]

    expected = {0: "of 0", 1: "of 1", **({2: "of 2"} if meeting.keeps else {})}
    assert [result(each, DEADLINE) for each in come] == [expected] * 2
    with suppress(TrainerLost):  # it has left
        assert result(early, DEADLINE) == expected


def test_a_failure_of_one_reaches_those_who_wait(meeting: Meeting) -> None:
    """With its own words."""
    come = [meeting.come(trainer, "1: x") for trainer in range(2)]
    eventually(lambda: all(2 in meeting.waits_for(trainer) for trainer in range(2)))
    meeting.leave(2, "ValueError: no data")

    for each in come:
        error = error_of(each)
        assert isinstance(error, JobFailed)
        assert "trainer 2" in str(error) and "ValueError: no data" in str(error)


@pytest.mark.parametrize("meeting", ["barrier", "round"], indirect=True)
def test_the_same_call_again_has_the_same_answer(meeting: Barrier) -> None:
    """Of a trainer that has not heard the first one: what it says now changes nothing, also when
    another trainer is further.
    """
    heard = meeting.all_come("1: x", str)
    after = meeting.come(0, "2: x", "further")
    eventually(lambda: meeting.waits_for(0) == [1, 2])
    if isinstance(meeting, Round):
        meeting.after[1:] = [0, 0]
    again = [meeting.give(trainer, "1: x", "again") for trainer in (1, 2)]

    assert again == heard[1:] and not after.done()
    come = [after, *(meeting.come(trainer, "2: x", "too") for trainer in (1, 2))]
    assert [result(each, DEADLINE) for each in come] == [{0: "further", 1: "too", 2: "too"}] * 3


def test_the_first_text_about_a_topic_is_everyones(meeting: Meeting) -> None:
    """The first text counts, of any trainer, however many come at once; topics do not mix."""
    assert meeting.agree(1, "seed", "5") == "5"
    assert [meeting.agree(trainer, "seed", "7") for trainer in range(TRAINERS)] == ["5"] * 3
    assert meeting.agree(0, "folder", "7") == "7"


# ---- values ----


FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0, dtype=values.dtype),
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "prod": lambda values: values.prod(0, dtype=values.dtype),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
LINKS = {
    "alone": None,
    "servers": {"a_sync": False, "a_sync_configs": {"lost_trainer": "stop"}},
    "servers that outlive trainers": {"a_sync": True},
}


@pytest.fixture(scope="module", params=LINKS)
def all_say(request: pytest.FixtureRequest, servers: Servers) -> Iterator[AllSay]:
    """Lets each trainer of a job say something over each link in turn, and gives what it hears."""
    settings = LINKS[request.param]
    if settings is None:
        yield lambda say: [say(TrainerValues(NoLink()))]
        return
    strategy = DistributedStrategy()
    for name, value in settings.items():
        setattr(strategy, name, value)
    with three_trainers(servers, strategy) as say:
        yield say


@pytest.mark.parametrize("op", KINDS)
def test_a_reduction_is_that_of_all_values(all_say: AllSay, op: str) -> None:
    """Of every dtype: equal on all trainers to the bit, and equal to the same reduction of the
    stacked values; what was given stays.
    """
    for dtype in DTYPES:
        if op == "mean" and not dtype.is_floating_point:
            with pytest.raises(TypeError, match="has sum, max, min, prod, got op 'mean'"):
                all_say(
                    lambda values, dtype=dtype: values.all_reduce(torch.ones(2, dtype=dtype), op)
                )
            continue
        generator = torch.Generator().manual_seed(5)
        stacked = torch.rand(TRAINERS, 5, 3, generator=generator).mul(5).to(dtype)
        kept = stacked.clone()
        found = all_say(lambda values, own=stacked: values.all_reduce(own[values.rank].t(), op))
        parts = stacked[: len(found)]
        wide = parts.double() if dtype.is_floating_point else parts

        assert all(torch.equal(each, found[0]) for each in found)
        assert found[0].dtype == dtype and found[0].shape == (3, 5)
        torch.testing.assert_close(found[0].t(), FOLDS[op](wide).to(dtype))
        found[0].zero_()
        assert torch.equal(stacked, kept)


def test_integers_are_exact(all_say: AllSay) -> None:
    """Beyond what a float64 holds; what the dtype cannot hold is said, not wrapped."""
    big = 2**61 + 1
    found = all_say(lambda values: values.all_reduce(torch.tensor(big)))
    assert [int(each) for each in found] == [len(found) * big] * len(found)
    if len(found) > 1:
        with pytest.raises(OverflowError, match="a sum that int8 holds, got 300"):
            all_say(lambda values: values.all_reduce(torch.tensor([100, 1], dtype=torch.int8)))


def test_a_nan_of_one_is_a_nan(all_say: AllSay) -> None:
    """It stays on its device in every reduction; any and all of booleans are max and min."""

    def say(values: TrainerValues) -> list[Tensor]:
        last = values.rank == values.size - 1
        own = torch.tensor([1.0, torch.nan if last else 2.0])
        flag = torch.tensor([True, last])
        return [values.all_reduce(own, op) for op in KINDS] + [
            values.all_reduce(flag, "max"),
            values.all_reduce(flag, "min"),
        ]

    heard = all_say(say)
    for *reduced, anywhere, everywhere in heard:
        assert [each.isnan().tolist() for each in reduced] == [[False, True]] * len(KINDS)
        assert anywhere.tolist() == [True, True]
        assert everywhere.tolist() == [True, len(heard) == 1]


def test_lists_have_parts_of_different_lengths(all_say: AllSay) -> None:
    """A trainer without a sample gives its part, too; what was given stays."""
    parts = [torch.arange(3.0).bfloat16(), torch.zeros(0).bfloat16(), torch.ones(5).bfloat16()]
    heard = all_say(lambda values: values.all_gather(parts[values.rank]))
    for found in heard:
        assert len(found) == len(heard)
        assert all(torch.equal(one, two) for one, two in zip(found, parts, strict=False))
        found[0].zero_()
    assert parts[0].tolist() == [0, 1, 2]
    scalars = all_say(lambda values: values.all_gather(torch.tensor(values.rank == 2)))
    expected = [False, False, True][: len(heard)]
    assert [[bool(each) for each in found] for found in scalars] == [expected] * len(heard)


def test_objects_of_one_and_of_all(all_say: AllSay) -> None:
    """Equal everywhere; their own trainer keeps the object itself."""
    told: list[dict[str, Any]] = [
        {"rank": rank, "values": (rank * 0.1, torch.full((2,), rank))} for rank in range(TRAINERS)
    ]

    def say(values: TrainerValues) -> Any:
        return values.broadcast_object(told[values.rank], values.size // 2)

    found = all_say(say)
    middle = len(found) // 2
    assert found[middle] is told[middle]
    assert all(repr(each) == repr(told[middle]) for each in found)
    lists = all_say(lambda values: values.all_gather_object(np.full(values.rank, 7)))
    expected = list(range(len(found)))
    assert [[len(each) for each in got] for got in lists] == [expected] * len(found)


def test_different_calls_are_refused_naming_both(all_say: AllSay) -> None:
    """Shapes, dtypes, ops and calls: every trainer hears which trainer makes which; the next call
    is as good as any.
    """

    def differ(act: Callable[[TrainerValues], Any]) -> str:
        def say(values: TrainerValues) -> str:
            if values.size == 1:
                return "alone"
            with pytest.raises(ValueError) as raised:
                act(values)
            return str(raised.value)

        (said,) = set(all_say(say))
        return said

    said = differ(lambda values: values.all_reduce(torch.zeros(2 + (values.rank == 2), 4)))
    assert said in (
        "alone",
        "expected the same call on all 3 trainers, got trainer 0: all_reduce(float32 [2, 4], "
        "'sum'); trainer 2: all_reduce(float32 [3, 4], 'sum')",
    )
    if said != "alone":
        said = differ(lambda v: v.all_reduce(torch.zeros(2), "sum" if v.rank else "max"))
        assert "trainer 0: all_reduce(float32 [2], 'max'); trainer 1" in said
        said = differ(lambda v: v.all_gather(torch.zeros(2, 3 + v.rank)))
        assert "trainer 1: all_gather(float32 [2, 4])" in said
        said = differ(
            lambda v: (
                v.broadcast_object(1) if v.rank else v.all_reduce(torch.zeros(1, dtype=torch.int8))
            )
        )
        words = "got trainer 0: all_reduce(int8 [1], 'sum'); trainer 1: broadcast_object(src=0)"
        assert words in said
    found = all_say(lambda values: float(values.all_reduce(torch.ones(()))))
    assert found == [float(len(found))] * len(found)


def test_a_call_that_cannot_be_made_is_refused_here(all_say: AllSay) -> None:
    """The others do not wait for a trainer that could not say it."""

    def say(values: TrainerValues) -> list[str]:
        calls: list[Callable[[], Any]] = [
            lambda: values.broadcast_object(1, src=3),
            lambda: values.all_reduce(torch.ones(1), "avg"),
            lambda: values.all_reduce(0.5),  # type: ignore[arg-type]
        ]
        found = []
        for call in calls:
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            found.append(str(raised.value))
        return found

    for src, op, kind in all_say(say):
        assert re.fullmatch("broadcast_object: src: expected a trainer, 0 to [02], got 3", src)
        assert op == "all_reduce: op: expected one of sum, mean, max, min, prod, got 'avg'"
        assert kind == "all_reduce: expected a tensor, got float"


def test_alone_a_process_has_its_own_values() -> None:
    """With fleet's calls; before it has joined its servers they are refused."""
    fleet.init()
    value = torch.tensor([1.0, 2.0])

    assert torch.equal(fleet.all_reduce(value, "mean"), value)
    assert torch.equal(fleet.all_gather(value)[0], value)
    assert fleet.broadcast_object({"a": 1}) == {"a": 1} and fleet.all_gather_object([1]) == [[1]]
    fleet.finish()
    role = fleet.UserDefinedRoleMaker(1, worker_num=2, server_endpoints=["127.0.0.1:1"])
    fleet.init(role)
    with pytest.raises(RuntimeError, match="call fleet.distributed_optimizer first"):
        fleet.all_reduce(torch.ones(1))
