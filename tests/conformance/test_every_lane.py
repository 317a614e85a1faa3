"""The promises of every lane: of each mode, eagerly and as a program, of each model, on one server
or two.  ``make check-lanes`` runs all combinations.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import JobFailed, NonFinite, Outlier
from pserver.membership.watermark import WARM_UP
from pserver.service.server import Server
from tests.support.jobs import (
    HOW,
    MODELS,
    MODES,
    WITH_TABLES,
    Batch,
    Script,
    Servers,
    Trainer,
    Values,
    adam,
    alone,
    assert_equal,
    end_all,
    join,
    loss_of,
    made,
    run,
    sgd,
    trained,
    values,
)
from tests.support.matrix import crossed
from tests.support.script_writes import WRITES
from tests.support.threads import at_once
from trainer import fleet
from transpiler import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue


@pytest.fixture(autouse=True)
def no_trainer_stays() -> Iterator[None]:
    """After a failed test, too."""
    yield
    end_all()


class Lane(str):
    """A mode and a path, as ``"geo/program"``."""

    @property
    def mode(self) -> str:
        return self.split("/")[0]

    @property
    def how(self) -> str:
        return self.split("/")[1]


LANES = [Lane(f"{mode}/{how}") for mode, how in itertools.product(MODES, HOW)]
OF_GRADIENTS = [lane for lane in LANES if not MODES[lane.mode].own_steps]
COUNTS = (1, 2)
NAN, HUGE = float("nan"), 1e6


def script_of(model: str, **settings: object) -> Script:
    """Adam where torch has it for the model, and a rate that halves with each step."""
    return Script(model, sgd if model in WITH_TABLES else adam, 6, gamma=0.5, **settings)  # type: ignore[arg-type]  # the script's own


def begun(script: Script, lane: Lane, endpoints: str) -> Trainer:
    """The only trainer of a job."""
    return join(script, lane.mode, endpoints, how=lane.how)  # type: ignore[arg-type]


def ran(script: Script, lane: Lane, endpoints: str) -> Values:
    """The values with which the only trainer of a job ends."""
    return run(script, lane.mode, endpoints, how=lane.how)[0]  # type: ignore[arg-type]


# ---- equal to plain torch ----


@crossed("lanes", lane=LANES, model=MODELS, count=COUNTS)
def test_one_trainer_equals_plain_torch(
    servers: Servers, lane: Lane, model: str, count: int
) -> None:
    """To the bit, with a schedule: parameters, rows of tables and buffers."""
    script = script_of(model)

    assert_equal(ran(script, lane, servers(count)), alone(script))


@crossed("lanes", lane=LANES, write=WRITES, model=["dense", "tied"])
def test_external_writes_take_effect(servers: Servers, lane: Lane, write: str, model: str) -> None:
    """A write between two steps, twice: the next step goes on from there, and optimizer states
    stay.
    """

    if (write, model) == ("vector_to_parameters", "tied"):
        pytest.skip("torch has it for parameters in the order of their shape only")
    check_writes(servers, lane, write, model)


def check_writes(servers: Servers, lane: Lane, write: str, model: str) -> None:
    """Compares a job with one process; in both the script writes before two steps."""

    def before(number: int, of: nn.Module) -> None:
        if number in (3, 5):
            WRITES[write](of, number)

    script = replace(script_of(model), before=before)
    assert_equal(ran(script, lane, servers(2)), alone(script))


def test_values_that_come_between_leave_a_write_that_no_counter_shows(servers: Servers) -> None:
    """Of one element, in a step in which everything is compared."""
    check_writes(servers, Lane("async, fetched by a thread/eager"), "data_one_element", "dense")


CLIPS = {
    "value": (
        ClipGradByValue(0.001),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001),
    ),
    "norm": (
        ClipGradByNorm(0.05),
        lambda model: [nn.utils.clip_grad_norm_([each], 0.05) for each in model.parameters()],
    ),
    "global norm": (
        ClipGradByGlobalNorm(0.05),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    ),
}


@crossed("lanes", lane=LANES, clip=CLIPS, model=["dense", "clicks"])
def test_clipped_gradients_equal_plain_torchs(
    servers: Servers, lane: Lane, clip: str, model: str
) -> None:
    """By value, by each norm, by the norm of all: on the trainer, where there is one; of rows their
    sums round.
    """
    script = replace(script_of(model), clip=CLIPS[clip])

    assert_equal(
        ran(script, lane, servers(2)), alone(script), 1e-6 if model in WITH_TABLES else 0.0
    )


@crossed("lanes", lane=LANES, later=HOW, model=["normed", "clicks"])
def test_a_job_resumes_on_other_servers(
    servers: Servers, tmp_path: Path, lane: Lane, later: str, model: str
) -> None:
    """In the middle of a schedule, eagerly or as a program whichever wrote the checkpoint: as one
    run, to the bit.
    """
    script, path = script_of(model), str(tmp_path / "saved")
    first = begun(script, lane, servers(2))
    first.train(script.data()[:4], flushes=True)
    first.save(path)
    first.leave()
    second = begun(script, Lane(f"{lane.mode}/{later}"), servers(1))
    second.load(path)
    second.train(script.data()[4:], flushes=True)

    assert_equal(second.leave(), alone(script))


def test_a_delta_continues_a_programs_checkpoint(servers: Servers, tmp_path: Path) -> None:
    """Though a program has other names for the rows of an ``nn.Embedding``."""
    script, lane = script_of("clicks"), Lane("sync/eager")
    whole, delta = str(tmp_path / "whole"), str(tmp_path / "delta")
    first = begun(script, Lane("sync/program"), servers(2))
    first.train(script.data()[:2])
    first.save(whole)
    first.leave()
    second = begun(script, lane, servers(2))
    second.load(whole)
    second.train(script.data()[2:4])
    fleet.save(delta, second.schedule, delta=True)
    second.leave()
    third = begun(script, lane, servers(1))
    third.load(delta)
    third.train(script.data()[4:])

    assert_equal(third.leave(), alone(script))


# ---- several trainers ----


def taking_turns(script: Script, data: list[list[Batch]]) -> Values:
    """Plain SGD of two trainers that step in turn: each computes with what it got for its last
    step.
    """
    served = made(script.model)
    copies = [copy.deepcopy(served) for _ in data]
    optimizer = script.optimizer(trained(served))
    for batch in (each for pair in zip(*data, strict=True) for each in enumerate(pair)):
        number, of = batch
        own = copies[number]
        own.zero_grad()
        loss_of(own, *of).backward()
        for mine, theirs in zip(served.parameters(), own.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(own.parameters(), served.parameters(), strict=True):
                mine.copy_(theirs)
    return values(copies[-1])


# a thread that fetches by itself brings the other's step earlier
BY_TURNS = [
    lane
    for lane in LANES
    if lane.mode
    in ("async", "async, one slot", "async, cut by its thread", "half-async", "staleness")
]


@crossed("lanes", lane=BY_TURNS, count=COUNTS)
def test_each_trainers_step_counts_as_it_comes(servers: Servers, lane: Lane, count: int) -> None:
    """Of two trainers that step in turn where nobody waits for another: to the bit what a queue of
    their steps gives.
    """
    script = Script("dense", sgd, 4)
    pair = joined(script, lane, servers(count), 2)
    data = [script.data(number) for number in range(2)]
    for step in zip(*data, strict=True):
        for trainer, batch in zip(pair, step, strict=True):
            trainer.train([batch], flushes=True)
    found = at_once(*(each.leave for each in pair))

    assert_equal(found[1], taking_turns(script, data))


def joined(script: Script, lane: Lane, endpoints: str, trainers: int) -> list[Trainer]:
    """All trainers of a job."""
    return at_once(
        *(
            functools.partial(join, script, lane.mode, endpoints, number, trainers, lane.how)  # type: ignore[arg-type]
            for number in range(trainers)
        )
    )


@crossed("lanes", how=HOW, count=COUNTS, trainers=[2, 3], model=["dense", "tied", "clicks"])
def test_trainers_that_step_together_equal_the_concatenated_batch(
    servers: Servers, how: str, count: int, trainers: int, model: str
) -> None:
    """Sync: within 1e-6, and each other's to the bit."""
    script = replace(script_of(model), optimizer=sgd)
    found = run(script, "sync", servers(count), trainers, how)  # type: ignore[arg-type]
    parts = zip(*(script.data(number) for number in range(trainers)), strict=True)
    whole = [tuple(torch.cat(each) for each in zip(*step, strict=True)) for step in parts]

    assert_equal(found[0], alone(script, whole), 1e-6)
    for other in found[1:]:
        assert_equal(other, found[0])


