"""Local SGD of eager jobs: averages at exactly the steps of the rule, and the same values whenever
somebody looks.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import local_steps, ranks
from tests.support.local_steps import COURSES, STEPS, lr_of
from trainer import fleet, spawn
from trainer.collective.local_sgd import AdaptiveSchedule, Schedule
from transpiler import DistributedStrategy

Results = list[dict[str, Any]]  # by trainer


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("local")
    spawn(local_steps.keep, (str(path),), nprocs=2, start_method="forkserver")
    return [torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)]


# ---- the rules ----


def averages(schedule: Schedule, steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if schedule.count()]


def test_every_step_averages_up_to_begin_step_and_then_every_kth() -> None:
    """The step with the number begin_step included; begin_step 0 begins with a whole window."""
    assert averages(Schedule(3, 2), 9) == [1, 2, 5, 8]
    assert averages(Schedule(3, 0), 9) == [3, 6, 9]
    assert averages(Schedule(1, 1), 4) == [1, 2, 3, 4]


def test_after_a_load_a_window_begins() -> None:
    """And the adaptive rule measures anew."""
    schedule = AdaptiveSchedule(4, 1)
    schedule.count()
    schedule.measure(2.0, 0.1)
    schedule.measure(0.5, 0.1)
    assert schedule.k_steps == 1
    schedule.restart(10)

    assert (schedule.k_steps, schedule.first) == (4, None)
    assert averages(schedule, 8) == [4, 8]


@pytest.mark.parametrize(
    ("loss", "lr", "k"),
    [
        (2.0, 0.1, 2),  # as at first: ceil(sqrt(4))
        (2.1, 0.1, 3),
        (0.1, 0.1, 1),
        (0.5, 0.001, 10),  # a rate that falls lets the windows grow
        (2.0, 0.0001, 16),
        (0.0, 0.1, 7),  # no quotient: as before
        (math.nan, 0.1, 7),
        (2.0, 0.0, 7),
        (-2.0, 0.1, 7),
    ],
)
def test_k_follows_the_loss_and_the_learning_rate(loss: float, lr: float, k: int) -> None:
    """ceil(sqrt(lr_0 * loss / (lr * loss_0) * init_k_steps)), between 1 and 16."""
    schedule = AdaptiveSchedule(4, 1)
    schedule.measure(2.0, 0.1)
    schedule.k_steps = 7
    schedule.measure(loss, lr)

    assert schedule.k_steps == k


# ---- two trainers ----


def reference(configs: dict[str, int]) -> tuple[list[int], list[int], list[Any]]:
    """The rule written out, over two models of one process: the steps that average, those at which
    the loss is measured, and every step's values of both.
    """
    adaptive, begin = "init_k_steps" in configs, configs["begin_step"]
    k = first_k = configs.get("init_k_steps", 0) or configs["k_steps"]
    models = [ranks.net(0), ranks.net(0)]
    made = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in models]
    last, first, measured = 0, (0.0, 0.0), list[int]()
    averaged, steps = list[int](), list[Any]()
    for step, (x, y) in enumerate(ranks.batches(STEPS), 1):
        losses = []
        for rank, (model, optimizer) in enumerate(zip(models, made, strict=True)):
            optimizer.param_groups[0]["lr"] = lr_of(step)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        loss_now, due = sum(losses) / 2, step <= begin or step - last == k
        if step == 1:
            first = loss_now, lr_of(1)
        if adaptive and (due or step == 1):
            measured.append(step)
            ratio = first[1] * loss_now / (lr_of(step) * first[0])
            k = min(16, max(1, math.ceil(math.sqrt(ratio * first_k))))
        if due:
            last = step
            averaged.append(step)
            average(models)
        steps.append([local_steps.values(model) for model in models])
    return averaged, measured, steps


def average(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            one.add_(other).div_(2)
            other.copy_(one)
        for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
            other.copy_(one)


@pytest.mark.processes
@pytest.mark.observes(
    "localsgd",
    "localsgd_configs.k_steps",
    "localsgd_configs.begin_step",
    "adaptive_localsgd",
    "adaptive_localsgd_configs.init_k_steps",
    "adaptive_localsgd_configs.begin_step",
)
@pytest.mark.parametrize("name", COURSES)
def test_two_trainers_average_at_exactly_the_steps_of_the_rule(results: Results, name: str) -> None:
    """No gradient travels: a step in between has no all-reduce; the values of every step are those
    of the rule written out, momentum and buffers included.
    """
    configs = next(value for key, value in COURSES[name].items() if key.endswith("_configs"))
    averaged, measured, steps = reference(configs)
    parameters = sum(parameter.numel() for parameter in ranks.net(0).parameters())
    for rank, result in enumerate(results):
        for step, sizes in enumerate(result[name]["sizes"], 1):
            expected = [2] * (step in measured) + [parameters] * (step in averaged)
            assert sizes == expected, step
            for mine, theirs in zip(
                result[name]["steps"][step - 1], steps[step - 1][rank], strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert len(averaged) < STEPS - 5 and results[0][name]["log"] == results[1][name]["log"]
    assert len(results[0][name]["log"]) == len(measured)


@pytest.mark.processes
def test_the_inputs_of_the_adaptive_rule_are_logged(results: Results) -> None:
    """One line a measurement: step, losses, learning rates, k."""
    for line in results[0]["adaptive"]["log"]:
        assert re.fullmatch(
            r"adaptive_localsgd, step \d+: loss \S+ \(first \S+\), lr \S+ \(first 0\.2\), "
            r"k \d+, was \d+",
            line,
        )


@pytest.mark.processes
def test_whoever_looks_in_the_middle_finds_one_model(results: Results) -> None:
    """state_dict, save, export, load and finish; the next average of the rule comes when it would
    have come, and after a load a window begins.
    """
    one, other = (result["between"] for result in results)
    for name in ("state_dict", "save", "export", "load", "finish"):
        assert all(map(torch.equal, one[name], other[name])), name
    assert not all(map(torch.equal, one["own"], other["own"]))
    assert len(one["fourth"]) == 1 and one["loaded step"] == 2
    assert all(map(torch.equal, one["load"], one["save"]))
    assert [size > 0 for size in one["after load"]] == [False, False, False, True, False]


@pytest.mark.processes
def test_a_loss_comes_by_argument_or_closure(results: Results) -> None:
    """Without one the first step of the adaptive rule raises, and says how to give it."""
    found = results[0]["lossless"]

    assert "expected the loss of step 1, got none: call optimizer.step(loss=loss)" in found["said"]
    assert found["closure"] > 0


@pytest.mark.processes
def test_an_overflow_on_one_trainer_is_its_own(results: Results) -> None:
    """It skips its update, and takes part in the average of the second step."""
    one, other = (result["scaled"] for result in results)

    assert (one["skipped"], other["skipped"]) == (False, True)
    assert all(map(torch.equal, one["end"], other["end"]))


@pytest.mark.processes
@pytest.mark.observes("localsgd", "adaptive_localsgd")
def test_digits_are_learned_as_with_mean_gradients(results: Results) -> None:
    """Within two points, in one model on both trainers."""
    one, other = (result["digits"] for result in results)

    assert one == other and one["mean gradients"] > 0.84
    assert min(one["fixed"], one["adaptive"]) > one["mean gradients"] - 0.02


# ---- refusals ----


def changed(**fields: Any) -> DistributedStrategy:
    return local_steps.strategy_of(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"localsgd": True, "adaptive_localsgd": True},
            "strategy.localsgd: contradicts strategy.adaptive_localsgd",
        ),
        (
            {"localsgd_configs": {"k_steps": 4}},
            "strategy.localsgd_configs.k_steps: has no effect without localsgd=True",
        ),
        (
            {"adaptive_localsgd_configs": {"begin_step": 4}},
            "strategy.adaptive_localsgd_configs.begin_step: has no effect without adaptive_localsg",
        ),
        (
            {"localsgd": True, "find_unused_parameters": True},
            "strategy.find_unused_parameters: has no effect with localsgd=True, as no gradients",
        ),
        (
            {"adaptive_localsgd": True, "last_comm_group_size_MB": 2.0},
            "strategy.last_comm_group_size_MB: has no effect with adaptive_localsgd=True",
        ),
        (
            {"localsgd": True, "gradient_scale_configs": {"scale_strategy": "sum"}},
            "strategy.gradient_scale_configs.scale_strategy: has no effect with localsgd=True",
        ),
        (
            {"adaptive_localsgd": True, "sync_batch_norm": True},
            "strategy.sync_batch_norm: contradicts adaptive_localsgd=True, with which a trainer",
        ),
        (
            {"localsgd": True, "hybrid_configs": {"dp_degree": 1}},
            "strategy.localsgd: acts only in a job without servers .* and without hybrid_configs",
        ),
    ],
)
def test_what_contradicts_local_sgd_raises(fields: dict[str, Any], words: str) -> None:
    """Both settings are named."""
    with pytest.raises(ValueError, match=words):
        fleet.init(is_collective=True, strategy=changed(**fields))


@pytest.mark.parametrize("name", ["localsgd", "adaptive_localsgd"])
def test_with_servers_the_k_step_modes_do_it(name: str) -> None:
    """The refusal names them."""
    with pytest.raises(ValueError, match=rf"strategy.{name}: acts only in a job without servers"):
        fleet.init(strategy=changed(**{name: True}))
    with pytest.raises(ValueError, match=r"a_sync_configs\['k_steps'\], with an outer_optimizer"):
        fleet.init(strategy=changed(**{name: True}))


def test_alone_it_trains_as_plain_torch() -> None:
    """A mean over one trainer is the trainer's own value; a closure and a loss exclude each
    other.
    """
    model = ranks.net(2)
    plain = copy.deepcopy(model)
    fleet.init(is_collective=True, strategy=changed(localsgd=True))
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(fleet.distributed_model(model).parameters(), lr=0.1)
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in ranks.batches(3):
        for net, stepped in ((model, optimizer), (plain, other)):
            stepped.zero_grad()
            F.mse_loss(net(x), y).backward()
            stepped.step()

    assert all(map(torch.equal, local_steps.values(model), local_steps.values(plain)))
    with pytest.raises(ValueError, match="expected a closure or a loss, got both"):
        optimizer.step(lambda: 1.0, loss=1.0)
