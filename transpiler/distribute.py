"""DistributeTranspiler: from a single-node program to the programs of a job.

What ``transpile`` does, in order::

    check_effects     the configuration and the arguments fit together     distribute_config.py
    choices_of        the lanes, by the configuration or a strategy        strategy/from_config.py
    plan_program      which server holds what, decided once                program_planner.py
    trainer_program   the passes of a trainer, verified after each pass    cluster_programs.py
    pserver_program   the passes of each server, likewise                  cluster_programs.py
    verify_servers    every slice is owned by exactly one server           verify/verify.py

Jobs without servers have their own passes: ``collective.py``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transpiler.cluster_programs import (
    check_belongs,
    forward_program,
    pserver_program,
    pserver_startup,
    trainer_program,
    trainer_startup,
)
from transpiler.collective import (
    ENDPOINT,
    check_arguments,
    collective_program,
    collective_startup,
    deployment_of,
)
from transpiler.distribute_config import DistributeTranspilerConfig
from transpiler.given_programs import Given, given_programs, share, startup_programs, values_of
from transpiler.inference.fed_ids import check_fed
from transpiler.ir.updates import updates
from transpiler.names.names import missing_member
from transpiler.plan.modes import MODES
from transpiler.plan.plan import Deployment, Plan
from transpiler.plan.planner import plan_parameters
from transpiler.plan.settings import check_flag, whole_number
from transpiler.program import Program
from transpiler.program_planner import plan_program, plan_programs
from transpiler.rewrites.amp import check_scales
from transpiler.rewrites.dgc import compression_of
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs
from transpiler.strategy.collective_plan import agreed, collective_of
from transpiler.strategy.execution import execution_of
from transpiler.strategy.from_config import Choices, choices_of
from transpiler.strategy.refusals import check
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.tracing.default_programs import default_main_program, set_default_trainer
from transpiler.transpiled import Transpiled
from transpiler.verify.verify import verify_servers

__all__ = [
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "MODES",
    "parse_endpoints",
    "plan_parameters",
    "plan_program",
    "pserver_program",
    "pserver_startup",
    "trainer_program",
    "trainer_startup",
]

_log = logging.getLogger("transpiler")


# a name, an address of IPv4, or one of IPv6
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[?[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]?")


def parse_endpoints(pservers: str, what: str = "pservers") -> tuple[str, ...]:
    """Splits ``"HOST:PORT,HOST:PORT"`` into endpoints, by index.

    Args:
        pservers: the text.
        what: the argument that it came in, for messages.

    Raises:
        TypeError: not text.
        ValueError: an endpoint is not HOST:PORT, or two are equal.
    """
    if not isinstance(pservers, str):
        raise TypeError(
            f"{what}: expected text HOST:PORT,HOST:PORT,..., got {type(pservers).__name__}"
        )
    endpoints = tuple(part.strip() for part in pservers.split(","))
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if (
            not _HOST.fullmatch(host)
            or not port.isascii()
            or not port.isdigit()
            or int(port) > 65535
        ):
            raise ValueError(
                f"{what}: expected HOST:PORT with a port of 0 to 65535, got {endpoint!r} in "
                f"{pservers!r}"
            )
        if endpoints.count(endpoint) > 1:
            raise ValueError(f"{what}: expected different endpoints, got {endpoint} twice")
    return endpoints


def parse_endpoint(endpoint: str, what: str) -> str:
    """One endpoint.

    Raises:
        TypeError: not text.
        ValueError: it is not HOST:PORT, or there are several.
    """
    found = parse_endpoints(endpoint, what)
    if len(found) > 1:
        raise ValueError(f"{what}: expected one HOST:PORT, got {endpoint!r}")
    return found[0]


def _trainer_programs(programs: tuple[Program, ...], deployment: Deployment) -> tuple[Program, ...]:
    """A trainer's main program of each optimizer."""
    return tuple(
        trainer_program(program, replace(deployment, optimizer=number))
        for number, program in enumerate(programs)
    )


