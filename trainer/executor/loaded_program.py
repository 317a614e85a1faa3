"""A program in an Executor, cut into segments that run one after the other.

A segment is a run of ops: generated code for compute and (in a trainer's program) communication, or
optimizer ops.  A variable lives from the segment that defines it to the last one that reads it;
what an op writes to a persistent variable is copied into the tensor that holds it when the segment
ends.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pserver.telemetry.memory import trim_memory
from pserver.telemetry.trace import SPANS, now
from trainer.executor.table_handle import TableHandle
from trainer.gradients.dgc import Residuals
from trainer.modules.dump import DumpFiles
from transpiler.collective import broadcast_program, executed, parallel_program
from transpiler.ir.close_names import close_names
from transpiler.ir.graph import PERSISTENT, Op, Ref, Role, Storage, Variable, refs
from transpiler.ir.ops import is_optimizer, rule_of_op
from transpiler.ir.reuse import reusing
from transpiler.ir.rules import Hparam, Rule, make
from transpiler.ir.scaling_ops import found_infinite
from transpiler.ir.sparse_rows import SparseRows
from transpiler.ir.table_ops import updates_rows
from transpiler.ir.updates import group_of, optimizer_ops, parameter_of, rules_of_ops
from transpiler.lower import Kernel, Lowered, free_inputs, lower
from transpiler.optim.dgc import Ramp
from transpiler.plan.plan import DumpSettings, Execution, Plan
from transpiler.plan.settings import check_flag
from transpiler.program import Program
from transpiler.rewrites.rewrites import Programs, fuse_updates
from transpiler.strategy.execution import execution_of
from transpiler.strategy.refusals import in_one, refusals
from transpiler.strategy.run_strategies import BuildStrategy, ExecutionStrategy
from transpiler.strategy.strategy import DistributedStrategy

# ---- devices ----
#
# The device of an Executor, and moving tensors there.


def checked_device(device: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: it is no CPU or CUDA device, or does not exist.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"Executor: expected a device such as 'cpu' or 'cuda:0', got {device!r}"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"Executor: expected a cpu or cuda device, got {device!r}")
    if found.type == "cuda" and (
        not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count()
    ):
        raise ValueError(
            f"Executor: expected a device that exists, got {device!r} with "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def move(storage: Storage, device: torch.device) -> None:
    """Moves the module's tensors in place, so that the module and the optimizer still hold them;
    with their gradients, and the optimizer's state.
    """
    moved = False
    for tensor in storage.tensors.values():
        if tensor.device != device:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(device)
            tensor.grad = None if gradient is None else gradient.to(device)
            moved = True
    if moved and storage.optimizer is not None and storage.optimizer.state:
        # casts every state to its parameter's device
        storage.optimizer.load_state_dict(storage.optimizer.state_dict())
    if moved:
        for held in storage.states.values():
            for key in held.keys() - {"step"}:
                held[key] = held[key].to(device)


# ---- execution ----
#
# The work of an Executor around the steps of a run, according to an Execution.


def execution_in(program: Program) -> Execution:
    """The execution settings of the strategy that a program was transpiled with."""
    return Execution() if program.deployment is None else program.deployment.execution


def built(
    who: str,
    program: Program,
    build: BuildStrategy | None,
    run: ExecutionStrategy | None,
) -> tuple[Program, Execution]:
    """A program changed by its strategies, and its execution settings.

    Args:
        who: for messages.
        build, run: None: those of the program's own strategy.

    Raises:
        TypeError: one is no such strategy.
        ValueError: a setting cannot act on this program.
    """
    strategy = DistributedStrategy()
    for name, value, kind in (
        ("build_strategy", build, BuildStrategy),
        ("execution_strategy", run, ExecutionStrategy),
    ):
        if value is None:
            continue
        if not isinstance(value, kind | dict):
            raise TypeError(f"{who}: {name}: expected {kind.__name__}, got {type(value).__name__}")
        setattr(strategy, name, value)
    collective = program.deployment is not None and program.deployment.plan.collective is not None
    if found := refusals(strategy, "collective_program" if collective else "program"):
        raise ValueError(f"{who}: {in_one(found)}")
    if strategy.build_strategy["fuse_all_optimizer_ops"]:
        if program.deployment is not None and program.deployment.plan.collective is None:
            raise ValueError(
                f"{who}: fuse_all_optimizer_ops: servers update the parameters of this program: "
                "give it to transpile(strategy=...)"
            )
        program = fuse_updates(Programs(program, program)).main
    trains = any(is_optimizer(op.type) or op.type == "send" for op in program.main.ops)
    if strategy.execution_strategy["num_iteration_per_run"] > 1 and not trains:
        raise ValueError(f"{who}: num_iteration_per_run: expected a program that trains")
    said, unsaid, own = execution_of(strategy), Execution(), execution_in(program)
    named = {field.name: getattr(said, field.name) for field in fields(Execution)}
    changed = {name: value for name, value in named.items() if value != getattr(unsaid, name)}
    return program, replace(own, **changed)


def feeds_of(feed: Any, iterations: int) -> Sequence[Any]:
    """The feeds of a run's steps.

    Raises:
        TypeError: several steps, and the feed is no list of feeds.
        ValueError: there are more or fewer of them.
    """
    if iterations == 1:
        return [feed]
    if feed is None:
        return [None] * iterations
    if not isinstance(feed, list | tuple) or any(isinstance(each, Tensor) for each in feed):
        raise TypeError(
            f"feed: expected a list of {iterations} feeds, one for each step of this run, as "
            "num_iteration_per_run says"
        )
    if len(feed) != iterations:
        raise ValueError(
            f"feed: expected {iterations} feeds, as num_iteration_per_run says, got {len(feed)}"
        )
    return feed


class Cleanup:
    """Frees memory after every ``every`` runs.

    Args:
        every: 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every, self._runs = every, 0

    def ran(self) -> None:
        """Counts a run; where it is due, collects unreachable objects and empties allocators."""
        self._runs += 1
        if self._every and self._runs % self._every == 0:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            trim_memory()


