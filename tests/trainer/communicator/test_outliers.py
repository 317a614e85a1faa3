"""Steps with a norm far beyond its history, by ``a_sync_configs["outlier_push"]``: every mode,
every value of the key, dense parameters and tables, against real servers in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from pserver.config import ServerConfig
from pserver.errors import JobFailed, Outlier, Refused, Unprepared
from pserver.launcher.status import ask
from pserver.membership.watermark import RENEWED, WARM_UP
from pserver.service.server import Server
from pserver.service.streams import norms_of
from pserver.telemetry.counts import counted
from pserver.wire_pb2 import Commit, PushNorm
from tests.support import one_parameter
from tests.support.outlier_jobs import (
    HUGE,
    MODES,
    PLANTED,
    STEPS,
    Halves,
    plain,
    play,
    refused,
    step,
    trainer,
    values,
)
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once
from trainer import fleet
from transpiler import (
    DistributedStrategy,
)

WITH_TABLES = ["sync", "async", "geo"]  # half-async and staleness are async to a server
WITHOUT = [number for number in range(1, STEPS + 1) if number != PLANTED]


def said(caplog: pytest.LogCaptureFixture, where: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith(where)]


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_a_refused_push_leaves_what_a_job_without_it_has(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """To the bit, on servers and trainer: also on the server that holds nothing of what is large.
    It is counted, and both sides warn and name trainer, step and variable.
    """
    endpoints = servers(2)
    mine = trainer(endpoints, mode, outlier_push="refuse")
    with caplog.at_level(logging.WARNING):
        play(mine, planted=PLANTED)
    assert refused(mine) == 1
    statuses = [ask(endpoint) for endpoint in endpoints.split(",")]
    assert [counted(status.trainers, "refused_outlier") for status in statuses] == [1, 1]
    text = _planted(mode)
    of_servers = said(caplog, "pserver.lane.judge")
    assert len(of_servers) == 2 and all(line.startswith(text) for line in of_servers)
    assert all("of 'w'" in line and line.endswith(": refused") for line in of_servers)
    (line,) = said(caplog, "trainer.senders.gradient_validation")
    assert line.startswith(text) and line.endswith(f"the servers refused step {PLANTED}")
    assert _closed(mine) == _without(endpoints, mode, WITHOUT)


def _planted(mode: str) -> str:
    """How a line on it begins.  In geo mode messages count, those of rounding too."""
    return "step " if mode == "geo" else f"step {PLANTED} of trainer 0 brings the norm"


def _closed(each: Trainer) -> dict[str, list[float]]:
    """Its parameters at its end."""
    found = values(each)
    each.optimizer.close()
    return found


def _without(
    endpoints: str, mode: str, steps: Iterable[int], planted: int = 0
) -> dict[str, list[float]]:
    """The same at the end of a job of these steps that looks for no outlier."""
    other = trainer(endpoints, mode)
    play(other, steps, planted)
    assert refused(other) == 0
    return _closed(other)


@pytest.mark.parametrize("mode", ["async"])
def test_an_applied_push_changes_nothing_but_what_is_said(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """A warning, and a count."""
    endpoints = servers(1)
    mine = trainer(endpoints, mode, outlier_push="apply")
    with caplog.at_level(logging.WARNING):
        play(mine, planted=PLANTED)
    (line,) = said(caplog, "pserver.lane.judge")
    assert line.startswith(_planted(mode)) and line.endswith(": applied")
    assert refused(mine) == 0
    assert _closed(mine) == _without(endpoints, mode, range(1, STEPS + 1), PLANTED)


@pytest.mark.observes("a_sync_configs.outlier_push")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_stop_ends_the_job_and_every_trainer_is_told(servers: Servers, mode: str) -> None:
    """Trainer, step and variable; nothing of the step is applied before."""
    endpoints = servers(2)
    pair = at_once(
        *(lambda n=n: trainer(endpoints, mode, n, 2, outlier_push="stop") for n in (0, 1))
    )
    before = range(1, PLANTED)
    at_once(*(lambda each=each: play(each, before) for each in pair))

    def end(number: int) -> str:
        with pytest.raises(Outlier) as caught:
            for later in range(3):
                step(pair[number], PLANTED + later, planted=number == 1)
        return str(caught.value)

    if mode in ("sync", "diloco"):
        texts = at_once(lambda: end(0), lambda: end(1))
    else:
        texts = [end(1), end(0)]
    assert issubclass(Outlier, JobFailed)
    for text in texts:
        assert f"step {PLANTED} of trainer 1 brings the norm" in text
        assert "of 'w'" in text and 'a_sync_configs["outlier_push"] is "stop"' in text
    for each in pair:
        each.optimizer.close("it has stopped")


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "diloco"])
def test_of_two_trainers_one_brings_an_outlier(servers: Servers, mode: str) -> None:
    """A sync step is refused for both; diloco leaves that trainer out; in async and geo the step is
    its own, and the other's counts.
    """
    endpoints = servers(1)
    pair = at_once(
        *(lambda n=n: trainer(endpoints, mode, n, 2, outlier_push="refuse") for n in (0, 1))
    )
    at_once(*(lambda each=each: play(each, range(1, PLANTED)) for each in pair))
    before = values(pair[0])["served w"]
    at_once(lambda: step(pair[0], PLANTED), lambda: step(pair[1], PLANTED, planted=True))

    assert [refused(each) for each in pair] == ([1, 1] if mode == "sync" else [0, 1])
    after = values(pair[0])["served w"]
    assert (after == before) == (mode == "sync")
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 1
    for each in pair:  # and the trainer itself goes on from what the servers have
        assert max(abs(v) for v in values(each)["w"]) < 10
    at_once(*(lambda each=each: play(each, (PLANTED + 1, PLANTED + 2)) for each in pair))
    assert [refused(each) for each in pair] == ([1, 1] if mode == "sync" else [0, 1])
    at_once(pair[0].optimizer.close, pair[1].optimizer.close)


@pytest.mark.parametrize("mode", WITH_TABLES)
@pytest.mark.parametrize("action", ["refuse", "apply", "stop"])
def test_rows_of_tables_count_by_row_and_are_named(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str, action: str
) -> None:
    """A step of many rows is no outlier; one of a huge row is, and names it, on every server."""
    mine = Trainer(servers(2), 0, 1, Net(), plain, **MODES[mode], outlier_push=action)

    def add(ids: list[int], change: float) -> None:
        mine.add(ids, change, 1.0)
        mine.optimizer.flush()

    for _ in range(WARM_UP):
        add([7, 8], 1.0)
    add(list(range(100, 2000)), 1.0)
    before = _row(mine, 41), mine.job.served()
    if action == "stop":
        with pytest.raises(Outlier, match=rf"step {PLANTED} of trainer 0 .* of 'emb'.*rows 41"):
            add([41], HUGE)
            add([41], 1.0)
        return mine.optimizer.close("it has stopped")
    with caplog.at_level(logging.WARNING):
        add([41], HUGE)
    done = "refused" if action == "refuse" else "applied"
    lines = said(caplog, "pserver.lane.judge")
    assert len(lines) == 2
    assert all("of 'emb'" in line and line.endswith(f"(rows 41): {done}") for line in lines)
    if action == "refuse":
        assert _row(mine, 41) == before[0] == 0.0
        assert all(torch.equal(v, before[1][name]) for name, v in mine.job.served().items())
        add([41], 1.0)  # also where the trainer has stepped the row itself
        assert abs(_row(mine, 41)) < 1 and abs(mine.model.row(41)) < 1
    else:
        assert abs(_row(mine, 41)) > 1000
    mine.optimizer.close()


def _row(mine: Trainer, id_: int) -> float:
    assert mine.job.communicator is not None and mine.job.communicator.lookups is not None
    return float(mine.job.communicator.lookups.pull("emb", torch.tensor([id_]))[0, 0])


@pytest.mark.observes("a_sync_configs.outlier_factor")
def test_the_factor_says_how_far_is_far(servers: Servers) -> None:
    """Ten times its history, of a gradient that is nearly always as large."""
    mine = trainer(servers(1), "async", outlier_push="refuse", outlier_factor=3.0)
    play(mine, range(1, WARM_UP + 1))
    for times in (2.0, 4.0):
        for p in (mine.model.w, mine.model.v):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * times
        mine.optimizer.step()
        mine.optimizer.flush()
    assert refused(mine) == 1
    mine.optimizer.close()


def test_merged_steps_are_no_outlier_and_gradients_that_stay_large_are_none_for_long(
    servers: Servers,
) -> None:
    """Sums are divided by their steps; as many alike as the history asks for become it."""
    keys = {"outlier_push": "refuse", "outlier_factor": 2.0, "merge": "sum"}
    mine = trainer(servers(1), "async", max_merge_var_num=8, send_wait_times=10, **keys)
    for p in (mine.model.w, mine.model.v):
        p.grad = torch.ones_like(p)
    for number in range(WARM_UP + 20):
        mine.optimizer.step()
        if number < WARM_UP:
            mine.optimizer.flush()  # one by one; the others merge
    mine.optimizer.flush()
    assert refused(mine) == 0
    for p in (mine.model.w, mine.model.v):
        p.grad = torch.full_like(p, 1e3)
    for _ in range(RENEWED + 3):
        mine.optimizer.step()
        mine.optimizer.flush()
    assert refused(mine) == RENEWED
    mine.optimizer.close()


@pytest.mark.parametrize("scheme", ["bfloat16", "int8", "sparse"])
def test_compressed_gradients_are_measured_as_they_travel(servers: Servers, scheme: str) -> None:
    """In two slices' worth of bytes, of every scheme."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"outlier_push": "refuse", "send_queue_size": 1}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(Halves())
    optimizer = fleet.distributed_optimizer(plain(model), compression={"*": scheme})
    for number in range(1, PLANTED + 1):
        model.w.grad, model.v.grad = torch.randn(20_000), torch.randn(3)
        model.w.grad[::3] = 0.0
        model.v.grad[0] = HUGE if number == PLANTED else 1.0
        optimizer.step()
    assert fleet.metrics()["steps_refused_outlier"] == 1
    assert float(model.v.detach().abs().max()) < 10
    fleet.finish()


