"""Steps with a NaN or an infinity in them, by ``a_sync_configs["nonfinite"]``: every mode, every
value of the key, dense parameters and tables, against real servers in this process.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from pserver.errors import NonFinite
from pserver.launcher.status import ask
from pserver.telemetry.counts import counted
from tests.support.eager_modes import strategy_of
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once
from trainer import fleet
from transpiler.strategy.from_strategy import lanes_of

NAN, INF = float("nan"), float("inf")
MODES: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "async": {},
    "async, one slot": {"send_queue_size": 1},
    "half-async": {"half_async": True},
    "staleness": {"staleness": 3},
    "delay compensation": {"dc_asgd": 0.5},
    "geo": {"k_steps": 1},
    "diloco": {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
}
WITH_TABLES = [name for name in MODES if name not in ("delay compensation", "diloco")]
DEFAULTS = {name: "apply" if name == "sync" else "refuse" for name in MODES}


class Weight(nn.Module):
    """Two parameters; a step of SGD(lr=1) adds ``change`` to one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))
        self.v = nn.Parameter(torch.zeros(3))

    def add(self, ids: Any, change: float, dense: float | None = None) -> None:
        """Nothing of ``ids`` here."""
        (-change * self.w.sum() - (0.0 if dense is None else dense) * self.v.sum()).backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def trainer(endpoints: str, mode: str, action: str, model: Any) -> Trainer:
    key = {} if action == "auto" else {"nonfinite": action}
    return Trainer(endpoints, 0, 1, model, sgd, **MODES[mode], **key)


def said(caplog: pytest.LogCaptureFixture, where: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith(where)]


def settled(each: Trainer) -> None:
    each.optimizer.flush()


@pytest.mark.parametrize(("mode", "count"), [("sync", 2), ("geo", 1)])
def test_a_refused_step_leaves_every_value_as_it_was(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str, count: int
) -> None:
    """On all servers, whichever holds the variable; it is counted, both sides warn and name
    trainer, step and variable, and the trainer goes on.
    """
    endpoints = servers(count)
    mine = trainer(endpoints, mode, "refuse", Weight())
    mine.add([], 1.0, 1.0)
    settled(mine)
    with caplog.at_level(logging.WARNING):
        mine.add([], NAN, 5.0)
        settled(mine)
    served = _served(mine)
    assert served == {"w": [1.0] * 8, "v": [1.0] * 3}
    assert mine.model.w.tolist() == [1.0] * 8
    mine.add([], 2.0, 2.0)
    settled(mine)
    assert _served(mine) == {"w": [3.0] * 8, "v": [3.0] * 3}

    assert mine.job.communicator is not None
    assert mine.job.communicator.metrics()["steps_refused_nonfinite"] == 1
    statuses = [ask(endpoint) for endpoint in endpoints.split(",")]
    assert [counted(status.trainers, "refused_nonfinite") for status in statuses] == [1] * count
    assert [status.version for status in statuses] == [2] * count
    found = "step 2 of trainer 0 has a NaN or an infinity in 'w': refused"
    heard = "step 2 of trainer 0: refused, as another server has found a NaN or an infinity"
    assert said(caplog, "pserver.lane.judge") == [found, heard][:count]
    (line,) = said(caplog, "trainer.senders")
    assert "step of trainer 0, in 'w': the servers refused step 2" in line
    mine.optimizer.close()


def _served(each: Trainer) -> dict[str, list[float]]:
    """The parameters as the servers have them."""
    own = {name: p.detach() for name, p in each.model.named_parameters() if name in ("w", "v")}
    return {name: value.tolist() for name, value in (own | each.job.served()).items()}


