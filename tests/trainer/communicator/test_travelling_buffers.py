"""Whose buffers all trainers have, by ``a_sync_configs["buffers"]``: batch norm's running
statistics in every mode, against real servers in this process; in main memory and on an emulated
device.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from pserver.errors import CorruptFrame, Refused
from pserver.lane.rounds import SharedBuffers
from pserver.transport.arrays import Assignment, whole_values
from tests.support.devices import Flags, on_a_device
from tests.support.normed_jobs import (
    MODES,
    data,
    finished,
    same,
    statistics,
    together,
    trainers,
)
from tests.support.table_trainers import Servers
from tests.support.threads import at_once
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Lane
from transpiler.plan.planner import plan_parameters, uniform

FLOATS = ("norm.running_mean", "norm.running_var", "seen")


@pytest.fixture(params=["in main memory", "on a device"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the models."""
    if request.param == "on a device":
        on_a_device(monkeypatch)
        monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)


def hand_mean(of: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of floating-point buffers; the others are trainer 0's."""
    return {
        name: torch.stack([each[name] for each in of]).mean(0) if name in FLOATS else of[0][name]
        for name in of[0]
    }


@pytest.mark.parametrize("count", [2, 3])
def test_trainers_of_a_sync_step_evaluate_alike_after_it(servers: Servers, count: int) -> None:
    """To the bit: each has trainer 0's running statistics."""
    jobs = trainers(servers(1), count, "sync")
    for number in range(3):
        own = together(jobs, 1, number)
        found = []
        for each in jobs:
            each.model.eval()
            with torch.no_grad():
                found.append(each.model(data(7, 7)))
        assert all(torch.equal(one, found[0]) for one in found)
        assert all(same(statistics(each.model), own[0]) for each in jobs)
    finished(jobs)


@pytest.mark.parametrize("count", [2, 3])
def test_a_sync_step_leaves_the_mean(servers: Servers, count: int) -> None:
    """Of that step's trainers, on all of them, computed here by hand."""
    jobs = trainers(servers(2), count, "sync", buffers="mean")
    for number in range(3):
        own = together(jobs, 1, number)
        for each in jobs:
            now = statistics(each.model)
            assert same(now, statistics(jobs[0].model))
            for name, value in hand_mean(own).items():
                torch.testing.assert_close(now[name], value)
    finished(jobs)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "sync"])
def test_where_steps_come_one_by_one_the_mean_is_of_what_each_has_sent_last(
    servers: Servers, mode: str, count: int
) -> None:
    """And of buffers that are no floating-point numbers trainer 0's."""
    jobs = trainers(servers(1), count, mode, buffers="mean")
    own = together(jobs, 1)  # the last step is the only one: nothing has landed before it
    ended = finished(jobs)
    for each in ended:
        assert same(each, ended[0])
        for name, value in hand_mean(own).items():
            torch.testing.assert_close(each[name], value)


@pytest.mark.parametrize("mode", MODES)
def test_with_the_mean_trainer_0s_counts_are_its_own(servers: Servers, mode: str) -> None:
    """Answers bring its counts of some steps ago, which do not land: none is lost."""
    jobs = trainers(servers(1), 2, mode, buffers="mean")
    for number in range(5):
        together(jobs, 1, number)
    ended = finished(jobs)
    assert [each["norm.num_batches_tracked"] for each in ended] == [5, 5]


@pytest.mark.observes("a_sync_configs.buffers")
@pytest.mark.parametrize("mode", MODES)
def test_with_own_nothing_travels(servers: Servers, mode: str) -> None:
    """Each trainer ends with what its own forwards have left."""
    jobs = trainers(servers(1), 2, mode, buffers="own")
    own = together(jobs, 3)
    ended = finished(jobs)
    assert all(same(one, other) for one, other in zip(own, ended, strict=True))
    assert not same(ended[0], ended[1])


def _bytes(of: Any, name: str) -> dict[str, int]:
    found: dict[str, int] = of.job.communicator.variable_bytes()[name]
    return found


def test_only_what_a_forward_changes_travels(servers: Servers) -> None:
    """By the bytes of each buffer on the wire."""
    jobs = trainers(servers(1), 2, "sync")
    before = [_bytes(each, "mask") for each in jobs]
    together(jobs, 3)
    assert [_bytes(each, "mask") for each in jobs] == before
    sent = [_bytes(each, "norm.running_mean") for each in jobs]
    assert sent[0]["bytes_out"] - sent[1]["bytes_out"] >= 3 * 16
    assert sent[1]["bytes_in"] - sent[0]["bytes_in"] == 3 * 16
    finished(jobs)


