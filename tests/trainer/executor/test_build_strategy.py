"""``BuildStrategy``: order, memory, updates and broadcasts, seen from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.collective_trainers import fine, ports, together
from tests.support.executed import (
    batches,
    build,
    captured,
    transpiled,
    values,
)
from trainer import CompiledProgram, Executor
from trainer.collective.process_groups import ProcessGroups
from transpiler import (
    DistributedStrategy,
)


@pytest.mark.observes("build_strategy.enable_sequential_execution")
def test_compiled_code_keeps_the_order_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is told not to move ops; alone it has nothing to say, and raises."""
    made: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda module, **said: made.append(said) or module)
    _, main, _ = captured()
    both = build(enable_sequential_execution=True, enable_auto_fusion=True)
    with Executor() as executor:
        executor.run(CompiledProgram(main, both), batches(1)[0])

    assert made[0]["options"]["reorder_for_locality"] is False
    assert made[0]["options"]["reorder_for_peak_memory"] is False
    with pytest.raises(ValueError, match="enable_sequential_execution: has no effect without"):
        CompiledProgram(main, build(enable_sequential_execution=True))


class Widening(nn.Module):
    """Layers of two dtypes: their gradients travel in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8, dtype=torch.float64)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x).double()).float())
        return out


@pytest.mark.observes("build_strategy.enable_sequential_execution")
def test_sums_are_waited_for_where_they_begin() -> None:
    """In a program without servers: once for each bucket, right behind it; the values are the
    same.
    """
    data, found = batches(3), []
    for ordered in (False, True):
        model, main, startup = captured(model=Widening())
        strategy = DistributedStrategy()
        strategy.build_strategy = build(enable_sequential_execution=ordered)
        program, start = transpiled(main, startup, strategy)
        ops = program.main.ops
        buckets = {op.arguments["bucket"] for op in ops if op.type == "c_allreduce_sum"}
        waits = [place for place, op in enumerate(ops) if op.type == "c_sync_comm_stream"]
        assert len(buckets) == 3 and len(waits) == (3 if ordered else 1)
        assert all(ops[place - 1].type == "c_allreduce_sum" for place in waits) or not ordered
        with Executor() as executor:
            executor.run(start)
            for batch in data:
                executor.run(program, batch)
        found.append(values(model))

    assert all(map(torch.equal, *found))


@pytest.mark.observes("build_strategy.enable_inplace")
def test_ops_write_over_what_nothing_reads() -> None:
    """Fewer bytes are allocated, every value is the same to the bit, and what is fetched is never
    written over.
    """
    data, found, allocated = batches(3), [], []
    names = ["loss", "addmm", "0.weight@GRAD"]
    for inplace in (False, True):
        model, main, startup = captured(momentum=0.9)
        compiled = CompiledProgram(main, build(enable_inplace=inplace))
        fetched = []
        with Executor() as executor:
            executor.run(startup)
            for batch in data:
                fetched += executor.run(compiled, batch, names)
            with torch.profiler.profile(profile_memory=True) as profile:
                executor.run(compiled, data[0])
        found.append(values(model) + fetched)
        events = profile.events()
        allocated.append(
            sum(max(0, each.cpu_memory_usage) for each in events if not each.cpu_children)
        )
    assert all(map(torch.equal, *found))
    assert allocated[1] < allocated[0]


@pytest.mark.observes("build_strategy.fuse_all_optimizer_ops")
@pytest.mark.parametrize(
    ("rule", "flag", "kernel"),
    [
        (torch.optim.Adam, "fused", "aten::_fused_adam_"),
        (torch.optim.SGD, "fused", "aten::_fused_sgd_"),
        (torch.optim.Adamax, "foreach", "aten::_foreach_lerp_"),
    ],
)
def test_updates_run_as_few_kernels(rule: Any, flag: str, kernel: str) -> None:
    """The ops have torch's flag, the profiler sees torch's kernel, and 20 steps give the values of
    the plain update to 1e-6; the script's own optimizer keeps its flags.
    """
    data, found = batches(20), []
    for fuse in (False, True):
        model, main, startup = captured(rule)
        compiled = CompiledProgram(main, build(fuse_all_optimizer_ops=fuse))
        updates = [op for op in compiled.main.main.ops if op.type in ("adam", "sgd", "adamax")]
        assert all(op.arguments.get(flag, False) is fuse for op in updates) and updates
        with Executor() as executor:
            executor.run(startup)
            with torch.profiler.profile() as profile:
                for batch in data:
                    executor.run(compiled, batch)
        assert (kernel in {event.key for event in profile.key_averages()}) is fuse
        assert not main.storage.optimizer.param_groups[0].get("fused")  # type: ignore[union-attr]
        found.append(values(model))

    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6)


@pytest.mark.observes("build_strategy.fuse_broadcast_ops")
def test_first_values_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the process group; both trainers have trainer 0's values."""
    sent: list[str] = []
    begin = ProcessGroups.begin

    def counted(self: Any, start: Any, what: str) -> Any:
        sent.append(what)
        return begin(self, start, what)

    monkeypatch.setattr(ProcessGroups, "begin", counted)
    counts = []
    for fuse in (False, True):
        endpoints, made = ports(2), [captured() for _ in range(2)]
        for parameter in made[1][0].parameters():
            parameter.data.add_(1.0)

        def run(rank: int, endpoints: Any = endpoints, made: Any = made, fuse: bool = fuse) -> Any:
            strategy = DistributedStrategy()
            strategy.build_strategy = build(fuse_broadcast_ops=fuse)
            _, start = transpiled(*made[rank][1:], strategy, endpoints, rank)
            with Executor() as executor:
                executor.run(start)
            return values(made[rank][0])

        sent.clear()
        first, second = fine(together(2, run))
        assert all(map(torch.equal, first, second))
        counts.append(sum("c_broadcast" in what for what in sent))

    assert counts == [2 * 6, 2 * 1]
