"""``ExecutionStrategy`` and ``BuildStrategy``: what each attribute changes, seen from outside."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.executed import (
    batches,
    build,
    captured,
    execution,
    transpiled,
    values,
)
from trainer import CompiledProgram, Executor, ParallelExecutor
from transpiler import (
    BuildStrategy,
    DistributedStrategy,
    DistributeTranspiler,
    ExecutionStrategy,
    Program,
)


class Seen(TorchDispatchMode):
    """Records each op, with the threads that torch had for it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        self.threads.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.observes("execution_strategy.num_threads")
def test_a_run_has_its_threads() -> None:
    """While ops run; afterwards the process has as many as before."""
    _, main, startup = captured()
    before, count = torch.get_num_threads(), torch.get_num_threads() + 2
    compiled = CompiledProgram(main).with_data_parallel(exec_strategy=execution(num_threads=count))
    (batch,) = batches(1)
    with Executor() as executor:
        executor.run(startup)
        with Seen() as seen:
            executor.run(compiled, batch)

    assert seen.threads == {count} and torch.get_num_threads() == before


@pytest.mark.observes("execution_strategy.num_iteration_per_run")
@pytest.mark.parametrize("how", ["compiled", "parallel", "transpiled"])
def test_one_run_takes_several_steps(how: str) -> None:
    """On a list of feeds, as so many runs would, to the bit; the last step's values are fetched."""
    data, runs = batches(4), execution(num_iteration_per_run=2)
    pairs: list[Any] = [data[:2], [dict(zip(["x", "y"], each, strict=True)) for each in data[2:]]]
    model, main, startup = captured(momentum=0.9)
    with Executor() as executor:
        executor.run(startup)
        losses = [executor.run(main, batch, ["loss"])[0] for batch in data]
    wanted = values(model)

    model, main, startup = captured(momentum=0.9)
    if how == "parallel":
        with ParallelExecutor(False, "loss", main, exec_strategy=runs) as parallel:
            found = [parallel.run(["loss"], pair)[0] for pair in pairs]
    else:
        strategy = DistributedStrategy()
        strategy.execution_strategy = runs
        program: Any = CompiledProgram(main)
        if how == "transpiled":
            program, startup = transpiled(main, startup, strategy)
        else:
            program = program.with_data_parallel(exec_strategy=runs)
        with Executor() as executor:
            executor.run(startup)
            found = [executor.run(program, pair, ["loss"])[0] for pair in pairs]

    assert all(map(torch.equal, values(model), wanted))
    assert [float(each) for each in found] == [float(losses[1]), float(losses[3])]


def test_a_feed_that_is_no_list_of_feeds_is_refused() -> None:
    """The error says how many are expected; nothing has run."""
    model, main, _ = captured()
    before = values(model)
    runs = execution(num_iteration_per_run=2)
    compiled = CompiledProgram(main).with_data_parallel(exec_strategy=runs)
    with Executor() as executor:
        with pytest.raises(TypeError, match="expected a list of 2 feeds"):
            executor.run(compiled, batches(1)[0])
        with pytest.raises(ValueError, match="expected 2 feeds, .* got 3"):
            executor.run(compiled, batches(3))

    assert all(map(torch.equal, values(model), before))


@pytest.mark.observes("execution_strategy.num_iteration_per_drop_scope")
def test_memory_is_given_back_after_every_few_runs() -> None:
    """What only a collection frees is freed in the second run, not in the first."""

    class Ring:
        def __init__(self) -> None:
            self.me = self

    _, main, startup = captured()
    runs = execution(num_iteration_per_drop_scope=2)
    compiled = CompiledProgram(main).with_data_parallel(exec_strategy=runs)
    there = []
    with Executor() as executor:
        executor.run(startup)
        gc.disable()
        try:
            ring = weakref.ref(Ring())
            for batch in batches(2):
                executor.run(compiled, batch)
                there.append(ring() is not None)
        finally:
            gc.enable()

    assert there == [True, False]


COMPILES = [
    "fuse_elewise_add_act_ops",
    "fuse_bn_act_ops",
    "enable_auto_fusion",
    "fuse_relu_depthwise_conv",
]