@crossed("lanes", lane=LANES, trainers=[2, 3])
def test_all_trainers_end_with_trainer_0s_buffers(
    servers: Servers, lane: Lane, trainers: int
) -> None:
    """Its own are what its own batches made of them."""
    script = script_of("normed")
    found = run(script, lane.mode, servers(2), trainers, lane.how)  # type: ignore[arg-type]
    buffers = [name for name, _ in made("normed").named_buffers()]

    assert found[0]["norm.num_batches_tracked"] == script.steps
    for other in found[1:]:
        for name in buffers:
            assert torch.equal(other[name], found[0][name]), name


@crossed("lanes", lane=LANES, model=["dense", "clicks"])
def test_a_late_trainer_begins_where_the_job_is(lane: Lane, model: str) -> None:
    """Its values are the servers', and what it then does counts."""
    script = replace(script_of(model), optimizer=sgd, gamma=1.0)
    with ExitStack() as stack:
        config = ServerConfig(min_trainers=1)
        endpoints = ",".join(stack.enter_context(Server(config)).endpoint for _ in range(2))
        first = join(script, lane.mode, endpoints, 0, 2, lane.how)  # type: ignore[arg-type]
        first.train(script.data()[:4], flushes=True)
        second = join(script, lane.mode, endpoints, 1, 2, lane.how)  # type: ignore[arg-type]
        here = values(second.model)
        served = first.served()
        for name, value in here.items():
            if name in served:
                assert torch.equal(value, served[name]), name
        at_once(
            lambda: first.train(script.data()[4:], flushes=True),
            lambda: second.train(script.data(1)[4:], flushes=True),
        )
        found = at_once(first.leave, second.leave)

    moved = [name for name, value in here.items() if not torch.equal(value, found[1][name])]
    assert len(moved) >= len([*trained(made(model))]) - (2 if model in WITH_TABLES else 0)