class ProgramDump:
    """The dump of each step of a trainer's program.

    Args:
        program: a trainer's, which trains.
        settings: with a path.

    Attributes:
        names: the variables that a run must give for it.

    Raises:
        ValueError: the program has no such variable, or no such parameter.
    """

    def __init__(self, program: Program, settings: DumpSettings) -> None:
        deployment = program.deployment
        assert deployment is not None and deployment.trainer_id is not None, "a trainer's"
        known = {each.name for each in program.main.variables_of(Role.PARAMETER)}
        for name in settings.params:
            if name not in known:
                raise ValueError(f"trainer_desc_configs: dump_param: no parameter is {name!r}")
        for name in (*settings.fields, *settings.stats):
            program.var(name)
        self.names = tuple(dict.fromkeys((*settings.fields, *settings.stats)))
        self._params = settings.params
        suffix = f".optimizer-{deployment.optimizer}" if deployment.optimizer else ""
        self._files = DumpFiles(settings, deployment.trainer_id, suffix)
        self._found: dict[str, Tensor] = {}

    def begins(self, tensors: Any) -> None:
        """Copies the parameters at the beginning of a step."""
        self._found = {name: tensors[name].detach().clone() for name in self._params}

    def ends(self, steps: int, values: Sequence[Tensor]) -> None:
        """Writes a step at its end.

        Args:
            steps: that were taken before it.
            values: of ``names``.
        """
        named = {name: [value] for name, value in zip(self.names, values, strict=True)}
        self._files.write(steps, named, self._found)


# ---- compiled program ----
#
# A program with its execution settings, by the original's name.


class CompiledProgram:
    """A program with settings of its execution, for ``Executor.run``.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3, 4),)
        main, startup = capture(model, lambda model, x: model(x).sum(), optimizer, batch)
        compiled = CompiledProgram(main).with_data_parallel("loss", places=cpu_places())
        with Executor() as executor:
            executor.run(startup)
            (loss,) = executor.run(compiled, batch, ["loss"])

    Args:
        program: of one process, or a trainer's.
        build_strategy: changes of the program: a BuildStrategy, or a dict; docs/execution.md.
        compile: ``torch.compile`` the compute of this program, as ``Executor(compile=True)`` does
            of all (needs a C++ compiler; rounding may then differ).

    Attributes:
        program: as given: for calls that take a program, such as ``Executor.save``.
        main: the program that an Executor runs.
        first: the program that it runs once before: it gives every trainer trainer 0's values;
            None: there is none.
        execution: the settings of the runs.

    Raises:
        TypeError: an argument has another type.
        ValueError: the program is a server's, or a setting cannot act on it.
    """

    def __init__(
        self,
        program: Program,
        build_strategy: BuildStrategy | None = None,
        *,
        compile: bool = False,
    ) -> None:
        if not isinstance(program, Program):
            raise TypeError(f"CompiledProgram: expected a Program, got {type(program).__name__}")
        if program.deployment is not None and program.deployment.server_index is not None:
            raise ValueError("CompiledProgram: expected a trainer's program, got a server's")
        self.program = program
        compiles = check_flag("CompiledProgram: compile", compile)
        self._build = build_strategy
        main, execution = built("CompiledProgram", program, build_strategy, None)
        self.execution = replace(execution, compiles=execution.compiles or compiles)
        # of its own, for an Executor keeps the code of each program
        self.main = replace(main)
        self.first: Program | None = None
        self._place: torch.device | None = None
        self._parallel = False

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: CompiledProgram | None = None,
        places: Sequence[str | torch.device] | None = None,
    ) -> CompiledProgram:
        """Averages gradients over the trainers of a job without servers, as ``ParallelExecutor``
        does; a program that was not transpiled runs alone.

        Args:
            loss_name: the loss; checked.
            build_strategy, exec_strategy: changes of the program, and settings of its runs:
                objects, or dicts; docs/execution.md.
            share_vars_from: a compiled program over the same values, which is checked: programs of
                one module share them anyway.
            places: the one device of this process, which must be the Executor's; None: that.

        Returns:
            This object.

        Raises:
            TypeError: an argument has another type.
            ValueError: the call or its build strategy is given twice, the program is one of a job
                with servers, the loss or the place does not exist, there is more than one place, or
                a setting cannot act.
        """
        if self._parallel:
            raise ValueError("with_data_parallel: expected to be called once")
        if build_strategy is not None and self._build is not None:
            raise ValueError("with_data_parallel: build_strategy: expected it once, got it twice")
        check_without_servers("with_data_parallel", self.program)
        check_loss("with_data_parallel", self.program, loss_name)
        _check_shared(self.program, share_vars_from)
        self._place = _place(places)
        build = self._build if build_strategy is None else build_strategy
        program, execution = built("with_data_parallel", self.program, build, exec_strategy)
        self._build = build
        compiles = execution.compiles or self.execution.compiles
        self.execution = replace(execution, compiles=compiles)
        program = executed(program, self.execution)
        self.main = replace(parallel_program(program))
        if self.program.deployment is not None:
            self.first = broadcast_program(program)
        self._parallel = True
        return self

    def _check_build(self) -> None:
        """Raises where the build strategy is too late for one of its settings."""
        build = BuildStrategy() if self._build is None else {**BuildStrategy(), **self._build}
        placed = len(self.main.main.ops) > len(self.program.main.ops)  # sums, by this object
        late = {
            "enable_sequential_execution": not placed and not self.execution.compiles,
            "fuse_broadcast_ops": self.first is None,
        }
        for key, is_late in late.items():
            if build[key] and is_late:
                raise ValueError(
                    f"CompiledProgram: {key}: the program is as transpile made it: give it to "
                    "transpile(strategy=...)"
                )

    def started(
        self, device: torch.device, loaded: Collection[int], run: Callable[[Program], Any]
    ) -> Program:
        """The program to run; runs ``first`` before, once in an Executor.

        Args:
            device: the Executor's.
            loaded: the ids of the programs that it has run.
            run: runs a program.

        Raises:
            ValueError: the program is for another place, or the build strategy is too late.
        """
        if self._place not in (None, device):
            raise ValueError(
                f"CompiledProgram: expected an Executor on {self._place}, as places says, got one "
                f"on {device}"
            )
        self._check_build()
        if self.first is not None and id(self.first) not in loaded:
            run(self.first)
        return self.main