class DistributeTranspiler:
    """Makes the programs of a job: a trainer's, and one for each parameter server.

    Every process of a job calls ``transpile`` with the same program, ``pservers`` and ``trainers``.
    Then a trainer calls ``get_trainer_program()`` and ``get_startup_program()``, and a server calls
    ``get_pserver_programs(its endpoint)``.

    Args:
        config: None is a :class:`DistributeTranspilerConfig` with all defaults.

    Raises:
        TypeError: ``config`` has another type.

    Example:
        >>> import torch
        >>> from pserver import DistributeTranspiler, capture
        >>> model = torch.nn.Linear(3, 1)
        >>> def step(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> main, startup = capture(model, step, optimizer, (torch.ones(4, 3), torch.ones(4, 1)))
        >>> transpiler = DistributeTranspiler()
        >>> transpiler.transpile(
        ...     0, main, pservers="a:6174,b:6174", trainers=2, startup_program=startup
        ... )
        >>> [op.type for op in transpiler.get_trainer_program().main.ops][-4:]
        ['send_barrier', 'recv', 'recv', 'fetch_barrier']
        >>> [op.type for op in transpiler.get_pserver_program("a:6174").blocks[1].ops]
        ['sum', 'scale', 'sgd']
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise TypeError(
                f"config: expected a DistributeTranspilerConfig, got {type(config).__name__}"
            )
        self.config = config if config is not None else DistributeTranspilerConfig()
        self._made: Transpiled | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises for an unknown name; for one of Paddle's the error says what to write."""
            raise missing_member(self, name, "DistributeTranspiler")

    def transpile(
        self,
        trainer_id: int,
        program: Given = None,
        pservers: str = ENDPOINT,
        trainers: int | str = 1,
        sync_mode: bool | None = None,
        startup_program: Given = None,
        current_endpoint: str = ENDPOINT,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        """Plans the job and makes the trainer's main program.  The given programs stay unchanged.

        A forward program is given after the job's training program, to the same transpiler and with
        the same servers and trainers.  ``get_trainer_program()`` then gives one that receives the
        servers' parameters, pulls their rows, and computes; in a k-step lane it uses the trainer's
        own.  It shares the training program's values.

        Args:
            trainer_id: this trainer, from 0 to below ``trainers``; any of them in a server's
                process.
            program: the single-node main program; None is the default one.  A list is one for each
                of several optimizers, as for a GAN, captured from one module: the job has one plan,
                and the getters of a trainer's programs give lists.
            pservers: the servers' control endpoints, comma-separated.
            trainers: the number of trainers; in a mode without servers the endpoint of each,
                comma-separated.
            sync_mode: None is as the configuration says.
            startup_program: the single-node startup program, or a list of as many; None is the one
                that belongs to ``program``.
            current_endpoint: this process's HOST:PORT.  In a mode without servers it must be that
                of the trainer in ``trainers``; with servers nothing reads it, as trainers have no
                endpoint there.
            strategy: chooses the modes, as in ``fleet``, and leads to the same plan; None: the
                configuration chooses them.

        Raises:
            TypeError: an argument has another type.
            ValueError: a number is out of range, an endpoint is malformed, the configuration
                contradicts ``sync_mode`` or ``strategy`` or itself, a setting has no effect, an
                optimizer cannot be sliced, or the startup program is another program's.
        """
        agreed(self.config, strategy).check_effects()
        given = (trainer_id, program, pservers, trainers, sync_mode, startup_program)
        if self.config.has_servers:
            self._made = self._with_servers(*given, current_endpoint, strategy)
            return
        check(strategy, "collective_program")
        self._made = self._collective(*given, current_endpoint, strategy)

    def _with_servers(
        self,
        trainer_id: int,
        program: Given,
        pservers: str,
        trainers: int | str,
        sync_mode: bool | None,
        startup_program: Given,
        current_endpoint: str,
        strategy: DistributedStrategy | None,
    ) -> Transpiled:
        """``transpile`` in a mode with servers."""
        chosen = choices_of(self.config, sync_mode, strategy)
        endpoints = parse_endpoints(pservers)
        parse_endpoint(current_endpoint, "current_endpoint")
        trainers = whole_number("trainers", trainers, 1)
        trainer_id = whole_number("trainer_id", trainer_id, 0, trainers)
        single = default_main_program() if program is None else program
        if isinstance(single, Program) and not updates(single.main) and single.deployment is None:
            given = (sync_mode, startup_program, strategy)
            return self._forward(single, (endpoints, trainers, trainer_id), given)
        pairs = [Programs(*pair) for pair in given_programs(program, startup_program)]
        mains, startups = zip(*(rewritten(pair, strategy) for pair in pairs), strict=True)
        share([main.storage for main in mains if main.storage is not None])
        plan = self._plan(mains, chosen, trainers, len(endpoints))
        check_scales(mains, plan)
        for startup in startups:
            check_belongs(plan, startup)
        deployment = Deployment(
            plan,
            endpoints,
            trainer_id,
            None,
            chosen.wait_port,
            chosen.runtime_split_send_recv,
            chosen.soft_wait_ms,
            execution=execution_of(strategy),
        )
        made = _trainer_programs(mains, deployment)
        verify_servers(
            [pserver_program(deployment.of_server(index)) for index in range(plan.servers)], plan
        )
        return Transpiled(deployment, made, startups, isinstance(program, list | tuple))

    def _collective(
        self,
        trainer_id: int,
        program: Given,
        pservers: str,
        trainers: int | str,
        sync_mode: bool | None,
        startup: Given,
        current_endpoint: str,
        strategy: DistributedStrategy | None,
    ) -> Transpiled:
        """``transpile`` in a mode without servers."""
        if isinstance(program, list | tuple):
            raise ValueError(
                f"program: expected one with mode={self.config.mode!r}, got a list of "
                f"{len(program)}: without servers each program shares its own gradients, so "
                "transpile each by a DistributeTranspiler of its own"
            )
        if not isinstance(trainers, str):
            raise TypeError(
                "trainers: expected the trainers' endpoints, HOST:PORT,HOST:PORT,..., with "
                f"mode={self.config.mode!r}; got {trainers!r}"
            )
        endpoints = parse_endpoints(trainers, "trainers")
        parse_endpoint(current_endpoint, "current_endpoint")
        trainer_id = whole_number("trainer_id", trainer_id, 0, len(endpoints))
        check_arguments(
            self.config.mode, pservers, sync_mode, endpoints, trainer_id, current_endpoint
        )
        ((single, startup),) = given_programs(program, startup)
        single, startup = rewritten(Programs(single, startup), strategy)
        collective = collective_of(self.config, endpoints, strategy)
        deployment = deployment_of(single, collective, endpoints, trainer_id)
        deployment = replace(deployment, execution=execution_of(strategy))
        check_belongs(deployment.plan, startup)
        self._log(deployment.plan)
        made = Transpiled(deployment, (collective_program(single, deployment),), (startup,))
        collective_startup(startup, deployment)  # raises now if it violates an invariant
        if program is None:
            set_default_trainer(made.mains[0])
        return made

    def _forward(
        self, program: Program, place: tuple[object, ...], given: tuple[object, ...]
    ) -> Transpiled:
        """A forward program of the job that is transpiled already."""
        if self._made is None:
            raise ValueError(
                "transpile: expected a program with optimizer ops, got one that updates nothing: "
                "transpile the job's training program first; a forward program then evaluates "
                "against its servers"
            )
        deployment, names = self._made.servers, ("pservers", "trainers", "trainer_id")
        job = (deployment.endpoints, deployment.plan.trainers, deployment.trainer_id)
        for name, mine, own in zip(names, place, job, strict=True):
            if mine != own:
                raise ValueError(
                    f"{name}: expected the job's, {own}, for a forward program, got {mine}"
                )
        if any(each is not None for each in given):
            raise ValueError(
                "transpile: expected no sync_mode, startup_program or strategy for a forward "
                "program: its job is planned already"
            )
        found = forward_program(program, deployment, self._made.trains(program))
        return replace(self._made, forward=found)

    def _plan(
        self, programs: tuple[Program, ...], chosen: Choices, trainers: int, servers: int
    ) -> Plan:
        settings: dict[str, Any] = {
            "lanes": chosen.lanes,
            "trainers": trainers,
            "servers": servers,
            "min_block_size": self.config.min_block_size,
            "slice_var_up": self.config.slice_var_up,
            "split_method": self.config.split_method,
            "compression": compression_of(programs, self.config.compression),
        }
        if len(programs) > 1:
            plan = plan_programs(programs, **settings)
        else:
            plan = plan_program(programs[0], **settings)
        if chosen.overlap and plan.clip is not None and plan.clip.kind != "value":
            if not plan.clips_on_servers:
                raise ValueError(
                    "overlap: gradients cannot leave early where grad_clip needs all of them on "
                    "the trainer"
                )
        ahead = [table.name for table in plan.tables if plan.lanes[table.lane].look_ahead]
        check_fed([program.main for program in programs], ahead)
        self._log(plan)
        return plan

    def _log(self, plan: Plan) -> None:
        if self.config.print_log:
            for key, value in plan.manifest().items():
                _log.info("%s: %s", key, value)

    def _transpiled(self) -> Transpiled:
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

    def get_trainer_program(self, wait_port: bool = True) -> Any:
        """The trainer's main program, or the forward one that ``transpile`` was given last.

        Args:
            wait_port: recorded in the program.  Running it waits, up to the start timeout, until
                the servers (or the other trainers) answer; with False they must answer at once.

        Returns:
            The program, with this trainer's deployment; a list if a list was transpiled.

        Raises:
            TypeError: ``wait_port`` is neither True nor False.
            ValueError: ``transpile`` has not been called.
        """
        made, waits = self._transpiled(), check_flag("wait_port", wait_port)
        waits = waits and made.deployment.wait_port
        if made.forward is not None:
            return replace(made.forward, deployment=replace(made.deployment, wait_port=waits))
        return made.as_given(
            [
                replace(
                    main,
                    deployment=replace(made.deployment, wait_port=waits, optimizer=number),
                )
                for number, main in enumerate(made.mains)
            ]
        )

    def get_pserver_program(self, endpoint: str) -> Program:
        """The main program of a server; running it serves until the job is over.

        Args:
            endpoint: the server's, one of ``pservers``.

        Raises:
            ValueError: ``transpile`` has not been called, or no server has this endpoint.
        """
        return pserver_program(self._server(endpoint))

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """The main and the startup program of a server.

        Args:
            endpoint: the server's, one of ``pservers``.

        Raises:
            ValueError: as :meth:`get_pserver_program`.
        """
        return self.get_pserver_program(endpoint), self.get_startup_program(endpoint)

    def get_startup_program(
        self,
        endpoint: str | None = None,
        pserver_program: Program | None = None,
        startup_program: Given = None,
    ) -> Any:
        """The trainer's startup program; with an endpoint or a server's main program, the server's.
        The trainer's are a list if a list was transpiled; a server has one.

        Args:
            endpoint: a server's.
            pserver_program: a server's main program, which tells its endpoint.
            startup_program: the single-node startup program, or a list of as many as there are
                programs; None is what ``transpile`` used.

        Raises:
            ValueError: ``transpile`` has not been called, no server has this endpoint, the program
                is another server's, or the startup program does not belong to the main program.
        """
        made = self._transpiled()
        startups = startup_programs(startup_program, made.startups)
        for startup in startups:
            check_belongs(made.deployment.plan, startup)
        if pserver_program is not None:
            endpoint = self._endpoint_of(pserver_program, endpoint)
        if endpoint is not None:
            return pserver_startup(self._server(endpoint), values_of([*startups, *made.mains]))
        if made.deployment.plan.collective is not None:
            return collective_startup(startups[0], made.deployment)
        return made.as_given(
            [
                trainer_startup(startup, replace(made.deployment, optimizer=number))
                for number, startup in enumerate(startups)
            ]
        )

    def _endpoint_of(self, program: Program, endpoint: str | None) -> str:
        """The endpoint of a server's main program, which must be ``endpoint`` if that is given."""
        deployment = program.deployment
        if deployment is None or deployment.server_index is None:
            raise ValueError(
                "pserver_program: expected a server's program, as get_pserver_program gives it, "
                "got another"
            )
        own = deployment.endpoints[deployment.server_index]
        if endpoint is not None and endpoint != own:
            raise ValueError(
                f"pserver_program: expected the program of {endpoint}, got that of {own}"
            )
        return own
