"""gradient_scale_configs: by what the gradients of several trainers are multiplied when they become
one, in plans, in programs and in results.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver.errors import FingerprintMismatch
from tests.support.collective_trainers import GRAD, LOCAL, captured, fine, ports, together
from tests.support.eager_jobs import Servers
from tests.support.many_ranks import on_ranks
from tests.support.table_trainers import Net, Trainer
from tests.support.threads import at_once
from trainer import Executor, fleet
from transpiler import DistributedStrategy, DistributeTranspiler, DistributeTranspilerConfig
from transpiler.program import Program

BOTH = "127.0.0.1:6174,127.0.0.1:6175"


def strategy(scale: str, **configs: Any) -> DistributedStrategy:
    made = DistributedStrategy()
    made.a_sync = bool(configs)
    made.a_sync_configs = configs
    made.gradient_scale_configs = {"scale_strategy": scale}
    return made


def transpiled(scale: str, settings: dict[str, Any], **more: Any) -> DistributeTranspiler:
    main, startup = captured(0.1, False)
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
    given = {"trainers": 2} if not settings else {"trainers": BOTH, **more}
    transpiler.transpile(0, main, startup_program=startup, strategy=strategy(scale), **given)
    return transpiler


@pytest.mark.observes("gradient_scale_configs.scale_strategy")
@pytest.mark.parametrize(("scale", "factor"), [("avg", 0.5), ("sum", 1.0), ("customized", 1.0)])
def test_servers_divide_only_for_the_mean(scale: str, factor: float, servers: Servers) -> None:
    """A dense parameter and rows, with two trainers that add 2 and 6."""
    endpoints = servers(1)

    def play(number: int) -> tuple[float, float]:
        trainer = Trainer(endpoints, number, 2, Net(), strategy=strategy(scale))
        trainer.add([4], (2.0, 6.0)[number], dense=(2.0, 6.0)[number])
        trainer.optimizer.flush()
        found = trainer.model.row(4), trainer.model.w[0].item()
        trainer.job.finish()
        return found

    assert (
        at_once(*(partial(play, number) for number in range(2))) == [(8 * factor, 8 * factor)] * 2
    )


@pytest.mark.observes("gradient_scale_configs.scale_strategy")
def test_a_servers_program_has_no_scale_op_for_a_sum() -> None:
    """The op is what a server does; the plan says it too, so that all processes agree."""
    kinds = {}
    for scale in ("avg", "sum", "customized"):
        made = transpiled(scale, {})
        program = made.get_pserver_program("127.0.0.1:6174")
        kinds[scale] = [op.type for op in program.blocks[1].ops]
        assert Program.from_proto(program.to_proto()) == program
        assert (f"{'mean' if scale == 'avg' else 'sum'} over trainers") in str(program)

    assert kinds["avg"] == ["sum", "scale", "momentum"]
    assert kinds["sum"] == kinds["customized"] == ["sum", "momentum"]
    prints = {transpiled(s, {}).get_trainer_program().fingerprint() for s in kinds}
    assert len(prints) == 3


@pytest.mark.observes("gradient_scale_configs.scale_strategy")
def test_a_loss_gradient_is_scaled_only_for_the_mean() -> None:
    """Without servers: parameters of two trainers move twice as far by a sum."""

    def moved(scale: str) -> torch.Tensor:
        endpoints, models = ports(2), [nn.Linear(2, 1) for _ in range(2)]
        nn.init.zeros_(models[0].weight)
        captures = [_captured(model) for model in models]

        def play(rank: int) -> torch.Tensor:
            made = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
            made.transpile(
                rank,
                captures[rank][0],
                trainers=",".join(endpoints),
                startup_program=captures[rank][1],
                current_endpoint=endpoints[rank],
                strategy=strategy(scale),
            )
            program = made.get_trainer_program()
            assert (scale == "avg") == any(op.type == "scale" for op in program.main.ops)
            with Executor() as executor:
                executor.run(made.get_startup_program())
                executor.run(program, feed=(torch.ones(2, 2),))
            return models[rank].weight.detach().clone()

        one, other = fine(together(2, play))
        assert torch.equal(one, other)
        return one

    mean = moved("avg")
    assert torch.equal(moved("sum"), 2 * mean) and torch.equal(moved("customized"), 2 * mean)


def _captured(model: nn.Module) -> tuple[Program, Program]:
    from transpiler import capture, program_guard

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with program_guard(Program(()), Program(())):
        return capture(model, lambda model, x: model(x).mean(), optimizer, (torch.ones(2, 2),))


def test_where_nothing_is_merged_it_is_refused(servers: Servers) -> None:
    """A step of one trainer alone has no mean: async, k-step; and averaged parameters."""
    for configs in ({"max_merge_var_num": 2}, {"k_steps": 3}, {"modes": {"*": "collective"}}):
        with pytest.raises(ValueError, match="scale_strategy"):
            fleet.init(
                fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]),
                strategy=strategy("sum", **configs),
            )
    with pytest.raises(ValueError, match="has no effect with collective_mode='local_sgd'"):
        transpiled("sum", LOCAL, current_endpoint="127.0.0.1:6174")


@pytest.mark.observes("gradient_scale_configs.scale_strategy")
@on_ranks(2)
def test_eager_trainers_divide_only_for_the_mean(rank: int, scratch: Path) -> None:
    """Ranks whose gradients are 1 and 2, with and without merged steps; and ranks that disagree."""
    for scale, factor in (("avg", 0.5), ("sum", 1.0), ("customized", 1.0)):
        for k_steps in (1, 2):
            asked = strategy(scale)
            if k_steps > 1:
                asked.gradient_merge, asked.gradient_merge_configs = True, {"k_steps": 2}
            fleet.init(is_collective=True, strategy=asked)
            model: Any = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = fleet.distributed_optimizer(
                torch.optim.SGD(fleet.distributed_model(model).parameters(), lr=1.0)
            )
            for _ in range(k_steps):
                optimizer.zero_grad()
                model(torch.full((1, 1), float(rank + 1))).sum().backward()
                optimizer.step()
            assert model.weight.item() == -3 * factor, (scale, k_steps)
            fleet.finish()
    fleet.init(is_collective=True, strategy=strategy(("avg", "sum")[rank]))
    fleet.distributed_model(model)
    with pytest.raises(FingerprintMismatch, match="scale_strategy='sum'"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    fleet.finish()
