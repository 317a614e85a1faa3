"""The Executor: runs programs on one device.

It provides what a program needs: its tensors (bound by its startup program, or the module's own),
the kernels of its communication ops (a runtime for each job), the feed, the fetches.
:mod:`trainer.executor.loaded_program` cuts and runs it.
"""

from __future__ import annotations

import time
import weakref
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pserver.checkpoint.checkpoint import Claims
from pserver.onlookers import onlooker
from pserver.telemetry.trace import SPANS, now
from trainer.communicator.communicator import Communicator
from trainer.compat.flags import ProcessSettings
from trainer.compat.scope import PROCESS_SCOPE, Scope, global_scope
from trainer.environment import environment
from trainer.executor.collective_runtime import CollectiveRuntime
from trainer.executor.loaded_program import (
    CompiledProgram,
    Feed,
    LoadedProgram,
    check_fetches,
    checked_device,
    execution_in,
    feeds_of,
    move,
)
from trainer.executor.pserver_runtime import PServerRuntime, ServerValues, serve
from trainer.executor.table_handle import TableHandle
from trainer.samplers.read_ahead import read_for
from transpiler.formats.program_file import check_values
from transpiler.ir.graph import Role, Storage
from transpiler.lower import Kernel
from transpiler.names.names import missing_member
from transpiler.plan.plan import Deployment, Execution
from transpiler.plan.settings import MOST_LOOK_AHEAD, check_flag
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program
from transpiler.verify.evaluation import is_evaluation

if TYPE_CHECKING:
    from trainer.executor.feeds_ahead import FeedsAhead
    from trainer.executor.program_training import ProgramTraining


OFFSETS = "_offsets"  # after a ragged slot's name: the input of its bags' offsets
SHOWN = 6  # of a value's elements, in a line
Batch = Mapping[str, Any]  # slot -> a tensor, or (values, offsets) of a ragged slot
ProgramToRun = Program | CompiledProgram | None


def _main(program: ProgramToRun) -> Program:
    if isinstance(program, CompiledProgram):
        return program.main
    return default_main_program() if program is None else program


