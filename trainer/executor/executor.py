"""The Executor: runs programs.

A program is cut into segments: generated code for compute and (in a trainer's program)
communication, and optimizer ops. Segments run in the order of the ops.  A variable lives from the
segment that defines it to the last one that reads it; what an op writes to a persistent variable is
copied into the tensor that holds it when the segment ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pserver.config import ServerConfig
from pserver.errors import JobFailed
from pserver.service.server import serve
from trainer.executor.collective_runtime import CollectiveRuntime
from trainer.executor.feed import Feed, check_feed, close_names
from trainer.executor.optimizer_segment import Update
from trainer.executor.pserver_runtime import PServerRuntime
from trainer.role import Connection
from transpiler.ir.graph import PERSISTENT, Op, Role, Storage
from transpiler.ir.ops import is_optimizer
from transpiler.ir.sparse_rows import SparseRows
from transpiler.lower import Kernel, Lowered, free_inputs, lower
from transpiler.plan.plan import Deployment
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

if TYPE_CHECKING:
    from trainer.executor.table_runtime import HeldRows


@dataclass
class _Segment:
    """Ops that run as one: generated code, or an update."""

    run: Callable[[dict[str, Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_uses: tuple[str, ...] = ()  # variables that nobody needs afterwards


@dataclass
class _Loaded:
    """A program in this Executor: its tensors, its updates, and its segments by what is fetched."""

    program: weakref.ref[Program]
    tensors: Mapping[str, Tensor]
    tables: Mapping[str, HeldRows]
    updates: list[Update] = field(default_factory=list)
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    binds: tuple[str, ...] = ()  # what its init ops name
    segments: dict[tuple[str, ...], list[_Segment]] = field(default_factory=dict)


class Executor:
    """Runs programs on one device.

    Args:
        device: where compute runs and where the module's tensors are moved to; None: where they
            are.
        compile: ``torch.compile`` the compute between communication ops (needs a C++ compiler).
            Rounding may then differ.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str | torch.device | None = None, compile: bool = False) -> None:
        self._device = None if device is None else _device(device)
        self._compile = bool(compile)
        self._loaded: dict[int, _Loaded] = {}
        # what startup programs bound, for programs that hold no values of their own
        self._scope: dict[str, Tensor] = {}
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}  # what the tables of a server begin with
        self._runtimes: list[PServerRuntime] = []
        self._collectives: list[CollectiveRuntime] = []
        self._closed = False

    def run(
        self,
        program: Program | None = None,
        feed: Feed = None,
        fetch_list: Sequence[str] | None = None,
    ) -> list[Tensor]:
        """Runs a program once, and returns the values of ``fetch_list`` as detached tensors.

        A startup program binds its variables to the module's present values.  A pserver program
        serves until it is stopped. Programs of a job without servers meet the other trainers in
        their startup program; an nccl2 trainer program is the single-node one, and run here it
        trains alone: ``ParallelExecutor`` is what averages its gradients.

        Args:
            program: the default main program if None.
            feed: the inputs, by position or by name.
            fetch_list: names of variables of block 0: outputs, inputs, gradients, named tensors,
                parameters, states.

        Raises:
            TypeError, ValueError: the feed or a name in ``fetch_list`` does not fit the program, or
                the program has no values.
        """
        if self._closed:
            raise ValueError("Executor.run: this Executor is closed")
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise TypeError(f"Executor.run: expected a Program, got {type(program).__name__}")
        if id(program) not in self._loaded and any(
            op.type == "listen_and_serv" for op in program.main.ops
        ):
            self._serve(program)
            return []
        fetches = _check_fetches(program, fetch_list)
        loaded = self._load(program)
        values: dict[str, Any] = {
            **loaded.tensors,
            **loaded.tables,
            **check_feed(program, feed, self._device_of(program)),
        }
        with torch.no_grad():
            for segment in self._segments(program, loaded, fetches):
                _advance(segment, values, loaded.tensors)
        if loaded.tables and program.deployment is not None:
            self._runtime(program, program.deployment).settle()
        self._scope.update((name, loaded.tensors[name]) for name in loaded.binds)
        return [_fetched(program, loaded, name, values) for name in fetches]

    def close(self) -> None:
        """Flushes what is on its way, leaves the job and forgets all programs.  A closed Executor
        runs nothing any more.

        Without servers the process groups go with the last Executor of the process that used them.
        """
        self._close("")

    def _close(self, failure: str) -> None:
        self._closed = True
        self._loaded.clear()
        while self._collectives:
            self._collectives.pop().close(failure)
        while self._runtimes:
            runtime = self._runtimes.pop()
            try:
                if not failure:
                    runtime.write_back()
            finally:
                runtime.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if error is None else f"{type(error).__name__}: {error}")

    def _device_of(self, program: Program) -> torch.device:
        """The Executor's device, or where the program's tensors are."""
        if self._device is not None:
            return self._device
        held = program.storage.tensors if program.storage is not None else self._scope
        return next((tensor.device for tensor in held.values()), torch.device("cpu"))

    def _load(self, program: Program) -> _Loaded:
        """What this Executor knows of a program; bound to the device."""
        loaded = self._loaded.get(id(program))
        if loaded is None or loaded.program() is not program:
            tensors, tables = self._bind(program), self._tables_of(program)
            bound: dict[str, Any] = {**tensors, **tables}
            kernels = {**self._kernels_for(program), "init": lambda op: bound.get(op.outputs[0])}
            if tables:
                kernels = {**_row_kernels(tables), **kernels}
            binds = tuple(
                name
                for op in program.main.ops
                if op.type == "init"
                for name in op.outputs
                if name in tensors
            )
            loaded = _Loaded(self._watch(program), tensors, tables, kernels=kernels, binds=binds)
            self._loaded[id(program)] = loaded
        elif program.storage is not None:
            _move(program.storage, self._device_of(program))
        return loaded

    def _tables_of(self, program: Program) -> Mapping[str, HeldRows]:
        """The rows behind the program's tables, if it has some."""
        if not program.main.variables_of(Role.TABLE):
            return {}
        # which imports what compiles the kernels of rows
        from trainer.executor.table_runtime import local_tables

        deployment = program.deployment
        if deployment is None:
            return local_tables(program)
        if deployment.server_index is not None:  # it begins with these rows
            self._rows.update(program.storage.rows if program.storage is not None else {})
            return {}
        return self._runtime(program, deployment).tables

    def _watch(self, program: Program) -> weakref.ref[Program]:
        """A reference that forgets the program's code when the program goes."""
        key, loaded = id(program), self._loaded
        return weakref.ref(program, lambda _: loaded.pop(key, None))

    def _bind(self, program: Program) -> dict[str, Tensor]:
        """The tensors behind the program's persistent variables, on the device.

        Raises:
            ValueError: the process holds no values for one of them.
        """
        device = self._device_of(program)
        if program.storage is not None:
            _move(program.storage, device)
        held = program.storage.tensors if program.storage is not None else self._scope
        found = {}
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
            if variable.name not in held:
                raise ValueError(
                    f"the program holds no value for {variable.name!r}; run its startup program "
                    "first"
                )
            found[variable.name] = held[variable.name]
        return found

    def _kernels_for(self, program: Program) -> Mapping[str, Kernel]:
        """The communication ops' meaning: that of the connection of the program's deployment, which
        lasts until ``close``.
        """
        if program.deployment is None or program.deployment.trainer_id is None:
            return {}
        _stored(program)
        if program.deployment.plan.collective is not None:
            return self._collective(program, program.deployment).kernels_of(program)
        return self._runtime(program, program.deployment).kernels_of(program)

    def _runtime(self, program: Program, deployment: Deployment) -> PServerRuntime:
        """The connection of a trainer's deployment."""
        runtime = next((known for known in self._runtimes if known.serves(deployment)), None)
        if runtime is None:
            runtime = PServerRuntime(program, _stored(program))
            self._runtimes.append(runtime)
        return runtime

    def _collective(self, program: Program, deployment: Deployment) -> CollectiveRuntime:
        """This Executor's part in a job without servers."""
        device = self._device_of(program)
        known = next((each for each in self._collectives if each.serves(deployment, device)), None)
        if known is None:
            known = CollectiveRuntime(deployment, device)
            self._collectives.append(known)
        return known

    @property
    def transport(self) -> str:
        """How tensors travel: "shm", "flight", "grpc", "gloo", "nccl", or "local" where nothing has
        travelled yet.
        """
        transports = {runtime.communicator.transport for runtime in self._runtimes} | {
            each.transport for each in self._collectives
        }
        return ", ".join(sorted(transports)) or "local"

    def _serve(self, program: Program) -> None:
        """Runs a pserver program: serves until stopped by SIGTERM, SIGINT or a Drain call."""
        held = program.main.variables_of(Role.PARAMETER, Role.BUFFER)
        missing = [variable.name for variable in held if variable.name not in self._scope]
        if missing:
            raise ValueError(
                f"the server holds no value for {missing[0]!r}; run the pserver's startup program "
                "first"
            )
        deployment, connection = program.deployment, Connection.from_environment()
        if deployment is None or deployment.server_index is None:
            raise ValueError(
                "expected a pserver program with its deployment, as get_pserver_programs gives it"
            )
        config = ServerConfig(
            endpoint=deployment.endpoints[deployment.server_index],
            transport=connection.transport,
            heartbeat_timeout_seconds=connection.heartbeat_timeout_seconds,
        )
        values = {variable.name: self._scope[variable.name] for variable in held}
        if serve(config, replace(program, storage=Storage(values, None, rows=self._rows))):
            raise JobFailed("the server's job failed; the line before says why")

    def _segments(
        self, program: Program, loaded: _Loaded, fetches: tuple[str, ...]
    ) -> list[_Segment]:
        if fetches not in loaded.segments:
            loaded.segments[fetches] = self._cut(program, loaded, fetches)
        return loaded.segments[fetches]

    def _cut(self, program: Program, loaded: _Loaded, fetches: tuple[str, ...]) -> list[_Segment]:
        runs = [(kind, list(ops)) for kind, ops in groupby(program.main.ops, key=self._kind)]
        persistent = {v.name for v in program.main.variables.values() if v.role in PERSISTENT}
        segments: list[_Segment] = []
        updates = iter(loaded.updates)
        for index, (kind, ops) in enumerate(runs):
            if kind == "update":
                update = next(updates, None) or self._update(program, loaded, ops)
                segments.append(_Segment(_updating(update), tuple(update.grads.values()), ()))
                continue
            later = {name for _, others in runs[index + 1 :] for name in free_inputs(others)}
            outputs = [
                name
                for op in ops
                for name in op.outputs
                if name in later or name in fetches or name in persistent
            ]
            lowered = lower(
                ops, list(dict.fromkeys(outputs)), self._device_of(program), loaded.kernels
            )
            segments.append(
                _Segment(_running(lowered, kind == "compiled"), lowered.inputs, lowered.outputs)
            )
        _note_last_uses(segments, {*fetches, *persistent})
        return segments

    def _update(self, program: Program, loaded: _Loaded, ops: Sequence[Op]) -> Update:
        optimizer = program.storage.optimizer if program.storage is not None else None
        update = Update(ops, loaded.tensors, optimizer, loaded.tables)
        loaded.updates.append(update)
        return update

    def _kind(self, op: Op) -> str:
        if is_optimizer(op.type):
            return "update"
        compute = op.type.startswith(("aten.", "sym.")) or op.type == "assign"
        return "compiled" if self._compile and compute else "plain"


