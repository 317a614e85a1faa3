"""gradient_merge in programs: k runs make one update, alone, with servers and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.collective_trainers import GRAD, fine, ports, together
from tests.support.eager_jobs import Servers
from tests.support.table_trainers import Net as TableNet
from trainer import Executor
from transpiler import (
    ClipGradByGlobalNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.program import Program
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs
from transpiler.verify.verify import IllegalProgram, verify_single_node

Batch = tuple[Tensor, Tensor]


def strategy(runs: int = 2, avg: bool | str = True, **configs: Any) -> DistributedStrategy:
    made = DistributedStrategy()
    made.a_sync, made.a_sync_configs = bool(configs), configs
    made.gradient_merge = True
    made.gradient_merge_configs = {"k_steps": runs, "avg": avg}
    return made


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def captured(model: nn.Module, clip: bool = True) -> Programs:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with program_guard(Program(()), Program(())):
        return Programs(
            *capture(
                model,
                lambda model, x, y: F.cross_entropy(model(x), y),
                optimizer,
                batches(1)[0],
                grad_clip=ClipGradByGlobalNorm(0.1) if clip else None,
            )
        )


def by_hand(data: list[Batch], size: int, clip: bool = True, factor: float = 1.0) -> list[Tensor]:
    """Plain torch, with so many batches as one."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for first in range(0, len(data), size):
        x, y = (torch.cat(parts) for parts in zip(*data[first : first + size], strict=True))
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return list(model.parameters())