def check_without_servers(who: str, program: Program) -> None:
    """Checks that a program is not one of a job with servers.

    Raises:
        ValueError: it is.
    """
    deployment = program.deployment
    if deployment is not None and deployment.plan.collective is None:
        raise ValueError(
            f"{who}: expected a program without servers, got one of mode {deployment.plan.mode}"
        )


def check_loss(who: str, program: Program, loss_name: str | None) -> None:
    """Checks the name of a program's loss, or None.

    Raises:
        TypeError: it is no text.
        ValueError: the program has no such loss.
    """
    if loss_name is None:
        return
    if not isinstance(loss_name, str):
        raise TypeError(f"{who}: loss_name: expected text, got {type(loss_name).__name__}")
    outputs = [variable.name for variable in program.main.variables_of(Role.OUTPUT)]
    if loss_name != "loss" or "loss" not in outputs:
        near = close_names(loss_name, outputs)
        raise ValueError(
            f"{who}: loss_name: expected the program's loss, got {loss_name!r}; close names: {near}"
        )


def _check_shared(program: Program, other: CompiledProgram | None) -> None:
    if other is None:
        return
    if not isinstance(other, CompiledProgram):
        raise TypeError(
            "with_data_parallel: share_vars_from: expected a CompiledProgram, got "
            f"{type(other).__name__}"
        )
    if program.storage is None or program.storage is not other.program.storage:
        raise ValueError(
            "with_data_parallel: share_vars_from: expected a program over the same values (a clone "
            "for tests, or one of the same capture), got one over others"
        )


def _place(places: Any) -> torch.device | None:
    if places is None:
        return None
    if isinstance(places, str) or not isinstance(places, Sequence):
        raise TypeError(f"with_data_parallel: places: expected a list of devices, got {places!r}")
    if len(places) != 1:
        raise ValueError(
            f"with_data_parallel: places: expected one, got {len(places)}: a process computes on "
            "one device, and several trainers are several processes"
        )
    return checked_device(places[0])


# ---- compressed gradients ----
#
# The op ``dgc`` of a trainer's program: the part of a large gradient that is sent.


Hparams = Mapping[int, Mapping[str, Hparam]]