# ---- refused, compressed ----


def with_bad(script: Script, factor: float) -> list[Batch]:
    """The script's batches, of which the last but one is bad."""
    data = script.data()
    x, y, weight = data[-2]
    return [*data[:-2], (x, y, weight * factor), data[-1]]


def alone_with(lane: Lane, **configs: object) -> Script:
    """A script whose steps are exchanged one by one."""
    steps = {"k_steps": 1} if MODES[lane.mode].own_steps else {}
    return Script("dense", sgd, 4, configs={**steps, **configs})


@crossed("lanes", lane=LANES, count=COUNTS)
def test_a_refused_step_leaves_no_trace(servers: Servers, lane: Lane, count: int) -> None:
    """A step with a NaN: parameters, and whatever follows, are as if it had never been; it is
    counted.
    """
    script = alone_with(lane, nonfinite="refuse")
    trainer = begun(script, lane, servers(count))
    trainer.train(with_bad(script, NAN), flushes=True)

    assert trainer.metric("steps_refused_nonfinite") >= 1  # in each of its lanes
    data = script.data()
    assert_equal(trainer.leave(), alone(script, [*data[:-2], data[-1]]))


@pytest.mark.observes("a_sync_configs.nonfinite")
@crossed("lanes", lane=LANES, action=["apply", "stop"])
def test_a_step_with_a_nan_is_applied_or_ends_the_job(
    servers: Servers, lane: Lane, action: str
) -> None:
    """As in plain torch; or with trainer, step and variable."""
    script = alone_with(lane, nonfinite=action)
    trainer = begun(script, lane, servers(2))
    if action == "apply":
        trainer.train(with_bad(script, NAN), flushes=True)
        assert trainer.leave()["wide.weight"].isnan().all()
        return
    with pytest.raises(NonFinite, match="step 3 of trainer 0 has a NaN or an infinity in "):
        trainer.train(with_bad(script, NAN), flushes=True)
    trainer.leave("it has stopped")


@crossed("lanes", lane=LANES, action=["refuse", "stop"])
def test_an_outlier_leaves_no_trace_or_ends_the_job(
    servers: Servers, lane: Lane, action: str
) -> None:
    """A gradient that is far beyond its history."""
    script = replace(alone_with(lane, outlier_push=action), steps=WARM_UP + 3, optimizer=tame)
    trainer = begun(script, lane, servers(2))
    data = script.data()
    if action == "stop":
        with pytest.raises(Outlier, match=f"step {WARM_UP + 2} of trainer 0 brings the norm"):
            trainer.train(with_bad(script, HUGE), flushes=True)
        assert issubclass(Outlier, JobFailed)
        trainer.leave("it has stopped")
        return
    trainer.train(with_bad(script, HUGE), flushes=True)

    assert trainer.metric("steps_refused_outlier") >= 1
    assert_equal(trainer.leave(), alone(script, [*data[:-2], data[-1]]))


def tame(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """A rate at which gradients stay what they are."""
    return torch.optim.SGD(parameters, lr=2.0**-10)


@crossed("lanes", lane=OF_GRADIENTS, scheme=["bfloat16", "float16", "int8"])
def test_compressed_gradients_are_what_a_step_takes(
    servers: Servers, lane: Lane, scheme: str
) -> None:
    """In half of the bytes, or a quarter; what is lost by rounding is small beside the step."""
    script = Script("dense", sgd, 6, compression={"*": scheme})
    found, expected = ran(script, lane, servers(2)), alone(script)
    start = values(made("dense"))

    for name, value in expected.items():
        far = (value - start[name]).norm()
        assert (found[name] - value).norm() <= 0.02 * far, name
        assert not torch.equal(found[name], value), name
