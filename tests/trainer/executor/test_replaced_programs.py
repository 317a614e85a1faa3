"""``lars``, ``lamb``, ``adam_d2sum`` in programs: the optimizer ops change, and step as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.collective_trainers import GRAD, fine, ports, together
from tests.support.eager_jobs import Servers
from tests.support.replaced_rules import (
    SWITCHES,
    assert_close,
    batches,
    net,
    optimizer_of,
    reference,
    schedule_of,
    step,
    strategy_of,
)
from trainer import DistributedEmbedding, Executor
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, Program, capture
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs

OPS = {"lars": "lars_momentum", "lamb": "lamb", "adam_d2sum": "adam_d2sum"}


def captured(switch: str, model: nn.Module) -> tuple[Programs, Any]:
    optimizer = optimizer_of(switch, model)
    pair = Programs(*capture(model, step, optimizer, batches(1)[0]))
    return pair, schedule_of(optimizer)


def run(main: Program, startup: Program, schedule: Any, data: Any) -> None:
    with Executor() as exe:
        exe.run(startup)
        for batch in data:
            exe.run(main, feed=batch)
            schedule.step()


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_rewritten_program_runs_alone(switch: str, tmp_path: Path) -> None:
    """By the script's scheduler; the given program stays as it was; a file has the new ops."""
    model = net()
    given, schedule = captured(switch, model)
    before = str(given.main)
    main, startup = rewritten(given, strategy_of(switch))
    main.save(tmp_path / "program")
    run(main, startup, schedule, batches())

    assert_close(model, reference(switch, [[batch] for batch in batches()]))
    assert str(given.main) == before and OPS[switch] not in before
    assert f"{OPS[switch]}(0.weight@GRAD, " in str(main)
    loaded = Program.load(tmp_path / "program")
    assert loaded == main and loaded.fingerprint() == main.fingerprint()


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_program_that_was_loaded_is_rewritten(switch: str, tmp_path: Path) -> None:
    """Its ops hold the hyper-parameters; names alone exclude."""
    given, _ = captured(switch, net())
    given.main.save(tmp_path / "main")
    given.startup.save(tmp_path / "startup")
    loaded = Programs(Program.load(tmp_path / "main"), Program.load(tmp_path / "startup"))
    main, startup = rewritten(loaded, strategy_of(switch))

    with Executor() as exe:
        exe.run(startup)
        first, *_ = exe.run(main, feed=batches(1)[0], fetch_list=["loss"])
        for _ in range(5):
            last, *_ = exe.run(main, feed=batches(1)[0], fetch_list=["loss"])
    assert float(last) < float(first)
    assert OPS[switch] in str(main)


def test_a_checkpoint_of_a_program_goes_on(tmp_path: Path) -> None:
    """The rate that was read is that of the script's scheduler."""
    data = batches()
    for part in (data[:9], data[9:]):
        model = net()
        given, schedule = captured("lars", model)
        main, startup = rewritten(given, strategy_of("lars"))
        with Executor() as exe:
            exe.run(startup)
            if part[0] is not data[0]:
                exe.load(str(tmp_path / "saved"), main, schedule)
            for batch in part:
                exe.run(main, feed=batch)
                schedule.step()
            if part[0] is data[0]:
                exe.save(str(tmp_path / "saved"), main, schedule)

    assert_close(model, reference("lars", [[batch] for batch in data]))


@pytest.mark.observes("lars", "lamb", "adam_d2sum")
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_transpiled_program_takes_the_same_steps(servers: Servers, switch: str) -> None:
    """On two servers, cut as small as may be: a tensor whose norm counts is whole."""
    model = net()
    (main, startup), schedule = captured(switch, model)
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=8))
    transpiler.transpile(
        0, main, servers(2), 1, startup_program=startup, strategy=strategy_of(switch)
    )
    plan = transpiler.get_trainer_program().deployment.plan
    run(transpiler.get_trainer_program(), transpiler.get_startup_program(), schedule, batches())

    assert_close(model, reference(switch, [[batch] for batch in batches()]))
    cut = {len(placement.slices) for placement in plan.placements if placement.group is not None}
    assert cut == ({1, 2} if switch == "adam_d2sum" else {1})


@pytest.mark.parametrize("switch", SWITCHES)
def test_two_trainers_of_a_collective_program_agree(switch: str) -> None:
    """Both end where the mean gradient leads."""
    endpoints, data = ports(2), [batches(seed=7), batches(seed=8)]
    prepared = []
    for rank in range(2):  # torch's tracer is not for several threads
        model = net()
        (main, startup), schedule = captured(switch, model)
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
        transpiler.transpile(
            rank,
            main,
            trainers=",".join(endpoints),
            startup_program=startup,
            current_endpoint=endpoints[rank],
            strategy=strategy_of(switch),
        )
        programs = transpiler.get_trainer_program(), transpiler.get_startup_program()
        prepared.append((model, *programs, schedule))

    fine(together(2, lambda rank: run(*prepared[rank][1:], data[rank])))
    expected = reference(switch, [list(row) for row in zip(*data, strict=True)])
    for model, *_ in prepared:
        assert_close(model, expected)


def test_rows_that_follow_the_optimizer_are_refused() -> None:
    """The table is named, and what to do."""
    model = nn.Sequential(DistributedEmbedding(4, num_embeddings=9, name="emb"), nn.Linear(4, 2))

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(ids)
        return out.square().mean()

    optimizer = torch.optim.Adam(model.parameters())
    pair = Programs(*capture(model, loss, optimizer, (torch.tensor([1, 2]),)))
    with pytest.raises(ValueError, match="table 'emb' follows the optimizer that LAMB replaces"):
        rewritten(pair, strategy_of("lamb"))