class CompressedGradients:
    """One trainer's state for the ``dgc`` ops of its program.

    Args:
        plan: of the job.
        live: the present hyper-parameters of each group whose optimizer this process holds.
        step: returns the number of the job's steps.
    """

    def __init__(self, plan: Plan, live: Callable[[], Hparams], step: Callable[[], int]) -> None:
        self._plan, self._live, self._step = plan, live, step
        self._residuals: Residuals | None = None
        self._sources: dict[int, int] = {}  # group of large parameters -> the script's

    def kernel(self, op: Op, grad: Tensor, param: Tensor, **_: Any) -> Tensor:
        """The op: a tensor of the gradient's shape, with zeros for elements that are held back."""
        arguments, name = op.arguments, op.arguments["param"]
        source, sparsity = arguments["group"], arguments["sparsity"]
        begin, steps = arguments["rampup_begin_step"], arguments["rampup_step"]
        assert isinstance(name, Ref) and isinstance(source, int), "the catalogue checks it"
        assert isinstance(begin, int) and isinstance(steps, int) and isinstance(sparsity, tuple)
        if self._residuals is None:
            stages = tuple(float(stage) for stage in sparsity if isinstance(stage, int | float))
            self._residuals = Residuals(Ramp(begin, steps, stages))
        group = self._plan.placement(name.name).group
        assert group is not None, "servers update it"
        self._sources[group] = source
        hparams = {**arguments, **self._live().get(source, {})}
        made = self._residuals.compress(name.name, param.detach(), grad, hparams, self._step())
        return made.dense()

    def hparams(self, present: Hparams) -> dict[int, Mapping[str, Hparam]]:
        """The hyper-parameters of all groups: servers step large parameters by plain SGD, at the
        present rate.

        Args:
            present: of all groups, as their optimizer has them.
        """
        own = {
            group: {**self._plan.groups[group].hparams, "lr": present[source]["lr"]}
            for group, source in self._sources.items()
        }
        return {**present, **own}

    def forget(self) -> None:
        """Drops the residuals: the parameters have been replaced."""
        if self._residuals is not None:
            self._residuals.forget()

    def end(self, applied: bool) -> None:
        """Ends the step."""
        if self._residuals is not None:
            self._residuals.end(applied)


# ---- feed ----
#
# The feed of a program, checked against the program's inputs.


Value = Tensor | np.ndarray[Any, Any]
Feed = Sequence[Value] | Mapping[str, Value] | None


def check_feed(program: Program, feed: Feed) -> dict[str, Tensor]:
    """The feed by input name; arrays of numpy become tensors.

    Raises:
        TypeError: it is no tuple and no dict of tensors or arrays.
        ValueError: an input is missing or unknown, or has another dtype, rank or size than the
            program expects; the message names the input, what was expected and what was fed.
    """
    inputs = {variable.name: variable for variable in program.main.variables_of(Role.INPUT)}
    named = _by_name(list(inputs), feed)
    for name in named:
        if name not in inputs:
            raise ValueError(
                f"feed: expected the inputs {', '.join(inputs) or 'none'}, got an unknown one "
                f"{name!r}"
            )
    sizes: dict[str, tuple[int, str]] = {}
    for name, variable in inputs.items():
        if name not in named:
            raise ValueError(f"feed: expected the input {name!r}, {_words(variable)}, got none")
        _check(variable, named[name], sizes)
    return {name: tensor.detach() for name, tensor in named.items()}


def _by_name(names: list[str], feed: Feed) -> dict[str, Tensor]:
    if feed is None:
        return {}
    if isinstance(feed, Mapping):
        return {name: _tensor(value) for name, value in feed.items()}
    if isinstance(feed, Tensor | np.ndarray) or not isinstance(feed, Sequence):
        raise TypeError(f"feed: expected a tuple or a dict of tensors, got {type(feed).__name__}")
    if len(feed) != len(names):
        raise ValueError(
            f"feed: expected {len(names)} tensors ({', '.join(names) or 'none'}), got {len(feed)}"
        )
    return dict(zip(names, map(_tensor, feed), strict=True))


def _tensor(value: Any) -> Any:
    """An array as a tensor; any other value is returned as it is, and refused later by name."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "bifuc":
        return torch.tensor(value)  # a copy: arrays may be read-only
    return value


def _words(variable: Variable) -> str:
    return f"{variable.dtype}[{', '.join(map(str, variable.shape))}]"


def _check(variable: Variable, tensor: Any, sizes: dict[str, tuple[int, str]]) -> None:
    """Checks an input; ``sizes`` collects the free sizes of the feed, each with the input that set
    it.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"feed: input {variable.name!r}: expected a tensor, {_words(variable)}, got "
            f"{type(tensor).__name__}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    came = f"{dtype}{list(tensor.shape)}"
    wrong = ValueError(f"feed: input {variable.name!r}: expected {_words(variable)}, got {came}")
    if dtype != variable.dtype or tensor.dim() != len(variable.shape):
        raise wrong
    for extent, size in zip(variable.shape, tensor.shape, strict=True):
        if isinstance(extent, int):
            if extent != size:
                raise wrong
            continue
        symbol, _, minimum = extent.partition(">=")
        if size < (int(minimum) if minimum else 1):
            raise ValueError(f"{wrong}; the captured step holds for {minimum or 1} rows or more")
        known, first = (
            sizes.setdefault(symbol, (size, variable.name)) if symbol.isidentifier() else (size, "")
        )
        if known != size:
            raise ValueError(f"{wrong}; {symbol} is {known} in the input {first!r}")


# ---- optimizer segment ----
#
# Optimizer ops, run by torch's own optimizers.
#
# Where the process holds the user's optimizer, one ``step()`` of it runs all ops: its state, its
# hooks and the hyper-parameters that a scheduler changed are those of an eager script.  A program
# that was loaded has no such optimizer; then each group gets one made from its ops.


def _name(op: Op, argument: str) -> str:
    value = op.arguments[argument]
    assert isinstance(value, Ref), "checked against the schema"
    return value.name