class _Feeds:
    """The batches of a dataset as feeds of a program."""

    def __init__(self, who: str, program: ProgramToRun, dataset: Iterable[Batch]) -> None:
        if not isinstance(dataset, Iterable):
            raise TypeError(f"{who}: expected a dataset, got {type(dataset).__name__}")
        main = _main(program)
        if not isinstance(main, Program):
            raise TypeError(f"{who}: expected a Program, got {type(main).__name__}")
        self._who, self._dataset = who, dataset
        self._inputs = [variable.name for variable in main.main.variables_of(Role.INPUT)]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.of, self._dataset)

    def ahead(self, program: Program, coming: FeedsAhead) -> Iterator[dict[str, Tensor]]:
        """The same, read ahead, and announced as coming feeds of the program that runs."""
        announced = coming.batches(
            lambda batch, source: coming.announce(program, self.of(batch), source)
        )
        yield from map(self.of, read_for(announced, self._dataset))

    def of(self, batch: Batch) -> dict[str, Tensor]:
        """The feed of a batch.

        Raises:
            TypeError, ValueError: it does not feed the program.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{self._who}: expected batches that are dicts of tensors by slot, got "
                f"{type(batch).__name__}"
            )
        fed = dict[str, Tensor]()
        for name, value in batch.items():
            if isinstance(value, tuple):
                fed[name], fed[name + OFFSETS] = value
            else:
                fed[name] = value
        missing = [name for name in self._inputs if name not in fed]
        if missing:
            raise ValueError(
                f"{self._who}: expected slots for the inputs {', '.join(missing)}, got the "
                f"slots {', '.join(batch)}"
            )
        return {name: fed[name] for name in self._inputs}


class _Lines:
    """The printed lines of a pass."""

    def __init__(
        self, fetches: Sequence[str], info: Sequence[str] | None, period: int, debug: bool
    ) -> None:
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"print_period: expected a whole number from 1, got {period!r}")
        names = list(fetches if info is None else info)
        if len(names) != len(fetches):
            raise ValueError(
                f"fetch_info: expected a text for each of {len(fetches)} in fetch_list, got "
                f"{len(names)}"
            )
        self._names, self._period, self._debug = names, period, check_flag("debug", debug)
        self._waited = 0.0
        self._began = time.perf_counter()

    def timed(self, feeds: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """The same feeds; counts the time until each arrives."""
        self._began = asked = time.perf_counter()
        for feed in feeds:
            self._waited += time.perf_counter() - asked
            yield feed
            asked = time.perf_counter()

    def due(self, count: int) -> bool:
        """Whether a line follows this batch."""
        return count % self._period == 0 and bool(self._names or self._debug)

    @onlooker("the lines of fetched values")
    def ran(self, count: int, values: Sequence[Tensor]) -> None:
        """Prints a line after a batch, where it is due."""
        if not self.due(count):
            return
        pairs = zip(self._names, values, strict=True)
        parts = [f"batch {count}:", *(f"{name} {_shown(value)}" for name, value in pairs)]
        if self._debug:
            ran = time.perf_counter() - self._began - self._waited
            parts.append(f"(waited {self._waited:.2f} s for batches, ran {ran:.2f} s)")
        print(*parts, flush=True)


def _shown(value: Tensor) -> str:
    """A value in a line."""
    flat = [f"{one:.6g}" for one in value.flatten()[:SHOWN].tolist()]
    if not value.dim():
        return flat[0]
    return f"[{', '.join(flat)}{', ...' if value.numel() > SHOWN else ''}]"


# ---- trainer numbers ----
#
# Checks of the trainer numbers that a script gives.


def check_numbers(
    who: str, program: Program, num_trainers: int | None, trainer_id: int | None
) -> None:
    """Checks the numbers that a script gives against the program's.

    Args:
        who: the caller, for messages.
        num_trainers, trainer_id: None: not given.

    Raises:
        TypeError: a number is no integer.
        ValueError: it is not the program's.
    """
    deployment = program.deployment
    trainers = 1 if deployment is None else deployment.plan.trainers
    own = 0 if deployment is None else deployment.trainer_id
    whose = "a program that was not transpiled" if deployment is None else "the program"
    for what, number, wanted in (
        ("num_trainers", num_trainers, trainers),
        ("trainer_id", trainer_id, own),
    ):
        if number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{who}: {what}: expected a whole number, got {number!r}")
        if wanted is None:
            raise ValueError(f"{who}: {what}: expected none for a server's program, got {number}")
        if number != wanted:
            raise ValueError(f"{who}: {what}: expected that of {whose}, {wanted}, got {number}")


# ---- executor ----


Programs = Program | Sequence[Program] | None


class Executor:
    """Runs programs on one device.  One thread uses it.

    A closed Executor runs nothing any more; ``with Executor() as executor:`` closes it.

    ::

        model = torch.nn.Linear(3, 1)
        main, startup = capture(
            model,
            lambda model, x: model(x).pow(2).mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.ones(4, 3),),
        )
        executor = Executor()
        executor.run(startup)
        (loss,) = executor.run(main, feed=(torch.ones(8, 3),), fetch_list=["loss"])
        executor.close()

    Args:
        device: where compute runs and where the module's tensors are moved to; None: where they
            are.
        compile: ``torch.compile`` the compute between communication ops (needs a C++ compiler).
            Rounding may then differ.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str | torch.device | None = None, compile: bool = False) -> None:
        self._device = None if device is None else checked_device(device)
        self._compile = check_flag("compile", compile)
        # by the program's id; the reference says whether the id is still that program's
        self._loaded: dict[int, tuple[weakref.ref[Program], LoadedProgram]] = {}
        self._coming = weakref.WeakKeyDictionary[LoadedProgram, "FeedsAhead"]()
        # what startup programs bound outside every scope_guard, for programs without values
        self._bound = Scope()
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}  # the first rows of a server's tables
        self._servers = ServerValues(lambda: self._scope.tensors, self._rows)
        self._runtimes: list[PServerRuntime] = []
        self._collectives: list[CollectiveRuntime] = []
        self._claims = Claims()  # the paths that it writes checkpoints to
        self._closed = False
        self._told = False  # whether it has warned of training alone

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises for an unknown name; for one of Paddle's the error says what to write."""
            raise missing_member(self, name, "Executor")

    def run(
        self,
        program: Program | CompiledProgram | None = None,
        feed: Feed | Sequence[Feed] = None,
        fetch_list: Sequence[str] | None = None,
        *,
        trainer_id: int | None = None,
        num_trainers: int | None = None,
    ) -> list[Tensor]:
        """Runs a program once.

        A startup program binds its variables to the module's present values.  A pserver program
        serves until its job is over, then returns.  The startup program of a job without servers
        waits for the other trainers.  An nccl2 trainer program is the single-node one, and run here
        it trains alone: ``ParallelExecutor`` averages its gradients.

        Args:
            program: the default main program if None; a CompiledProgram says how it runs.
            feed: the inputs, by position or by name; with ``num_iteration_per_run`` n a list of n
                of these, for n steps.
            fetch_list: names of variables of block 0: outputs, inputs, gradients, named tensors,
                parameters, states.
            trainer_id, num_trainers: the script's own numbers; checked, if given, against the
                program's.

        Returns:
            The values of ``fetch_list``, as detached tensors: those of the last step.

        Raises:
            TypeError, ValueError: the feed, a name in ``fetch_list`` or a number does not fit the
                program, or the program has no values.
            PServerError: the job cannot continue, or (a pserver program) has failed.
            SystemExit: a pserver program was stopped before its job was done; or a trainer has left
                in its grace period, after SIGTERM.
        """
        if self._closed:
            raise ValueError("Executor.run: this Executor is closed")
        program, execution = default_main_program() if program is None else program, None
        if isinstance(program, CompiledProgram):
            execution = program.execution
            program = program.started(self._device_of(program.main), self._loaded, self.run)
        if not isinstance(program, Program):
            raise TypeError(f"Executor.run: expected a Program, got {type(program).__name__}")
        check_numbers("Executor.run", program, num_trainers, trainer_id)
        program = global_scope().program(program)
        if id(program) not in self._loaded and any(
            op.type == "listen_and_serv" for op in program.main.ops
        ):
            serve(program, self._servers)
            return []
        fetches = check_fetches(program, fetch_list)
        execution = execution_in(program) if execution is None else execution
        found: list[Tensor] = []
        with ProcessSettings() as process:
            process.apply(execution)
            loaded = self._load(program, execution)
            if loaded.trains:
                self._warn_alone(program.deployment)
            feeds = feeds_of(feed, execution.iterations if loaded.trains else 1)
            ahead = self._ahead(program) if len(feeds) > 1 else None
            for each in feeds if ahead is None else ahead[1].of_run(program, feeds):
                found = self._step(program, loaded, each, fetches)
        self._scope.tensors.update((name, loaded.tensors[name]) for name in loaded.binds)
        if _is_of_server(program):
            self._servers.forget()
        loaded.cleanup.ran()
        return found

    def _warn_alone(self, deployment: Deployment | None) -> None:
        """Warns where another launcher has started several processes."""
        if not self._told and (deployment is None or deployment.plan.trainers == 1):
            self._told = True
            environment.warn_of_other_launchers(
                "Executor.run: a program of one trainer", "transpile it for them"
            )

    def _step(
        self, program: Program, loaded: LoadedProgram, feed: Any, fetches: tuple[str, ...]
    ) -> list[Tensor]:
        """Runs a program's ops once; returns the fetched values."""
        for runtime in self._runtimes:
            runtime.refresh()
        began = now() if SPANS.on else 0.0
        try:
            values = loaded.run(program, feed, fetches, self._device_of(program))
            if loaded.tables and program.deployment is not None:
                self._runtime(program, program.deployment).finish_row_lanes()
        except Exception:  # the program's own: nothing has interrupted it
            for runtime in self._runtimes:
                runtime.counted()
            raise
        found = loaded.fetched(program, values, fetches)
        if began:
            SPANS.add("step" if loaded.trains else "run", began, now())
        if loaded.trains and SPANS.watcher is not None:
            SPANS.watcher(None)
        if loaded.trains and loaded.complete and program.storage is not None:
            program.storage.steps += 1
        for runtime in self._runtimes if loaded.trains else ():
            runtime.counted()
        if loaded.trains and loaded.complete:
            for runtime in self._runtimes:
                runtime.end_step()
        return found

    def prefetch(self, program: ProgramToRun = None, feed: Feed = None) -> None:
        """Announces the feed of a coming run: the rows that it will look up are asked for while the
        runs before it are made, as by ``fleet.prefetch``.

        For loops that call :meth:`run`; :meth:`train_from_dataset` reads ahead by itself.  Up to
        ``strategy.a_sync_configs["look_ahead"]`` feeds are announced ahead, in the order of their
        runs.  A run with another feed looks up its own rows, as do lookups whose ids come from rows
        or parameters.  For a program without servers it has no effect.

        Args:
            program: a trainer's; the default main program if None.
            feed: as of :meth:`run`.

        Raises:
            TypeError, ValueError: it is no program, or the feed does not fit it.
            ValueError: ``look_ahead`` is 0, or the program trains no tables.

        ::

            for feed, following in itertools.zip_longest(feeds, feeds[1:]):
                if following is not None:
                    executor.prefetch(trainer_program, following)
                executor.run(trainer_program, feed)
        """
        given = _main(program)
        if not isinstance(given, Program):
            raise TypeError(f"Executor.prefetch: expected a Program, got {type(given).__name__}")
        if (ahead := self._ahead(program)) is not None:
            main, announces = ahead
            announces.announce(main, feed)
            return
        deployment = given.deployment
        if deployment is not None and deployment.plan.collective is None:
            raise ValueError(
                'Executor.prefetch: expected strategy.a_sync_configs["look_ahead"] of 1 to '
                f"{MOST_LOOK_AHEAD} and a trainer's program that trains tables, got another: "
                "nothing is looked up ahead"
            )

    def _ahead(self, program: ProgramToRun) -> tuple[Program, FeedsAhead] | None:
        """The program that runs, and its coming feeds; None where nothing is looked up ahead."""
        main = _main(program)
        if main.deployment is None or is_evaluation(main):
            return None
        deployment, plan = main.deployment, main.deployment.plan
        ahead = any(plan.lanes[table.lane].look_ahead for table in plan.tables)
        if deployment.trainer_id is None or not ahead:
            return None
        if self._closed:
            raise ValueError("Executor: this Executor is closed")
        main = global_scope().program(main)
        given = program.execution if isinstance(program, CompiledProgram) else None
        loaded = self._load(main, execution_in(main) if given is None else given)
        if loaded not in self._coming:
            runtime = self._runtime(main, deployment)
            self._coming[loaded] = runtime.ahead(main, loaded.tensors, self._device_of(main))
        return main, self._coming[loaded]

    def flush(self) -> None:
        """Waits until the servers have applied all that this Executor has sent, and receives their
        parameters: before a model is evaluated, where a queue runs ahead.

        In the k-step modes the trainer's own parameters stay its own.

        Raises:
            PServerError: the job cannot continue.
        """
        for runtime in self._runtimes:
            runtime.flush()

    def save(self, path: str, program: Programs = None, scheduler: Any | None = None) -> None:
        """Writes a program's training state to the directory ``path``, as ``fleet.save`` does,
        whole or not at all: parameters, buffers, tables, optimizer state and step.

        Every trainer of a job with servers calls this, between steps; trainer 0 writes.  Where
        trainers share gradients or parameters without servers one of them calls it.

        A server's program that this Executor has served is written with what the server held when
        its job ended, or failed, to one file: :meth:`load`, ``Program.load`` and ``pserver serve
        --program`` read it, and a job of the same plan continues from its step.

        Args:
            path: of the checkpoint, which ``fleet.load`` reads, too, on any number of servers; of
                a server's program the file.
            program: a trainer's, or the single-node program, also that of a job with servers that
                this Executor runs; or a server's; None: the default main program.  Of several
                optimizers the list of their programs.
            scheduler: of torch.optim.lr_scheduler, whose state is written too; or a list.

        Raises:
            OSError: the directory cannot be written, or another job writes there (InUse).
            ValueError: the program was loaded and has tables or is a trainer's, or its optimizer's
                state is divided over the trainers, or trainers give different paths; the directory
                has other files, and no checkpoint; or a server's program has no values, or is given
                a scheduler.

        ::

            executor.save("checkpoint", trainer_program, scheduler)
            ...  # in a later run:
            step = executor.load("checkpoint", trainer_program, scheduler)
        """
        from trainer.executor import program_training

        if served := _served(program, scheduler):
            self._servers.save(path, served)
        else:
            program_training.save(self._trainings(program), path, scheduler, self._claims)

    def load(self, path: str, program: Programs = None, scheduler: Any | None = None) -> int:
        """Reads what :meth:`save`, or ``fleet.save``, wrote; the program continues from there.

        Every trainer of a job calls this, between steps, and must be able to read ``path``.

        Args:
            program: as in :meth:`save`.  A server's gets its values: its next run begins with them,
                without its startup program.
            scheduler: gets the state that was saved with it.

        Returns:
            The step at which it was saved; of several optimizers that of the first.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is torn, or of another model or optimizer, or trainers find different
                ones, or a loaded program's ops have other hyper-parameters, or it is another
                server's program; nothing is changed.
            FingerprintMismatch: a server's program of another job; the message has the differences.
        """
        from trainer.executor import program_training

        if served := _served(program, scheduler):
            return self._servers.load(path, served)
        trainings = self._trainings(program)
        return program_training.load(trainings, path, scheduler, self._forget)

    def _forget(self) -> None:
        for runtime in self._runtimes:
            runtime.forget()

    def steps(self, program: Program | None = None) -> int:
        """The number of steps of a program's values, including those that its servers had when this
        Executor joined them, and those before a loaded checkpoint.  A run that Ctrl-C has
        interrupted while it waited for servers is one of them, and the next run begins behind it.

        In modes that merge or count several steps as one, servers count those.

        Args:
            program: that holds values; None: the default main program.

        Raises:
            ValueError: it holds none.

        ::

            executor.run(startup_program)  # joins servers that continue an earlier job
            for _ in range(executor.steps(trainer_program)):
                scheduler.step()
        """
        storage = _stored(default_main_program() if program is None else program)
        runtime = next((each for each in self._runtimes if each.trains(storage)), None)
        return storage.steps if runtime is None else runtime.steps(storage)

    def _trainings(self, program: Programs) -> list[ProgramTraining]:
        from trainer.executor.program_training import trainings_of

        if self._closed:
            raise ValueError("Executor: this Executor is closed")
        if program is None:
            program = default_main_program()
        given = [program] if isinstance(program, Program) else program
        if not isinstance(given, Sequence) or not all(isinstance(each, Program) for each in given):
            raise TypeError(f"expected a Program, got {type(program).__name__}")
        programs = [global_scope().program(each) for each in given]
        communicators = [self._communicator_of(each) for each in programs]
        for communicator in communicators:
            if communicator is not None:
                communicator.settle()  # their steps are read
        return trainings_of(programs, communicators)

    def _communicator_of(self, program: Program) -> Communicator | None:
        """The connection to the servers that train a program; None: this process trains it."""
        deployment = program.deployment
        if program.storage is not None:
            move(program.storage, self._device_of(program))
        if deployment is not None and deployment.plan.collective is None:
            _stored(program)
            return self._runtime(program, deployment).communicator
        # the single-node program of a job with servers, which have the states
        runtime = next((each for each in self._runtimes if each.trains(program.storage)), None)
        return None if runtime is None else runtime.communicator

    def close(self) -> None:
        """Sends all that waits to be sent, leaves the job when every trainer has finished, and
        drops all programs.

        Without servers the process groups go with the last Executor of the process that used them.
        """
        self._close("")

    def _close(self, failure: str) -> None:
        self._closed = True
        for _, loaded in self._loaded.values():
            loaded.end()
        self._loaded.clear()
        while self._collectives:
            self._collectives.pop().close(failure)
        while self._runtimes:
            self._runtimes.pop().close(failure)

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if error is None else f"{type(error).__name__}: {error}")

    @property
    def _scope(self) -> Scope:
        """The scope in which startup programs bind now."""
        current = global_scope()
        return self._bound if current is PROCESS_SCOPE else current

    def _device_of(self, program: Program) -> torch.device:
        """The Executor's device, or where the program's tensors are."""
        if self._device is not None:
            return self._device
        held = program.storage.tensors if program.storage is not None else self._scope.tensors
        return next((tensor.device for tensor in held.values()), torch.device("cpu"))

    def _load(self, program: Program, execution: Execution) -> LoadedProgram:
        """The program in this Executor, with its tensors on the device."""
        known = self._loaded.get(id(program))
        if known is None or known[0]() is not program:
            tensors, (tables, row_kernels) = self._bind(program), self._tables_of(program)
            bound: dict[str, Any] = {**tensors, **tables}
            kernels = {
                **row_kernels,
                **self._kernels_for(program),
                "init": lambda op: bound.get(op.outputs[0]),
            }
            if self._compile:
                execution = replace(execution, compiles=True)
            loaded = LoadedProgram(program, tensors, tables, kernels, execution)
            loaded.stepping = self._tear
            self._loaded[id(program)] = (self._watch(program), loaded)
            return loaded
        if program.storage is not None:
            move(program.storage, self._device_of(program))
        return known[1]

    def _tear(self) -> None:
        for runtime in self._runtimes:
            runtime.tear()

    def _tables_of(
        self, program: Program
    ) -> tuple[Mapping[str, TableHandle], Mapping[str, Kernel]]:
        """The values of the program's tables, by name, and the kernels of lookups; empty where the
        program has no tables, or is a server's.
        """
        if not program.main.variables_of(Role.TABLE):
            return {}, {}
        # imports numba
        from trainer.executor.tables import local_tables, row_kernels

        deployment = program.deployment
        if deployment is not None and deployment.server_index is not None:
            # the server begins with these rows
            self._rows.update(program.storage.rows if program.storage is not None else {})
            return {}, {}
        if deployment is not None:
            tables = self._runtime(program, deployment).tables
        elif any(op.type == "fake_init" for op in program.main.ops):
            tables = self.served_tables(program)
        else:
            tables = local_tables(program)
        return tables, row_kernels(tables) if tables else {}

    def connection_of(self, storage: Storage) -> Communicator | None:
        """The connection to the servers that train a program's values; None where none do."""
        found = next((each for each in self._runtimes if each.trains(storage)), None)
        return None if found is None else found.communicator

    def served_tables(self, program: Program) -> Mapping[str, TableHandle]:
        """The tables of a forward program whose rows are on servers.

        Raises:
            ValueError: this Executor has joined no job that has them.
        """
        names = [op.outputs[0] for op in program.main.ops if op.type == "fake_init"]
        for runtime in self._runtimes:
            if set(names) <= set(runtime.tables):
                return {name: runtime.tables[name] for name in names}
        raise ValueError(
            f"the rows of {', '.join(names)} are on servers: expected an Executor that has joined "
            "a job with these tables"
        )

    def _watch(self, program: Program) -> weakref.ref[Program]:
        """A reference that drops the program's code when the program goes."""
        key, loaded = id(program), self._loaded
        return weakref.ref(program, lambda _: loaded.pop(key, None))

    def _bind(self, program: Program) -> dict[str, Tensor]:
        """The tensors behind the program's persistent variables, on the device.

        Raises:
            ValueError: the process holds no value for one of them, or a wrong one.
        """
        device = self._device_of(program)
        if program.storage is not None:
            move(program.storage, device)
            held: Mapping[str, Tensor] = program.storage.tensors
        else:
            held = ChainMap(self._scope.tensors, global_scope().tensors)
        found = {}
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
            if variable.name not in held:
                raise ValueError(
                    f"the program holds no value for {variable.name!r}; run its startup program "
                    "first"
                )
            found[variable.name] = held[variable.name]
        if program.storage is None:
            check_values(program.main.variables, found)
            move(Storage(found, None), device)
        if global_scope() is PROCESS_SCOPE:
            PROCESS_SCOPE.show(found)
        return found

    def _kernels_for(self, program: Program) -> Mapping[str, Kernel]:
        """The kernels of the program's communication ops, over the connection of its deployment,
        which lasts until ``close``.
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
        several = any(lane.optimizer for lane in deployment.plan.lanes)
        if several and not runtime.trains(program.storage):
            raise ValueError(
                "Executor.run: expected the programs of several optimizers as one transpile made "
                "them, which share their tensors, got one with tensors of its own: a program "
                "that was loaded from a file cannot train beside others"
            )
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
        """The transports in use: "shm", "tcp", "grpc", "gloo", "nccl"; "local" while nothing has
        travelled.
        """
        transports = {runtime.communicator.transport for runtime in self._runtimes} | {
            each.transport for each in self._collectives
        }
        return ", ".join(sorted(transports)) or "local"

    # ---- passes over datasets, batch by batch ----

    def train_from_dataset(
        self,
        program: ProgramToRun = None,
        dataset: Iterable[Batch] = (),
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        debug: bool = False,
    ) -> int:
        """Runs a program once for each batch of a dataset, one pass over it.

        A slot feeds the input of its name.  A ragged slot ``x`` feeds ``x`` with its values and
        ``x_offsets`` with int64 [batch], where each sample's values begin.  Slots of which the
        program has no input are left out.  What ``strategy.trainer_desc_configs`` names is dumped.

        Args:
            program: the default main program if None.
            dataset: ``fleet.InMemoryDataset``, ``fleet.QueueDataset``, or any iterable of dicts of
                tensors by slot.
            fetch_list: names of variables, printed every ``print_period`` batches.
            fetch_info: their names there; None: those of the variables.
            print_period: batches between two lines.
            debug: each line also has the time spent waiting for batches, and running.

        Returns:
            The number of batches.

        Raises:
            TypeError, ValueError: the dataset does not feed an input, or see :meth:`Executor.run`.
        """
        lines = _Lines(fetch_list, fetch_info, print_period, debug)
        fed = _Feeds("train_from_dataset", program, dataset)
        count, ahead = 0, self._ahead(program)
        for feed in lines.timed(fed if ahead is None else fed.ahead(*ahead)):
            count += 1
            values = self.run(program, feed, list(fetch_list) if lines.due(count) else None)
            lines.ran(count, values)
        return count

    def infer_from_dataset(
        self,
        program: ProgramToRun = None,
        dataset: Iterable[Batch] = (),
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        debug: bool = False,
    ) -> list[Tensor]:
        """Like :meth:`train_from_dataset`, but nothing is trained: of a program that trains its
        ``clone(for_test=True)`` runs.

        Returns:
            For each of ``fetch_list`` the values of all batches, one after the other along
            dimension 0; those without a dimension as one each.

        Raises:
            TypeError, ValueError: as above.
        """
        lines, found = _Lines(fetch_list, fetch_info, print_period, debug), list[list[Tensor]]()
        main = _main(program)
        test = main.clone(for_test=True) if main.main.variables_of(Role.GRADIENT) else program
        fed = _Feeds("infer_from_dataset", test, dataset)
        for count, feed in enumerate(lines.timed(fed), 1):
            found.append(self.run(test, feed, list(fetch_list)))
            lines.ran(count, found[-1] if lines.due(count) else [])
        return [
            torch.cat([value if value.dim() else value[None] for value in values])
            for values in zip(*found, strict=True)
        ]


def _served(program: Programs, scheduler: Any | None) -> Program | None:
    """The program, if it is a server's."""
    if not isinstance(program, Program) or not _is_of_server(program):
        return None
    if scheduler is not None:
        raise ValueError("expected no scheduler with a server's program, got one")
    return program


def _is_of_server(program: Program) -> bool:
    return program.deployment is not None and program.deployment.server_index is not None


def _stored(program: Program) -> Storage:
    if program.storage is None:
        raise ValueError(
            "the trainer program holds no values: capture and transpile it in this process, or "
            "load it from a file"
        )
    return program.storage
