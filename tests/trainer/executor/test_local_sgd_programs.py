"""Programs without servers whose trainers step by themselves: averages at exactly the steps of the
strategy's rule.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.collective_trainers import Trainer, batches, fine, ports, together
from trainer import Executor
from trainer.collective.process_groups import ProcessGroups
from transpiler import DistributedStrategy

STEPS = 20
MODE: dict[str, Any] = {"mode": "collective"}
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 2}},
    "adaptive": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {"init_k_steps": 3, "begin_step": 1},
    },
    "late": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {"init_k_steps": 3, "begin_step": 0},
    },
}


def lr_of(step: int) -> float:
    """The rate of a step, from 1, as the trainers' StepLR(2, 0.5) has it."""
    return 0.1 * 0.5 ** ((step - 1) // 2)


def reference(rule: dict[str, Any]) -> tuple[list[int], list[int], list[Any]]:
    """The rule written out over two single-node programs: the steps that average, those that
    measure the loss, and both trainers' parameters after every step.
    """
    configs = next(value for key, value in rule.items() if key.endswith("_configs"))
    begin, k = configs["begin_step"], configs.get("k_steps") or configs["init_k_steps"]
    alone = [Trainer([], 0, {}) for _ in range(2)]
    last, first, averaged, measured = 0, 0.0, list[int](), list[int]()
    steps: list[Any] = []
    with Executor() as executor:
        for step, row in enumerate(batches(2, STEPS), 1):
            losses = []
            for trainer, batch in zip(alone, row, strict=True):
                (loss,) = executor.run(trainer.main, feed=batch, fetch_list=["loss"])
                losses.append(float(loss))
                trainer.schedule.step()
            first = first or sum(losses) / 2
            due = step <= begin or step - last == k
            if "init_k_steps" in configs and (due or step == 1):
                measured.append(step)
                ratio = lr_of(1) * (sum(losses) / 2) / (lr_of(step) * first)
                k = min(16, max(1, math.ceil(math.sqrt(ratio * configs["init_k_steps"]))))
            if due:
                last = step
                averaged.append(step)
                average(alone)
            steps.append([parameters(each) for each in alone])
    return averaged, measured, steps


def average(trainers: list[Trainer]) -> None:
    for pair in zip(*(each.model.parameters() for each in trainers), strict=True):
        mean = (pair[0].data + pair[1].data) * 0.5
        for each in pair:
            each.data.copy_(mean)


def parameters(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def strategy_of(rule: dict[str, Any]) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in rule.items():
        setattr(strategy, name, value)
    return strategy


@pytest.mark.observes(
    "localsgd",
    "localsgd_configs.k_steps",
    "localsgd_configs.begin_step",
    "adaptive_localsgd",
    "adaptive_localsgd_configs.init_k_steps",
    "adaptive_localsgd_configs.begin_step",
)
@pytest.mark.parametrize("name", RULES)
def test_two_programs_average_at_exactly_the_steps_of_the_rule(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every step's parameters are those of the rule written out, with a momentum and a schedule;
    no other run begins an operation among trainers.
    """
    averaged, measured, expected = reference(RULES[name])
    begun: list[tuple[int, str]] = []
    begin = ProcessGroups.begin

    def noted(self: ProcessGroups, operation: Any, what: str) -> Any:
        begun.append((self.rank, what))
        return begin(self, operation, what)

    monkeypatch.setattr(ProcessGroups, "begin", noted)
    endpoints, data = ports(2), batches(2, STEPS)
    strategy = strategy_of(RULES[name])
    team = [Trainer(endpoints, rank, MODE, strategy=strategy) for rank in range(2)]

    def train(rank: int) -> tuple[list[Any], list[list[str]]]:
        steps, operations = [], []
        with Executor() as executor:
            executor.run(team[rank].startup)
            for row in data:
                before = len(begun)
                executor.run(team[rank].main, feed=row[rank])
                operations.append([what for who, what in begun[before:] if who == rank])
                team[rank].schedule.step()
                steps.append(parameters(team[rank]))
        return steps, operations

    for rank, (steps, operations) in enumerate(fine(together(2, train))):
        for step, (mine, theirs) in enumerate(zip(steps, expected, strict=True), 1):
            sums = [what for what in operations[step - 1] if what.startswith("c_allreduce_sum")]
            assert len(sums) == (step in averaged), step
            assert operations[step - 1].count("c_adapt_k_steps") == (step in measured), step
            assert len(operations[step - 1]) == len(sums) + (step in measured)
            for one, other in zip(mine, theirs[rank], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert len(averaged) < STEPS - 5