def _fusion(op: Op) -> dict[str, bool]:
    """The flags by which an op selects torch's kernels."""
    return {key: bool(op.arguments[key]) for key in ("foreach", "fused") if key in op.arguments}


@contextmanager
def _flagged(
    optimizer: torch.optim.Optimizer, flags: Mapping[Any, Mapping[str, bool]]
) -> Iterator[None]:
    """Gives the optimizer's groups the flags of their ops, which a strategy may have set."""
    kept = []
    try:
        for index, said in flags.items():
            group = optimizer.param_groups[index]
            for key in {"foreach", "fused"} & set(group):
                kept.append((group, key, group[key]))
                group[key] = said.get(key)
        yield
    finally:
        for group, key, value in kept:
            group[key] = value


class OptimizerSegment:
    """A run of optimizer ops of a program.

    Args:
        ops: of the run.
        tensors: the parameters by name; updated in place.
        optimizer: the live one whose parameters they are, or None.
        tables: those whose rows the ops update, by name.
        states: where there is no optimizer, the states to continue from, by parameter's name and
            state; the dicts have the present ones afterwards.

    Attributes:
        grads: the variable of each parameter's gradient, by the parameter's name.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        tables: Mapping[str, TableHandle] = MappingProxyType({}),
        states: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self.grads = {_name(op, "param"): _name(op, "grad") for op in ops}
        self._tables = {
            _name(op, "param"): tables[_name(op, "param")] for op in ops if updates_rows(op)
        }
        self._tensors = tensors
        self._live = optimizer
        self._flags = {
            op.arguments["group"]: flags
            for op in ops
            if not updates_rows(op) and (flags := _fusion(op))
        }
        dense = [op for op in ops if not updates_rows(op)]
        made = {} if states is None else states
        self._optimizers = [optimizer] if optimizer is not None else self._made(dense, made)

    def _made(
        self, ops: Sequence[Op], states: dict[str, dict[str, Tensor]]
    ) -> list[torch.optim.Optimizer]:
        groups: dict[object, tuple[Rule, list[str]]] = {}
        for op in ops:
            _, members = groups.setdefault(op.arguments["group"], (rule_of_op(op), []))
            members.append(_name(op, "param"))
        optimizers = []
        for rule, members in groups.values():
            optimizer = make(rule, [self._tensors[name] for name in members])
            for name in members:
                parameter, held = self._tensors[name], states.setdefault(name, {})
                held |= {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in (held or optimizer.state.get(parameter, {})).items()
                }
                optimizer.state[parameter] = held
            optimizers.append(optimizer)
        return optimizers

    def __call__(self, values: Mapping[str, Any]) -> None:
        """Takes one step.

        ``p.grad`` is borrowed and given back: running a program neither reads nor changes it.
        """
        members = [
            p
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        kept = [(parameter, parameter.grad) for parameter in members]
        try:
            for parameter in members:
                parameter.grad = None
            with ExitStack() as stack:
                for name, grad in self.grads.items():
                    if name in self._tables:
                        stack.enter_context(self._tables[name].stepping(values[grad]))
                    else:
                        self._tensors[name].grad = values[grad]
                if self._live is not None:
                    stack.enter_context(_flagged(self._live, self._flags))
                for optimizer in self._optimizers:
                    optimizer.step()
        finally:
            for parameter, grad in kept:
                parameter.grad = grad

    def state(self, param: str, key: str) -> Tensor | None:
        """A state of a parameter; None before the first step."""
        for optimizer in self._optimizers:
            value = optimizer.state.get(self._tensors[param], {}).get(key)
            if value is not None:
                return torch.as_tensor(value)
        return None


# ---- fetch ----
#
# Fetches from a program: the names are checked before it runs, the values are copied after it has
# run.


def check_fetches(program: Program, fetch_list: Sequence[str] | None) -> tuple[str, ...]:
    """The names to fetch.

    Raises:
        TypeError: it is no list of names.
        ValueError: the program has no variable of a name.
    """
    if isinstance(fetch_list, str):
        raise TypeError(f"fetch_list: expected a list of names, got the text {fetch_list!r}")
    for name in fetch_list or ():
        if not isinstance(name, str):
            raise TypeError(f"fetch_list: expected names, got {type(name).__name__}")
        if name not in program.main.variables:
            near = close_names(name, program.main.variables)
            raise ValueError(
                f"fetch_list: the program has no variable {name!r}; close names: {near}"
            )
    return tuple(fetch_list or ())


def fetched(
    program: Program,
    name: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    updates: Sequence[OptimizerSegment],
) -> Tensor:
    """A fetched value: never an alias of a tensor that the next run will change.

    Args:
        values: of variables after a run, by name.
        tensors: behind the persistent variables.
        updates: the program's, which have the optimizer states.

    Raises:
        ValueError: the variable has no value after the run, or it is a table.
    """
    variable = program.main.variables[name]
    if variable.role is Role.STATE:
        return _state(name, variable, updates)
    if name not in values:
        merge = next((op for op in program.main.ops if op.type == "gradient_merge"), None)
        if merge is not None and any(name in op.outputs for op in program.main.ops):
            raise ValueError(
                f"fetch_list: {name!r} has a value in every run number "
                f"{merge.arguments['k_steps']} only, because it stands behind gradient_merge"
            )
        raise ValueError(f"fetch_list: {name!r} is given no value by this program")
    value = values[name]
    if variable.role is Role.TABLE:
        raise ValueError(f"fetch_list: {name!r} is a table: look its rows up")
    if isinstance(value, SparseRows):
        return _sparse_tensor(name, value, program)
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return value.detach().clone() if value.untyped_storage().data_ptr() in held else value.detach()


def _state(name: str, variable: Variable, updates: Sequence[OptimizerSegment]) -> Tensor:
    key = name.removeprefix(f"{variable.of}@")
    found = [update.state(variable.of, key) for update in updates]
    state = next((value for value in found if value is not None), None)
    if state is None:
        raise ValueError(
            f"fetch_list: {name!r} has no value before the first step of the optimizer"
        )
    return state.detach().clone()


def _sparse_tensor(name: str, gradient: SparseRows, program: Program) -> Tensor:
    """A gradient of rows as a sparse tensor of the table's shape.

    Raises:
        ValueError: the table has no shape, for ids are any int64.
    """
    table = program.main.variables[program.main.variables[name].of]
    if not all(isinstance(size, int) for size in table.shape):
        raise ValueError(
            f"fetch_list: {name!r} has rows for ids of any int64: no tensor is so large"
        )
    shape = [int(size) for size in table.shape]
    return torch.sparse_coo_tensor(
        gradient.ids.unsqueeze(0), gradient.rows, shape, check_invariants=False
    )


# ---- merge segment ----
#
# The part of a program that merges gradients over runs, and decides whether a run continues.


log = logging.getLogger(__name__)


class MergeSegment:
    """The sums of a program's gradients over some runs; they are in its storage, which the copies
    of a program share.

    Args:
        op: a gradient_merge.
        storage: the program's; None: it keeps the sums itself.
    """

    def __init__(self, op: Op, storage: Storage | None) -> None:
        k_steps, avg = op.arguments["k_steps"], op.arguments["avg"]
        assert isinstance(k_steps, int) and isinstance(avg, bool), "the catalogue checks it"
        self.inputs, self.outputs = tuple(refs(op.arguments["x"])), op.outputs
        self._k_steps, self._avg = k_steps, avg
        self._storage = Storage({}, None) if storage is None else storage

    @property
    def complete(self) -> bool:
        """Whether the last run was the last one of its window."""
        return self._storage.summed == 0

    def __call__(self, values: Mapping[str, Any]) -> Sequence[Tensor]:
        """Adds a run's gradients; returns the sums so far, or the gradients of an update."""
        sums, gradients = self._storage.sums, [values[name] for name in self.inputs]
        for name, gradient in zip(self.outputs, gradients, strict=True):
            sums[name] = gradient.clone() if self.complete else sums[name].add_(gradient)
        self._storage.summed = (self._storage.summed + 1) % self._k_steps
        if self.complete and self._avg:
            for name in self.outputs:
                sums[name].div_(self._k_steps)
        return [sums[name] for name in self.outputs]

    def end(self) -> None:
        """Warns of runs that have made no update, where an Executor closes within a window."""
        if not self.complete:
            log.warning(
                "gradient_merge: the last %d runs have made no update: an update takes %d",
                self._storage.summed,
                self._k_steps,
            )
            self._storage.summed = 0