def _stored(program: Program) -> Storage:
    if program.storage is None:
        raise ValueError(
            "the trainer program holds no values: capture and transpile it in this process, or "
            "load it from a file"
        )
    return program.storage


def _row_kernels(tables: Mapping[str, HeldRows]) -> Mapping[str, Kernel]:
    from trainer.executor.table_runtime import row_kernels

    return row_kernels(tables)


def _device(device: str | torch.device) -> torch.device:
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


def _move(storage: Storage, device: torch.device) -> None:
    """Moves the module's tensors in place, so that the module and the optimizer go on holding them;
    and the optimizer's state.
    """
    moved = False
    for tensor in storage.tensors.values():
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
            moved = True
    if moved and storage.optimizer is not None and storage.optimizer.state:
        # casts every state to its parameter's device
        storage.optimizer.load_state_dict(storage.optimizer.state_dict())


def _check_fetches(program: Program, fetch_list: Sequence[str] | None) -> tuple[str, ...]:
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


def _running(lowered: Lowered, compiled: bool) -> Callable[[dict[str, Any]], Sequence[Any]]:
    if not compiled:
        return lowered
    # fallback_random: dropout draws what eager dropout draws
    module = torch.compile(lowered.module, dynamic=True, options={"fallback_random": True})

    def run(values: dict[str, Any]) -> Sequence[Any]:
        return module(*[values[name] for name in lowered.inputs])  # type: ignore[no-any-return]  # generated

    return run