@pytest.mark.observes(
    "without_graph_optimization",
    "build_strategy.fuse_elewise_add_act_ops",
    "build_strategy.fuse_bn_act_ops",
    "build_strategy.enable_auto_fusion",
    "build_strategy.fuse_relu_depthwise_conv",
)
@pytest.mark.parametrize("key", [*COMPILES, "without_graph_optimization"])
def test_torch_compiles_the_compute(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone asks for it; without them nothing is compiled."""
    made: list[Any] = []

    def compile(module: Any, **options: Any) -> Any:
        made.append(options)
        return module

    monkeypatch.setattr(torch, "compile", compile)
    _, main, startup = captured()
    strategy = DistributedStrategy()
    if key == "without_graph_optimization":
        strategy.without_graph_optimization = False
    else:
        strategy.build_strategy = build(**{key: True})
    with Executor() as executor:
        for each in (DistributedStrategy(), strategy):
            assert not made
            program, start = transpiled(main, startup, each)
            executor.run(start)
            executor.run(program, batches(1)[0])

    assert made and "reorder_for_locality" not in made[0]["options"]


@pytest.mark.observes("trainer_desc_configs.dump_fields", "trainer_desc_configs.dump_param")
def test_a_program_dumps_its_variables(tmp_path: Path) -> None:
    """By their names in the program, also one that nobody fetches; parameters as the step found
    them.
    """
    model, main, startup = captured()
    strategy = DistributedStrategy()
    strategy.trainer_desc_configs = {
        "dump_fields_path": str(tmp_path),
        "dump_fields": ["tanh"],
        "dump_param": ["0.bias"],
        "stat_var_names": ["0.weight@GRAD"],
    }
    program, start = transpiled(main, startup, strategy)
    assert Program.from_proto(program.to_proto()).deployment == program.deployment
    bias = model[0].bias.detach().clone()  # type: ignore[index]
    with Executor() as executor:
        executor.run(start)
        executor.run(program, batches(1)[0])
    text = (tmp_path / "trainer-0" / "step-00000001.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]

    assert [line.get("sample") for line in lines] == [0, 1, 2, 3, None, None]
    assert torch.equal(torch.tensor(lines[4]["value"]), bias)
    assert lines[5]["stat"] == "0.weight@GRAD" and lines[5]["count"] == 48


def test_the_pages_examples_are_assigned_and_run() -> None:
    """Objects, whose attributes are checked when they are assigned, and all eight at once."""
    runs, builds = ExecutionStrategy(), BuildStrategy()
    runs.num_threads = 10
    runs.num_iteration_per_drop_scope = 10
    runs.num_iteration_per_run = 10
    strategy = DistributedStrategy()
    strategy.execution_strategy = runs
    assert dict(strategy.execution_strategy) == dict(runs) and len(builds) == 8
    builds.fuse_all_optimizer_ops = builds.enable_inplace = builds.fuse_broadcast_ops = True
    strategy.build_strategy = builds
    _, main, startup = captured()
    program, start = transpiled(main, startup, strategy)
    with Executor() as executor:
        executor.run(start)
        executor.run(program, batches(10), ["loss"])
        assert executor.steps(program) == 10

    with pytest.raises(TypeError, match="ExecutionStrategy.num_threads: expected a whole number"):
        runs.num_threads = "10"
    with pytest.raises(ValueError, match="BuildStrategy has no 'enable_inplac'"):
        builds.enable_inplac = True


def test_a_setting_that_comes_too_late_is_refused() -> None:
    """A program is as transpile made it: its sums, its startup program, and what servers update."""
    _, main, startup = captured()
    program, start = transpiled(main, startup, DistributedStrategy())
    with Executor() as executor:
        executor.run(start)
        for key in ("enable_sequential_execution", "fuse_broadcast_ops"):
            with pytest.raises(ValueError, match=f"{key}: .* give it to transpile"):
                executor.run(CompiledProgram(program, build(**{key: True})), batches(1)[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, "127.0.0.1:1", 1, startup_program=startup)
    with pytest.raises(ValueError, match="fuse_all_optimizer_ops: servers update"):
        CompiledProgram(transpiler.get_trainer_program(), build(fuse_all_optimizer_ops=True))
    forward = CompiledProgram(main.clone(for_test=True))
    with pytest.raises(ValueError, match="num_iteration_per_run: expected a program that trains"):
        forward.with_data_parallel(exec_strategy=execution(num_iteration_per_run=2))