# ---- ops optimizer ----
#
# The optimizer of a loaded program, for checkpoints: its groups are those of the ops, its states
# are the storage's.


class StoredStates(MutableMapping[Tensor, dict[str, Tensor]]):
    """The storage's states by parameter.

    Each dict is changed in place: the program's ops continue with the same one.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._names = {tensor: name for name, tensor in storage.tensors.items()}

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        return self._storage.states.setdefault(self._names[parameter], {})

    def __setitem__(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        held, given = self[parameter], dict(states)
        held.clear()
        held.update(given)

    def __delitem__(self, parameter: Tensor) -> None:
        self._storage.states.get(self._names[parameter], {}).clear()

    def __iter__(self) -> Iterator[Tensor]:
        return (self._storage.tensors[name] for name in self._storage.states)

    def __len__(self) -> int:
        return len(self._storage.states)


class OpsOptimizer:
    """The groups and states of a loaded single-node program.

    Args:
        program: with a storage that has no optimizer.

    Attributes:
        param_groups: as of torch's optimizers, with the hyper-parameters of the ops.
        state: the present states, by parameter.

    Raises:
        ValueError: the program updates nothing, or has tables, whose rows' states no file holds.
    """

    def __init__(self, program: Program) -> None:
        storage, ops = program.storage, optimizer_ops(program.main)
        assert storage is not None, "it is loaded"
        if program.deployment is not None or program.main.variables_of(Role.TABLE) or not ops:
            raise ValueError(
                "expected a program that was captured in this process, with its optimizer, or a "
                "loaded single-node one that trains without tables; others have Program.save and "
                "Program.load"
            )
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": [
                    storage.tensors[parameter_of(op)] for op in ops if group_of(op) == index
                ],
                **rule.hparams,
                **rule.flags,
            }
            for index, rule in enumerate(rules_of_ops(program.main, None))
        ]
        self.state = StoredStates(storage)

    def state_dict(self) -> dict[str, Any]:
        """The groups and states, as torch's optimizers give them."""
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        states = {index: dict(self.state[each]) for index, each in enumerate(members)}
        return {"state": states, "param_groups": self.param_groups}

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Checks that the ops have the hyper-parameters of a checkpoint.

        Raises:
            ValueError: one differs: ops cannot take another value.
        """
        for index, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            for key in sorted(set(mine) & set(theirs) - {"params"}):
                found = theirs[key]
                value = tuple(found) if isinstance(found, list) else found
                if value is not None and value != mine[key]:
                    raise ValueError(
                        f"group {index}, {key}: the checkpoint has {value}, and the ops of a "
                        f"loaded program, which no schedule moves, have {mine[key]}: capture the "
                        "step instead"
                    )


# ---- loaded program ----


# ops that only name values that are in place
PLACES = frozenset({"init", "concat"})


@dataclass
class ProgramSegment:
    """Ops that run as one: generated code, or an update.

    Attributes:
        run: takes values by name, returns those of ``outputs``.
        name: of its span in a trace.
        ops: their number.
        last_uses: variables that no later segment needs.
    """

    run: Callable[[dict[str, Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    ops: int
    last_uses: tuple[str, ...] = ()

    def advance(self, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Runs, puts the results into ``values`` or, where ``tensors`` hold a variable, into its
        tensor, and drops values that are no longer needed.
        """
        results = self.run(values)
        for name, value in zip(self.outputs, results, strict=True):
            held = tensors.get(name)
            if held is None:
                values[name] = value
            elif value is not held and value is not None:
                held.copy_(value)
        for name in self.last_uses:
            values.pop(name, None)


