"""Every argument of the public calls that is True or False takes nothing else for one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pserver
import trainer
import transpiler
from tests.support.distributed import TWO, captured
from trainer import fleet
from transpiler.distribute_config import FIELDS

# torch's own arguments, which torch checks or not, and a parser's, which data sets give
TORCHS = (
    "trainer.DataParallel.join.",
    "trainer.DataParallel.state_dict.keep_vars",
    "trainer.DataParallel.load_state_dict.",
    "trainer.CsvLines.parse.",
    "trainer.CsvLines.count.",
    "trainer.ParquetRows.",
)
NET = nn.Linear(2, 2)


def trained() -> Any:
    fleet.init()
    fleet.distributed_model(NET)
    return fleet.distributed_optimizer(torch.optim.SGD(NET.parameters(), lr=0.1))


def saved(value: Any) -> None:
    trained()
    fleet.save("nowhere", delta=value)


def loaded(value: Any) -> None:
    trained()
    fleet.load_arrays({}, strict=value)


def parallel(value: Any) -> Any:
    trainer.init_parallel_env()
    return trainer.DataParallel(NET, find_unused_parameters=value)


def alone() -> Any:
    trainer.init_parallel_env()
    return trainer.DataParallel(NET)


def sharded(**flags: Any) -> None:
    trainer.init_parallel_env()
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.1)
    trainer.group_sharded_parallel(NET, optimizer, "os", **flags)


CALLS: dict[str, Callable[[Any], Any]] = {
    "trainer.CsvLines.__init__.line_breaks": lambda value: trainer.CsvLines(
        [fleet.Slot("x")], line_breaks=value
    ),
    "pserver.ServerConfig.__init__.await_servers": lambda value: pserver.ServerConfig(
        await_servers=value
    ),
    "pserver.ServerConfig.__init__.insecure": lambda value: pserver.ServerConfig(insecure=value),
    "pserver.ServerConfig.__init__.once": lambda value: pserver.ServerConfig(once=value),
    "trainer.DataParallel.__init__.find_unused_parameters": parallel,
    "trainer.DataParallel.state_dict.include_sublayers": lambda value: alone().state_dict(
        include_sublayers=value
    ),
    "trainer.DataParallel.set_state_dict.use_structured_name": lambda value: alone().set_state_dict(
        {}, use_structured_name=value
    ),
    "transpiler.register_rule.norms": lambda value: transpiler.register_rule(
        hparams={}, norms=value
    ),
    "trainer.CompiledProgram.__init__.compile": lambda value: trainer.CompiledProgram(
        transpiler.Program(()), compile=value
    ),
    "trainer.create_global_var.persistable": lambda value: trainer.create_global_var(
        [1], 0, "int64", value, name="never"
    ),
    "trainer.create_parameter.is_bias": lambda value: trainer.create_parameter([1], is_bias=value),
    "trainer.Executor.__init__.compile": lambda value: trainer.Executor(compile=value),
    "trainer.group_sharded_parallel.offload": lambda value: sharded(offload=value),
    "trainer.group_sharded_parallel.sync_buffers": lambda value: sharded(sync_buffers=value),
    "trainer.group_sharded_parallel.sync_comm": lambda value: sharded(sync_comm=value),
    "trainer.Executor.infer_from_dataset.debug": lambda value: (
        trainer.Executor().infer_from_dataset(debug=value)
    ),
    "trainer.Executor.train_from_dataset.debug": lambda value: (
        trainer.Executor().train_from_dataset(debug=value)
    ),
    "trainer.ParallelExecutor.__init__.use_cuda": lambda value: trainer.ParallelExecutor(value),
    "trainer.spawn.join": lambda value: trainer.spawn(alone, nprocs=1, join=value),
    "trainer.fleet.init.is_collective": lambda value: fleet.init(is_collective=value),
    "trainer.fleet.load_arrays.strict": loaded,
    "trainer.fleet.save.delta": saved,
    "trainer.fleet.shard.progress": lambda value: fleet.shard([], progress=value),
    "trainer.fleet.trace.profiler": lambda value: fleet.trace("never.json", profiler=value),
    "transpiler.ParamAttr.__init__.need_clip": lambda value: transpiler.ParamAttr(need_clip=value),
    "transpiler.ParamAttr.__init__.trainable": lambda value: transpiler.ParamAttr(trainable=value),
    "transpiler.Program.clone.for_test": lambda value: transpiler.Program(()).clone(value),
    "transpiler.memory_optimize.print_log": lambda value: transpiler.memory_optimize(
        transpiler.Program(()), print_log=value
    ),
    "transpiler.memory_optimize.skip_grads": lambda value: transpiler.memory_optimize(
        transpiler.Program(()), skip_grads=value
    ),
    **{
        f"transpiler.DistributeTranspilerConfig.{name}": lambda value, name=name: (  # type: ignore[misc]
            transpiler.DistributeTranspilerConfig(**{name: value})
        )
        for name, field in FIELDS.items()
        if field.kind.type == "bool"
    },
    "transpiler.DistributeTranspilerConfig.sync_requested.sync_mode": lambda value: (
        transpiler.DistributeTranspilerConfig().sync_requested(value)
    ),
}
OF_PROGRAMS = {
    "transpiler.DistributeTranspiler.transpile.sync_mode",
    "transpiler.DistributeTranspiler.get_trainer_program.wait_port",
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a script may call, by name."""
    for module in (pserver, trainer, transpiler, fleet):
        for name in module.__all__:
            if module is pserver and (hasattr(trainer, name) or hasattr(transpiler, name)):
                continue
            found = getattr(module, name)
            if inspect.isclass(found):
                for method, function in vars(found).items():
                    if callable(function) and (method[0] != "_" or method == "__init__"):
                        yield f"{module.__name__}.{name}.{method}", function
            elif callable(found):
                yield f"{module.__name__}.{name}", found


def flags() -> Iterator[str]:
    """The arguments that are declared as bools, by name."""
    for name, function in public():
        for argument in inspect.signature(function).parameters.values():
            if argument.annotation in ("bool", "bool | None", bool):
                yield f"{name}.{argument.name}"


def test_every_flag_of_the_public_calls_is_in_this_test() -> None:
    """A new one needs a line here."""
    mine = {name for name in flags() if not name.startswith(TORCHS)}

    fields = {f"transpiler.DistributeTranspilerConfig.{name}" for name in FIELDS}
    assert mine == OF_PROGRAMS | (CALLS.keys() - fields)


@pytest.mark.parametrize("value", ["x", "", 1, 0, [True]], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    """No text and no number counts as one of the two; the argument is named."""
    argument = name.rpartition(".")[2]
    with pytest.raises(TypeError, match=f"{argument}: expected True(,| or) False"):
        CALLS[name](value)


@pytest.mark.parametrize("value", ["x", "", 1, 0], ids=repr)
def test_flags_of_programs_are_true_or_false(value: Any) -> None:
    """wait_port="x" does not count as true."""
    single = captured()
    made = transpiler.DistributeTranspiler()
    with pytest.raises(TypeError, match="^sync_mode: expected True, False or None"):
        made.transpile(0, single[0], TWO, 2, value, single[1])
    made.transpile(0, single[0], TWO, 2, startup_program=single[1])
    with pytest.raises(TypeError, match="^wait_port: expected True or False"):
        made.get_trainer_program(wait_port=value)
