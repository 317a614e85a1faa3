"""From a single-node program to the programs of a cluster: one plan, one list of passes for each of
the four programs.

::

    plan_program          who holds what                        (planner.py)
    TRAINER_PASSES        leave_clipping_to_servers, send_gradients, drop_updates, send_changes, receive_parameters
                                                                (trainer.py)
                          pull_rows, send_row_gradients         of sparse tables (trainer_tables.py)
    STARTUP_PASSES        receive_everything
    PSERVER_PASSES        define_slices, append_optimize_blocks, listen                                 (pserver.py)
                          define_tables, append_table_blocks    of sparse tables (pserver_tables.py)
    verify                the laws that hold after each pass    (verify.py)

Modes without servers have their own passes: ``collective.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from transpiler.collective import (
    ENDPOINT,
    check_arguments,
    collective_of,
    collective_program,
    collective_startup,
    deployment_of,
)
from transpiler.distribute_config import DistributeTranspilerConfig
from transpiler.ir.graph import Block, Op, Role, Storage, freeze
from transpiler.passes.pserver import PSERVER_PASSES, pserver_program, pserver_startup
from transpiler.passes.trainer import STARTUP_PASSES, TRAINER_PASSES, startup_passes, trainer_passes
from transpiler.plan.lane_plan import uniform
from transpiler.plan.modes import MODES
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.plan.planner import plan_parameters
from transpiler.program import Program
from transpiler.program_planner import plan_program
from transpiler.tracing.default_programs import (
    default_main_program,
    default_startup_program,
    set_default_trainer,
)
from transpiler.verify.verify import run, verify_servers

__all__ = [
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "MODES",
    "parse_endpoints",
    "plan_parameters",
    "plan_program",
    "PSERVER_PASSES",
    "pserver_program",
    "pserver_startup",
    "STARTUP_PASSES",
    "TRAINER_PASSES",
    "trainer_program",
    "trainer_startup",
]

_log = logging.getLogger("transpiler")


def trainer_program(
    program: Program, deployment: Deployment, runtime_split_send_recv: bool = False
) -> Program:
    """A trainer's main program, from the single-node one.

    Args:
        runtime_split_send_recv: no split and concat ops; send and recv carry the sections.

    Raises:
        IllegalProgram: the program breaks a law, or a gradient has no op that produces it.
    """
    return run(
        replace(program, deployment=deployment),
        deployment.plan,
        trainer_passes(runtime_split_send_recv),
    )


def trainer_startup(
    startup: Program, deployment: Deployment, runtime_split_send_recv: bool = False
) -> Program:
    """A trainer's startup program, from the single-node one.

    Args:
        runtime_split_send_recv: as in :func:`trainer_program`.

    Raises:
        IllegalProgram: the startup program initialises other variables than the plan places.
    """
    return run(
        replace(startup, deployment=deployment),
        deployment.plan,
        startup_passes(runtime_split_send_recv),
    )


def parse_endpoints(pservers: str, what: str = "pservers") -> tuple[str, ...]:
    """``"HOST:PORT,HOST:PORT"`` as endpoints, by server index.

    Raises:
        TypeError: not text.
        ValueError: one is not HOST:PORT, or two are equal.
    """
    if not isinstance(pservers, str):
        raise TypeError(
            f"{what}: expected text HOST:PORT,HOST:PORT,..., got {type(pservers).__name__}"
        )
    endpoints = tuple(part.strip() for part in pservers.split(","))
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                f"{what}: expected HOST:PORT with a port of 0 to 65535, got {endpoint!r} in "
                f"{pservers!r}"
            )
        if endpoints.count(endpoint) > 1:
            raise ValueError(f"{what}: expected different endpoints, got {endpoint} twice")
    return endpoints


def _whole_number(what: str, value: object, least: int, below: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected a whole number, got {value!r} ({type(value).__name__})")
    if value < least or (below is not None and value >= below):
        expected = f"{least} or more" if below is None else f"{least} to {below - 1}"
        raise ValueError(f"{what}: expected {expected}, got {value}")
    return value


def _check_belongs(plan: Plan, startup: Program) -> None:
    """Whether the startup program is one, and that of the program that the plan was made for."""
    odd = next((op.type for op in startup.main.ops if op.type not in ("init", "fake_init")), None)
    if odd is not None:
        raise ValueError(
            "startup_program: expected a single-node startup program, of init ops only, got the "
            f"op {odd!r}"
        )
    held = {
        variable.name: variable
        for variable in startup.main.variables_of(Role.PARAMETER, Role.BUFFER)
    }
    for placement in plan.placements:
        found = held.get(placement.name)
        if found is None or found.shape != placement.shape or found.dtype != placement.dtype:
            got = "none" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ValueError(
                "startup_program: expected the one that belongs to the main program, with "
                f"{placement.name} "
                f"{placement.dtype}{list(placement.shape)}; got {got}"
            )

    for table in plan.tables:
        if table.name not in startup.main.variables:
            raise ValueError(
                "startup_program: expected the one that belongs to the main program, with "
                f"{table.name}; got none"
            )


def _programs(program: Program | None, startup: Program | None) -> tuple[Program, Program]:
    """The single-node programs that ``transpile`` was given or, for None, means.

    A main program that is not the default one brings its own startup: the default one may be
    another model's.
    """
    for what, given in (("program", program), ("startup_program", startup)):
        if given is not None and not isinstance(given, Program):
            raise TypeError(f"{what}: expected a Program, got {type(given).__name__}")
    if program is None:
        return default_main_program(), default_startup_program() if startup is None else startup
    if startup is not None:
        return program, startup
    held = {
        variable.name: variable
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.TABLE)
    }
    block = Block(0, freeze(held), tuple(Op("init", {}, (name,)) for name in held))
    return program, Program((block,), None, program.storage)


@dataclass(frozen=True)
class _Transpiled:
    """What ``transpile`` was given and decided."""

    deployment: Deployment  # this trainer's
    main: Program  # the trainer's
    startup: Program  # the single-node one

    @property
    def servers(self) -> Deployment:
        """The deployment, if it has servers.

        Raises:
            ValueError: it has none.
        """
        if self.deployment.plan.collective is not None:
            raise ValueError(
                f"mode={self.deployment.plan.mode!r} has no servers, so there is no program of one"
            )
        return self.deployment


class DistributeTranspiler:
    """Turns a captured single-node program into a trainer program and one program per parameter
    server.

    Every process of a job calls ``transpile`` with the same program, ``pservers`` and ``trainers``;
    then a trainer asks for ``get_trainer_program`` and ``get_startup_program()``, a server for
    ``get_pserver_programs(its endpoint)``.

    Args:
        config: None is a :class:`DistributeTranspilerConfig` with all defaults.
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise TypeError(
                f"config: expected a DistributeTranspilerConfig, got {type(config).__name__}"
            )
        self.config = config if config is not None else DistributeTranspilerConfig()
        self._made: _Transpiled | None = None

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = ENDPOINT,
        trainers: int | str = 1,
        sync_mode: bool | None = None,
        startup_program: Program | None = None,
        current_endpoint: str = ENDPOINT,
    ) -> None:
        """Plans and makes the trainer's main program.  The given programs stay as they are.

        Args:
            trainer_id: this trainer, from 0 to below ``trainers``; any of them in a server's
                process.
            program: the single-node main program; None is the default one.
            pservers: the servers' control endpoints, comma-separated.
            trainers: how many there are; in a mode without servers the endpoint of each,
                comma-separated.
            sync_mode: None is as the configuration says.
            startup_program: the single-node startup program; None is the one that belongs to
                ``program``.
            current_endpoint: this trainer's own in a mode without servers, if given; of no meaning
                to a parameter server.

        Raises:
            TypeError: an argument has another type.
            ValueError: a number is out of range, an endpoint malformed, the configuration
                contradicts ``sync_mode`` or itself or has a field without effect, an optimizer
                cannot be sliced, or the startup program is another program's.
        """
        self.config.check_effects()
        if not self.config.has_servers:
            self._made = self._collective(
                trainer_id,
                program,
                pservers,
                trainers,
                sync_mode,
                startup_program,
                current_endpoint,
            )
            return
        lane, endpoints = self.config.lane(sync_mode), parse_endpoints(pservers)
        parse_endpoints(current_endpoint, "current_endpoint")
        trainers = _whole_number("trainers", trainers, 1)
        trainer_id = _whole_number("trainer_id", trainer_id, 0, trainers)
        program, startup = _programs(program, startup_program)
        plan = self._plan(program, lane, trainers, len(endpoints))
        _check_belongs(plan, startup)
        deployment = Deployment(plan, endpoints, trainer_id, None, self.config.wait_port)
        main = trainer_program(program, deployment, self.config.runtime_split_send_recv)
        verify_servers(
            [pserver_program(deployment.of_server(index)) for index in range(plan.servers)], plan
        )
        self._made = _Transpiled(deployment, main, startup)

    def _collective(
        self,
        trainer_id: int,
        program: Program | None,
        pservers: str,
        trainers: int | str,
        sync_mode: bool | None,
        startup: Program | None,
        current_endpoint: str,
    ) -> _Transpiled:
        """What ``transpile`` makes in a mode without servers."""
        if not isinstance(trainers, str):
            raise TypeError(
                "trainers: expected the trainers' endpoints, HOST:PORT,HOST:PORT,..., with "
                f"mode={self.config.mode!r}; "
                f"got {trainers!r}"
            )
        endpoints = parse_endpoints(trainers, "trainers")
        parse_endpoints(current_endpoint, "current_endpoint")
        trainer_id = _whole_number("trainer_id", trainer_id, 0, len(endpoints))
        check_arguments(
            self.config.mode, pservers, sync_mode, endpoints, trainer_id, current_endpoint
        )
        single, startup = _programs(program, startup)
        deployment = deployment_of(
            single, collective_of(self.config, endpoints), endpoints, trainer_id
        )
        _check_belongs(deployment.plan, startup)
        self._log(deployment.plan)
        made = _Transpiled(deployment, collective_program(single, deployment), startup)
        collective_startup(startup, deployment)  # its laws
        if program is None:
            set_default_trainer(made.main)
        return made

    def _plan(self, program: Program, lane: Lane, trainers: int, servers: int) -> Plan:
        config = self.config
        plan = plan_program(
            program,
            lanes=uniform(lane),
            trainers=trainers,
            servers=servers,
            min_block_size=config.min_block_size,
            slice_var_up=config.slice_var_up,
            split_method=config.split_method,
        )
        self._log(plan)
        return plan

    def _log(self, plan: Plan) -> None:
        if self.config.print_log:
            for key, value in plan.manifest().items():
                _log.info("%s: %s", key, value)

    def _transpiled(self) -> _Transpiled:
        if self._made is None:
            raise ValueError("DistributeTranspiler: expected transpile to be called first")
        return self._made

    def _server(self, endpoint: str) -> Deployment:
        deployment = self._transpiled().servers
        if endpoint not in deployment.endpoints:
            raise ValueError(
                f"endpoint: expected one of {', '.join(deployment.endpoints)}, got {endpoint!r}"
            )
        return deployment.of_server(deployment.endpoints.index(endpoint))

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """The trainer's main program.

        Args:
            wait_port: recorded in the program: running it waits, with a deadline, until the servers
                (or the other trainers) answer; without, they are expected to be there already.

        Raises:
            ValueError: ``transpile`` has not been called.
        """
        made = self._transpiled()
        return replace(
            made.main,
            deployment=replace(made.deployment, wait_port=wait_port and self.config.wait_port),
        )

    def get_pserver_program(self, endpoint: str) -> Program:
        """The main program of the server at ``endpoint``; running it serves until it is stopped.

        Raises:
            ValueError: ``transpile`` has not been called, or no server has this endpoint.
        """
        return pserver_program(self._server(endpoint))

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """The main and the startup program of the server at ``endpoint``.

        Raises:
            ValueError: as :meth:`get_pserver_program`.
        """
        return self.get_pserver_program(endpoint), self.get_startup_program(endpoint)

    def get_startup_program(
        self,
        endpoint: str | None = None,
        pserver_program: Program | None = None,
        startup_program: Program | None = None,
    ) -> Program:
        """The trainer's startup program, or with an endpoint (or a server's main program) that of a
        server.

        Args:
            endpoint: a server's.
            pserver_program: a server's main program, which names its endpoint as well.
            startup_program: a single-node startup program in place of the one that ``transpile``
                knew.

        Raises:
            ValueError: ``transpile`` has not been called, no server has this endpoint, the program
                is another server's, or the startup program does not belong to the main program.
        """
        made = self._transpiled()
        startup = made.startup if startup_program is None else startup_program
        _check_belongs(made.deployment.plan, startup)
        if pserver_program is not None:
            endpoint = self._endpoint_of(pserver_program, endpoint)
        if endpoint is None and made.deployment.plan.collective is not None:
            return collective_startup(startup, made.deployment)
        if endpoint is None:
            return trainer_startup(startup, made.deployment, self.config.runtime_split_send_recv)
        return pserver_startup(self._server(endpoint), self._storage(startup))

    def _storage(self, startup: Program) -> Storage | None:
        return startup.storage if startup.storage is not None else self._transpiled().main.storage

    def _endpoint_of(self, program: Program, endpoint: str | None) -> str:
        """The endpoint of a server's main program, which must be ``endpoint`` if that is given."""
        deployment = program.deployment
        if deployment is None or deployment.server_index is None:
            raise ValueError(
                "pserver_program: expected what get_pserver_program gave, got a program of no "
                "server"
            )
        own = deployment.endpoints[deployment.server_index]
        if endpoint is not None and endpoint != own:
            raise ValueError(
                f"pserver_program: expected the program of {endpoint}, got that of {own}"
            )
        return own