class LoadedProgram:
    """A program in an Executor: its tensors, its updates, and its segments by what is fetched.

    Args:
        program: kept by the Executor's caller; this object holds no reference to it.
        tensors: behind the persistent variables, by name, on the Executor's device.
        tables: the values of the tables' variables, by name.
        kernels: of communication ops, lookups and init ops, by op type.
        execution: whether compute between communication ops is compiled by ``torch.compile``, in
            which order, and whether ops write over their operands.

    Attributes:
        binds: the variables that the program's init ops name.
        trains: whether a run of it is a step.
        updates: its optimizer ops, in the order in which they run; made when it is first cut.
        merge: merges its gradients over runs; None: every run updates.
        cleanup: frees memory, where the execution asks for it.
        dump: of each step; None: there is none.
        stepping: called before a segment that a run cannot repeat: one that updates or merges.
        complete: whether the last run ran all segments; where gradients are merged over runs, only
            the last run of a window does.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        tables: Mapping[str, TableHandle],
        kernels: Mapping[str, Kernel],
        execution: Execution,
    ) -> None:
        self.tensors = tensors
        self.tables = tables
        self.binds = tuple(
            name
            for op in program.main.ops
            if op.type == "init"
            for name in op.outputs
            if name in tensors
        )
        self.trains = any(
            is_optimizer(op.type) or op.type == "send" or updates_rows(op)
            for op in program.main.ops
        )
        self.updates: list[OptimizerSegment] = []
        merging = [op for op in program.main.ops if op.type == "gradient_merge"]
        self.merge = MergeSegment(merging[0], program.storage) if merging else None
        self._kernels = {name: _traced(name, kernel) for name, kernel in kernels.items()}
        self._execution = execution
        self.cleanup = Cleanup(execution.runs_per_cleanup)
        dumps = self.trains and execution.dump.path
        self.dump = ProgramDump(program, execution.dump) if dumps else None
        self._segments: dict[tuple[str, ...], list[ProgramSegment]] = {}
        self.stepping: Callable[[], None] = lambda: None

    def run(
        self, program: Program, feed: Any, fetches: tuple[str, ...], device: torch.device
    ) -> dict[str, Any]:
        """Runs the program's ops once.

        Args:
            program: that this object was made of.
            feed: the inputs.
            fetches: the variables wanted.
            device: where new tensors are made.

        Returns:
            The values of variables, for :meth:`fetched`.

        Raises:
            TypeError, ValueError: the feed does not fit the program.
        """
        fed = {name: each.to(device) for name, each in check_feed(program, feed).items()}
        values: dict[str, Any] = {**self.tensors, **self.tables, **fed}

        dumped = () if self.dump is None else self.dump.names
        if self.dump is not None:
            self.dump.begins(self.tensors)
        with torch.no_grad():
            wanted = tuple(dict.fromkeys((*fetches, *dumped)))
            self.complete = self._run(self.segments(program, wanted, device), values)
        return values

    def fetched(
        self, program: Program, values: Mapping[str, Any], fetches: tuple[str, ...]
    ) -> list[Tensor]:
        """The values of variables after a run, as detached tensors; writes the run's dump.

        Args:
            program, fetches: as of :meth:`run`, which gave the values.
        """

        def value(name: str) -> Tensor:
            return fetched(program, name, values, self.tensors, self.updates)

        if self.dump is not None:
            steps = 0 if program.storage is None else program.storage.steps
            self.dump.ends(steps, [value(name) for name in self.dump.names])
        return [value(name) for name in fetches]

    def _run(self, segments: Iterable[ProgramSegment], values: dict[str, Any]) -> bool:
        """Runs segments one after the other; returns whether the last one has run."""
        for segment in segments:
            began = now() if SPANS.on else 0.0
            if segment.name in ("update", "merge"):
                self.stepping()
            segment.advance(values, self.tensors)
            if began:
                SPANS.add(segment.name, began, now(), ops=segment.ops)
            merges = self.merge is not None and segment.run is self.merge
            if merges and self.merge is not None and not self.merge.complete:
                return False
        return True

    def segments(
        self, program: Program, fetches: tuple[str, ...], device: torch.device
    ) -> list[ProgramSegment]:
        """The segments of a run that fetches these variables.

        Args:
            program: that this object was made of.
            device: where new tensors are made.
        """
        if fetches not in self._segments:
            self._segments[fetches] = self._cut(program, fetches, device)
        return self._segments[fetches]

    def end(self) -> None:
        """Ends the runs of the program."""
        if self.merge is not None:
            self.merge.end()

    def _cut(
        self, program: Program, fetches: tuple[str, ...], device: torch.device
    ) -> list[ProgramSegment]:
        skips = found_infinite(program.main.ops)
        runs = [(kind, list(ops)) for kind, ops in groupby(program.main.ops, key=self._kind)]
        persistent = {v.name for v in program.main.variables.values() if v.role in PERSISTENT}
        segments: list[ProgramSegment] = []
        updates = iter(self.updates)
        for index, (kind, ops) in enumerate(runs):
            if kind == "merge" and self.merge is not None:
                merge = self.merge
                segments.append(
                    ProgramSegment(merge, merge.inputs, merge.outputs, "merge", len(ops))
                )
                continue
            if kind == "update":
                update = next(updates, None) or self._update(program, ops)
                read = (*update.grads.values(), *filter(None, (skips,)))
                segments.append(
                    ProgramSegment(_updating(update, skips), read, (), "update", len(ops))
                )
                continue
            later = {name for _, others in runs[index + 1 :] for name in free_inputs(others)}
            later.update(filter(None, (skips,)))
            outputs = [
                name
                for op in ops
                for name in op.outputs
                if name in later or name in fetches or name in persistent
            ]
            if self._execution.reuses:
                ops = reusing(ops, program.main.variables, {*outputs, *fetches, *persistent})
            lowered = lower(ops, list(dict.fromkeys(outputs)), device, self._kernels)
            run = self._compiled(lowered) if kind == "compiled" else lowered
            segments.append(
                ProgramSegment(run, lowered.inputs, lowered.outputs, "compute", len(ops))
            )
        _note_last_uses(segments, {*fetches, *persistent})
        return segments

    def _update(self, program: Program, ops: Sequence[Op]) -> OptimizerSegment:
        optimizer, states = None, None
        if program.storage is not None:
            optimizer, states = program.storage.optimizer, program.storage.states
        update = OptimizerSegment(ops, self.tensors, optimizer, self.tables, states)
        self.updates.append(update)
        return update

    def _kind(self, op: Op) -> str:
        if is_optimizer(op.type):
            return "update"
        if op.type == "gradient_merge":
            return "merge"
        compute = op.type.startswith(("aten.", "sym.")) or op.type == "assign"
        return "compiled" if self._execution.compiles and compute else "plain"

    def _compiled(self, lowered: Lowered) -> Callable[[dict[str, Any]], Sequence[Any]]:
        # fallback_random: dropout draws what eager dropout draws
        options: dict[str, Any] = {"fallback_random": True}
        if self._execution.ordered:
            options |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
        module = torch.compile(lowered.module, dynamic=True, options=options)

        def run(values: dict[str, Any]) -> Sequence[Any]:
            return module(*[values[name] for name in lowered.inputs])  # type: ignore[no-any-return]  # generated

        return run


def _traced(name: str, kernel: Kernel) -> Kernel:
    """A kernel of an op that communicates or looks up, whose runs are spans of a trace."""
    if name in PLACES:
        return kernel

    def run(op: Op, *arguments: Any, **named: Any) -> Any:
        if not SPANS.on:
            return kernel(op, *arguments, **named)
        began = now()
        try:
            return kernel(op, *arguments, **named)
        finally:
            SPANS.add(name, began, now())

    return run


def _updating(update: OptimizerSegment, skips: str) -> Callable[[dict[str, Any]], Sequence[Any]]:
    """An update that is skipped where the variable ``skips`` is true."""

    def run(values: dict[str, Any]) -> Sequence[Any]:
        if not skips or not bool(values[skips]):
            update(values)
        return ()

    return run


def _note_last_uses(segments: Iterable[ProgramSegment], kept: set[str]) -> None:
    seen = set(kept)
    for segment in reversed(list(segments)):
        names = {*segment.inputs, *segment.outputs} - seen
        segment.last_uses = tuple(names)
        seen |= names