def close(one: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.observes(
    "gradient_merge",
    "gradient_merge_configs.k_steps",
    "gradient_merge_configs.avg",
)
@pytest.mark.parametrize(("avg", "factor"), [(True, 1.0), ("sum", 3.0)])
def test_alone_it_equals_the_big_batch(avg: bool | str, factor: float) -> None:
    """Clipped as one gradient; in the runs between no parameter changes."""
    model, data = net(), batches(6)
    made = rewritten(captured(model), strategy(3, avg))
    changes = []
    with Executor() as executor:
        executor.run(made.startup)
        for batch in data:
            before = model[0].weight.detach().clone()
            executor.run(made.main, feed=batch, fetch_list=["loss"])
            changes.append(not torch.equal(before, model[0].weight))
        assert executor.steps(made.main) == 2

    assert changes == [False, False, True] * 2
    assert close(model.parameters(), by_hand(data, 3, factor=factor))


@pytest.mark.observes(
    "gradient_merge",
    "gradient_merge_configs.k_steps",
)
@pytest.mark.parametrize("mode", ["sync", "half_async", "geo"])
def test_with_servers_only_every_kth_run_sends(mode: str, servers: Servers) -> None:
    """Two trainers in sync mode, one in others; a k-th of the bytes travels."""
    configs: dict[str, Any] = {
        "sync": {},
        "half_async": {"half_async": True},
        "geo": {"k_steps": 1},
    }[mode]
    count, data, endpoints = 2 if mode == "sync" else 1, batches(8), servers(2)
    sent: dict[int, list[float]] = {}
    for k_steps in (2, 1):
        models = [net() for _ in range(count)]
        captures = [captured(model, clip=mode == "sync") for model in models]
        sent[k_steps] = []
        asked = strategy(k_steps, **configs)
        if k_steps == 1:
            asked.gradient_merge, asked.gradient_merge_configs = False, {}

        def play(
            rank: int,
            captures: list[Programs] = captures,
            asked: DistributedStrategy = asked,
            sent: list[float] = sent[k_steps],
        ) -> None:
            made = DistributeTranspiler()
            pair = captures[rank]
            made.transpile(
                rank,
                pair.main,
                pservers=endpoints,
                trainers=count,
                startup_program=pair.startup,
                strategy=asked,
            )
            program = made.get_trainer_program()
            with Executor() as executor:
                executor.run(made.get_startup_program())
                storage = program.storage
                assert storage is not None
                communicator = executor.connection_of(storage)
                assert communicator is not None
                before = communicator.metrics()["bytes_out"]
                for batch in data[rank::count]:
                    executor.run(program, feed=batch)
                executor.flush()
                sent.append(communicator.metrics()["bytes_out"] - before)

        fine(together(count, play))
        if k_steps == 2:
            assert close(models[0].parameters(), by_hand(data, 2 * count, clip=mode == "sync"))
    assert all(two <= 0.55 * one for two, one in zip(sent[2], sent[1], strict=True)), sent


@pytest.mark.observes(
    "gradient_merge",
    "gradient_merge_configs.k_steps",
)
def test_without_servers_only_every_kth_run_sums() -> None:
    """Two trainers with halves of the samples."""
    data, endpoints = batches(8), ports(2)
    models = [net() for _ in range(2)]
    captures = [captured(model) for model in models]

    def play(rank: int) -> None:
        made = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
        made.transpile(
            rank,
            captures[rank].main,
            trainers=",".join(endpoints),
            startup_program=captures[rank].startup,
            current_endpoint=endpoints[rank],
            strategy=strategy(2),
        )
        with Executor() as executor:
            executor.run(made.get_startup_program())
            for batch in data[rank::2]:
                executor.run(made.get_trainer_program(), feed=batch)

    fine(together(2, play))
    assert all(close(model.parameters(), by_hand(data, 4)) for model in models)


def test_what_stands_behind_the_merge_is_fetched_in_its_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Elsewhere the error says when; and a window that is not complete is said in the end."""
    made = rewritten(captured(net()), strategy(2))
    clipped = next(op for op in made.main.main.ops if op.type == "scale_by").outputs[0]
    with Executor() as executor:
        executor.run(made.startup)
        with pytest.raises(ValueError, match="in every run number 2 only"):
            executor.run(made.main, feed=batches(1)[0], fetch_list=[clipped])
        executor.run(made.main, feed=batches(1)[0], fetch_list=[clipped])
        executor.run(made.main, feed=batches(1)[0])
    assert "the last 1 runs have made no update: an update takes 2" in caplog.text


def test_what_is_made_prints_saves_and_is_drawn(tmp_path: Any) -> None:
    """It is an ordinary program, with variables that end in .merged."""
    made = rewritten(captured(net()), strategy(2)).main
    assert "0.weight@GRAD.merged" in str(made)
    made.draw(tmp_path / "x.svg")
    made.save(tmp_path / "x.program")
    assert Program.load(tmp_path / "x.program").fingerprint() == made.fingerprint()
    assert "gradient_merge" not in str(made.clone(for_test=True))


def test_a_program_that_acts_before_it_has_merged_is_illegal() -> None:
    """And one that merges twice: the error names the op."""
    made = rewritten(captured(net()), strategy(2)).main
    merge = next(op for op in made.main.ops if op.type == "gradient_merge")
    others = [op for op in made.main.ops if op is not merge]
    for ops in ([*others, merge], [*made.main.ops, merge]):
        with pytest.raises(IllegalProgram, match="gradients are merged once|before its first use"):
            verify_single_node(made.with_blocks(replace(made.main, ops=tuple(ops))))


def test_tables_and_gradients_that_leave_early_are_refused() -> None:
    """The messages say what to do."""
    with pytest.raises(ValueError, match="overlap with gradient_merge"):
        rewritten(captured(net()), strategy(2, overlap=True))
    model = TableNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with program_guard(Program(()), Program(())):
        pair = capture(
            model, lambda model, x: (model.emb(x) * model.w).sum(), optimizer, (torch.tensor([1]),)
        )
    with pytest.raises(ValueError, match="expected a program without tables"):
        rewritten(Programs(*pair), strategy(2))


def test_a_load_leaves_out_what_was_merged_before_it(tmp_path: Any) -> None:
    """A program that goes back begins a window there."""
    data, path = batches(5), str(tmp_path / "checkpoint")
    main, startup = rewritten(captured(net()), strategy())
    with Executor() as executor:
        executor.run(startup)
        for x, y in data[:2]:
            executor.run(main, feed=(x, y))
        executor.save(path, main)
        for x, y in data[2:4]:
            executor.run(main, feed=(x, y))
        kept = {name: tensor.clone() for name, tensor in main.storage.tensors.items()}
        executor.run(main, feed=(data[4][0] * float("nan"), data[4][1]))
        executor.load(path, main)
        for x, y in data[2:4]:
            executor.run(main, feed=(x, y))

    assert all(torch.equal(tensor, kept[name]) for name, tensor in main.storage.tensors.items())