@pytest.mark.parametrize("whose", ["trainer0", "mean", "own"])
def test_one_trainer_sends_no_buffer(servers: Servers, whose: str) -> None:
    """Whatever the setting."""
    (job,) = trainers(servers(1), 1, "sync", buffers=whose)
    before = _bytes(job, "norm.running_mean")
    own = together([job], 3)
    assert _bytes(job, "norm.running_mean") == before
    assert same(statistics(job.model), own[0])
    finished([job])


def test_a_flush_brings_the_last_ones(servers: Servers) -> None:
    """Without a step, for an evaluation of an async job."""
    jobs = trainers(servers(1), 2, "async")
    own = together(jobs, 4)
    for each in jobs:  # trainer 0 first: its last step is on the servers
        each.optimizer.flush()
    assert all(same(statistics(each.model), own[0]) for each in jobs)
    finished(jobs)


def test_a_skipped_step_brings_its_buffers(servers: Servers) -> None:
    """As in one process, whose forward has changed them whatever becomes of the step."""
    jobs = trainers(servers(1), 2, "sync")

    def overflow(number: int) -> dict[str, Tensor]:
        each = jobs[number]
        each.model(data(number, 9)).sum().backward()
        each.optimizer.found_inf = torch.ones(1)
        each.optimizer.step()
        return statistics(each.model)

    ended = at_once(lambda: overflow(0), lambda: overflow(1))
    assert same(ended[0], ended[1])
    assert ended[1]["norm.num_batches_tracked"] == 1
    finished(jobs)


@pytest.mark.parametrize("whose", ["trainer0", "mean"])
def test_in_a_k_step_mode_what_servers_hold_is_saved(servers: Servers, whose: str) -> None:
    """Buffers of the last exchange, as parameters are: trainer 0's own have run ahead."""
    jobs = trainers(servers(2), 2, "diloco", buffers=whose)
    own = together(jobs, 2)
    exchanged = hand_mean(own) if whose == "mean" else own[0]
    together(jobs, 1, 2)
    for each in jobs:
        served = each.job.served()
        assert not same(statistics(each.model), exchanged)
        for name, value in exchanged.items():
            torch.testing.assert_close(served[name], value)
    finished(jobs)


def test_buffers_go_with_the_first_lane_of_gradients(servers: Servers) -> None:
    """Beside k-step parameters, after each sync step."""
    modes = {"layer.*": "geo", "*": "sync"}
    jobs = trainers(servers(2), 2, "sync", modes=modes, k_steps=50)
    for number in range(2):
        own = together(jobs, 1, number)
        assert all(same(statistics(each.model), own[0]) for each in jobs)
    finished(jobs)


def test_the_default_is_in_no_fingerprint() -> None:
    """Plans of before keep theirs; another choice is one that all processes must make."""
    lanes = {whose: Lane("sync", buffers=whose) for whose in ("trainer0", "mean", "own")}
    named = [("w", (3, 2), "float32", 0)]
    plans = {
        whose: plan_parameters(
            named, [Rule("sgd", {"lr": 0.1})], lanes=uniform(lane), trainers=2, servers=1
        )
        for whose, lane in lanes.items()
    }
    assert not any("buffers" in fact for fact in plans["trainer0"].manifest())
    assert plans["mean"].manifest()["lane 0: buffers"] == "'mean'"
    assert len({plan.fingerprint() for plan in plans.values()}) == 3


def test_a_step_brings_only_buffers_that_its_trainer_may_say() -> None:
    """What a stranger sends is refused, and assigns nothing."""
    held = {"mean": torch.zeros(2), "count": torch.zeros((), dtype=torch.int64)}
    locks = {name: threading.Lock() for name in held}
    shared = {whose: SharedBuffers(whose, True, held, locks) for whose in ("mean", "trainer0")}
    shared["mean"].check(1, 1, {"mean": torch.ones(2)})
    shared["trainer0"].check(1, 0, held)
    for whose, name in (("mean", "count"), ("trainer0", "mean"), ("mean", "weight")):
        with pytest.raises(Refused, match=f"step 3 of trainer 1: expected .*{name}"):
            shared[whose].check(3, 1, {name: torch.ones(2)})
    with pytest.raises(Refused, match="'own'"):
        SharedBuffers("own", True, held, locks).check(3, 0, held)
    with pytest.raises(CorruptFrame, match="whole buffer 'mean'"):
        whole_values(["mean"], {"mean": Assignment(torch.ones(1), torch.zeros(1).long())})