@pytest.mark.parametrize("mode", ["async"])
def test_an_applied_step_is_what_plain_torch_does_and_says_so(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """The parameter is ruined, others are not; the same warnings as for a refused one."""
    mine = trainer(servers(2), mode, "apply", Weight())
    with caplog.at_level(logging.WARNING):
        mine.add([], INF, 1.0)
        settled(mine)
    served = _served(mine)
    assert served["v"] == [1.0] * 3
    assert not any(math.isfinite(value) for value in served["w"])
    assert "step 1 of trainer 0 has a NaN or an infinity in 'w': applied" in said(
        caplog, "pserver.lane"
    )
    (line,) = said(caplog, "trainer.senders")
    assert "in 'w': the servers applied step 1" in line
    assert mine.job.communicator is not None
    assert mine.job.communicator.metrics()["steps_refused_nonfinite"] == 0
    mine.optimizer.close()


@pytest.mark.parametrize("mode", WITH_TABLES)
@pytest.mark.parametrize("action", ["refuse", "apply", "stop"])
def test_rows_of_tables_count_like_parameters(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str, action: str
) -> None:
    """A NaN in one row: the dense parameter of the same step is refused with it."""
    mine = trainer(servers(2), mode, action, Net())
    mine.add([7, 8], 1.0, 1.0)
    settled(mine)
    if action == "stop":
        with pytest.raises(NonFinite, match="step 2 of trainer 0 .* in 'emb'"):
            mine.add([8], NAN, 1.0)
            settled(mine)
        return mine.optimizer.close("it has stopped")
    with caplog.at_level(logging.WARNING):
        mine.add([8], NAN, 1.0)
        settled(mine)
    assert mine.job.communicator is not None and mine.job.communicator.lookups is not None
    rows = mine.job.communicator.lookups.pull("emb", torch.tensor([7, 8]))[:, 0].tolist()
    done = "refused" if action == "refuse" else "applied"
    if action == "refuse":
        assert rows == [1.0, 1.0] and _served(mine)["w"] == [1.0] * 4
    else:
        assert rows[0] == 1.0 and math.isnan(rows[1]) and _served(mine)["w"] == [2.0] * 4
    assert f"step 2 of trainer 0 has a NaN or an infinity in 'emb': {done}" in said(
        caplog, "pserver"
    )
    mine.optimizer.close()


@pytest.mark.parametrize("mode", MODES)
def test_by_default_only_sync_mode_applies(mode: str) -> None:
    """Plain torch would, and a step of one trainer does not ruin the others'."""
    plan = lanes_of(strategy_of(**MODES[mode]))
    assert {lane.on_nonfinite for _, lane in plan.choices} == {DEFAULTS[mode]}
    plan = lanes_of(strategy_of(**MODES[mode], nonfinite="stop"))
    assert {lane.on_nonfinite for _, lane in plan.choices} == {"stop"}


@pytest.mark.parametrize("scheme", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_compressed_gradients_are_looked_at_too(
    servers: Servers, scheme: str, value: float
) -> None:
    """As they travel."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy_of(send_queue_size=1))
    model = fleet.distributed_model(Weight())
    optimizer = fleet.distributed_optimizer(sgd(model), compression={"*": scheme})
    model.w.grad, model.v.grad = torch.ones(8), torch.ones(3)
    model.w.grad[5] = value
    optimizer.step()

    assert model.w.tolist() == [0.0] * 8 and model.v.tolist() == [0.0] * 3
    assert fleet.metrics()["steps_refused_nonfinite"] == 1


@pytest.mark.parametrize("mode", ["sync", "diloco"])
def test_of_two_trainers_one_has_a_nan(
    servers: Servers, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """A sync step is refused for both, as after an overflow; diloco leaves that trainer out, and it
    gets the others' parameters.
    """
    models = [Weight(), Weight()]
    pair = at_once(
        *(
            lambda n=n: Trainer(servers(2), n, 2, models[n], sgd, **MODES[mode], nonfinite="refuse")
            for n in (0, 1)
        )
    )
    with caplog.at_level(logging.WARNING):
        at_once(lambda: pair[0].add([], 4.0, 1.0), lambda: pair[1].add([], NAN, 1.0))
    expected = 4.0 if mode == "diloco" else 0.0
    assert [model.w.tolist() for model in models] == [[expected] * 8] * 2
    refused = [each.job.communicator.metrics()["steps_refused_nonfinite"] for each in pair]
    assert refused == ([0, 1] if mode == "diloco" else [1, 1])
    done = "left it out of" if mode == "diloco" else "refused"
    text = f"trainer 1, in 'w': the servers {done} step 1"
    assert any(text in line for line in said(caplog, "trainer.senders"))
    at_once(lambda: pair[0].add([], 2.0), lambda: pair[1].add([], 2.0))
    assert [model.w.tolist() for model in models] == [[expected + 2.0] * 8] * 2
    at_once(pair[0].optimizer.close, pair[1].optimizer.close)


def test_a_clipped_sync_step_is_refused_too(servers: Servers) -> None:
    """Norms that clip on two servers: none is asked for."""
    models = [Weight(), Weight()]
    endpoints = servers(2).split(",")

    def joined(number: int) -> Any:
        from trainer.job.job import Job
        from transpiler import ClipGradByGlobalNorm

        role = fleet.UserDefinedRoleMaker(number, worker_num=2, server_endpoints=endpoints)
        job = Job(role, strategy_of(modes={"*": "sync"}, nonfinite="refuse"))
        job.models.append(models[number])
        return job.join(sgd(models[number]), grad_clip=ClipGradByGlobalNorm(1.0))

    def step(number: int, value: float) -> None:
        models[number].zero_grad()
        models[number].add([], value, 0.0)
        pair[number].step()

    pair = at_once(lambda: joined(0), lambda: joined(1))
    at_once(lambda: step(0, 1.0), lambda: step(1, NAN))
    assert [model.w.tolist() for model in models] == [[0.0] * 8] * 2
    at_once(lambda: step(0, 1.0), lambda: step(1, 1.0))
    assert models[0].w.tolist() == pytest.approx([1 / math.sqrt(8)] * 8)
    at_once(pair[0].close, pair[1].close)


def test_warnings_become_rare(caplog: pytest.LogCaptureFixture) -> None:
    """The first few, then one whenever their number has doubled; each trainer's by themselves."""
    from pserver.telemetry.logs import RepeatedWarning

    repeated = RepeatedWarning(logging.getLogger("a test"))
    for _ in range(100):
        repeated.warn(0, "it happened")
    repeated.warn(1, "another")
    texts = [record.getMessage() for record in caplog.records]
    assert texts[:8] == ["it happened"] * 8
    assert texts[8:] == [f"it happened (the {n}th time)" for n in (16, 32, 64)] + ["another"]