def test_half_precision_is_measured_in_32_bits(servers: Servers) -> None:
    """A float16 whose norm is no float16."""
    model = Halves().half()
    mine = Trainer(servers(1), 0, 1, model, plain, outlier_push="refuse")
    for number in range(1, PLANTED + 1):
        for p in (mine.model.w, mine.model.v):
            p.grad = torch.full_like(p, 6e4 if number == PLANTED else 1.0)
        mine.optimizer.step()
        mine.optimizer.flush()
    assert refused(mine) == 1 and float(mine.model.w.detach().abs().max()) < 10
    mine.optimizer.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_one_server_alone_refuses_all_refuse(mode: str) -> None:
    """Server 1 has begun its histories anew, as one that has come back, so it finds nothing; both
    servers have what a job without the step has, and both count it.
    """
    with Server(ServerConfig()) as first, Server(ServerConfig()) as second:
        endpoints = f"{first.endpoint},{second.endpoint}"
        mine = trainer(endpoints, mode, outlier_push="refuse")
        play(mine, range(1, PLANTED))
        (member,) = second.job._members.joined()
        member.watermark(0).histories.clear()
        play(mine, range(PLANTED, STEPS + 1), PLANTED)

        assert refused(mine) == 1
        for each in endpoints.split(","):
            assert counted(ask(each).trainers, "refused_outlier") == 1
        found = _closed(mine)
    with Server(ServerConfig()) as first, Server(ServerConfig()) as second:
        assert found == _without(f"{first.endpoint},{second.endpoint}", mode, WITHOUT)