def _updating(update: Update) -> Callable[[dict[str, Any]], Sequence[Any]]:
    def run(values: dict[str, Any]) -> Sequence[Any]:
        update(values)
        return ()

    return run


def _note_last_uses(segments: Iterable[_Segment], kept: set[str]) -> None:
    seen = set(kept)
    for segment in reversed(list(segments)):
        names = {*segment.inputs, *segment.outputs} - seen
        segment.last_uses = tuple(names)
        seen |= names


def _advance(segment: _Segment, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    results = segment.run(values)
    for name, value in zip(segment.outputs, results, strict=True):
        held = tensors.get(name)
        if held is None:
            values[name] = value
        elif value is not held and value is not None:
            held.copy_(value)
    for name in segment.last_uses:
        values.pop(name, None)


def _fetched(program: Program, loaded: _Loaded, name: str, values: Mapping[str, Any]) -> Tensor:
    """A fetched value: never an alias of a tensor that the next run will change."""
    variable = program.main.variables[name]
    if variable.role is Role.STATE:
        found = [
            update.state(variable.of, name.removeprefix(f"{variable.of}@"))
            for update in loaded.updates
        ]
        state = next((value for value in found if value is not None), None)
        if state is None:
            raise ValueError(
                f"fetch_list: {name!r} has no value before the first step of the optimizer"
            )
        return state.detach().clone()
    if name not in values:
        raise ValueError(f"fetch_list: {name!r} is given no value by this program")
    value = values[name]
    if variable.role is Role.TABLE:
        raise ValueError(f"fetch_list: {name!r} is a table: look its rows up")
    if isinstance(value, SparseRows):
        from trainer.executor.table_runtime import as_tensor

        return as_tensor(name, value, program)
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    held = {tensor.untyped_storage().data_ptr() for tensor in loaded.tensors.values()}
    return value.detach().clone() if value.untyped_storage().data_ptr() in held else value.detach()