def test_a_trainer_that_joins_again_begins_a_history(servers: Servers) -> None:
    """Its first pushes are not judged."""
    endpoints = servers(1)
    for first in (1.0, HUGE):
        mine = trainer(endpoints, "async", outlier_push="stop")
        for p in (mine.model.w, mine.model.v):
            p.grad = torch.full_like(p, first)
        for _ in range(WARM_UP + 1):
            mine.optimizer.step()
            mine.optimizer.flush()
        mine.optimizer.close()


def test_a_job_that_resumes_begins_a_history(servers: Servers, tmp_path: Path) -> None:
    """Values and steps are in a checkpoint, and histories are not."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"outlier_push": "stop", "send_queue_size": 1}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    for size in (1.0, HUGE):
        fleet.init(role, strategy=strategy)
        model = fleet.distributed_model(Halves())
        optimizer = fleet.distributed_optimizer(plain(model))
        if size == HUGE:
            fleet.load(str(tmp_path))
        for _ in range(WARM_UP + 1):
            model.w.grad, model.v.grad = torch.full((20_000,), size), torch.full((3,), size)
            optimizer.step()
        fleet.save(str(tmp_path))
        fleet.finish()


def test_a_step_without_its_norms_is_refused(servers: Servers) -> None:
    """A client of another kind has to say them, where servers decide by them."""
    mine = trainer(servers(1), "async", outlier_push="refuse", send_queue_size=1)
    assert mine.job.communicator is not None
    (sender,) = mine.job.communicator.lanes
    sender._pipeline.checks._norms._measures = False
    with pytest.raises(Refused, match="step 1 of trainer 0: expected the norm of .* 'v'"):
        step(mine, 1)
    mine.optimizer.close("it has failed")


def test_a_norm_of_nothing_that_there_is_is_refused() -> None:
    """So nobody fills a server with histories."""
    commit = Commit(norms=[PushNorm(variable="w", norm=1.0), PushNorm(variable="x", norm=1.0)])
    with pytest.raises(Unprepared, match="a norm of 'x', which the plan does not have"):
        norms_of(commit, one_parameter.plan_of())


def test_a_job_without_servers_says_why_it_has_no_such_key() -> None:
    """And a factor without its key says what it needs."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"outlier_push": "refuse"}
    with pytest.raises(ValueError, match="no process sees one trainer's part"):
        fleet.init(is_collective=True, strategy=strategy)
    strategy.a_sync_configs = {"outlier_push": "off", "outlier_factor": 9.0}
    with pytest.raises(ValueError, match="no effect with outlier_push='off'"):
        fleet.init(strategy=strategy)
