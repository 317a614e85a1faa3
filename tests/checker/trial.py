"""Runs one trial: servers, trainers in threads, faults between them; and checks the values that
they read against the invariants.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from pserver import timeouts
from pserver.client import client, stream
from pserver.client.replies import Reply
from pserver.config import ServerConfig, split_endpoint
from pserver.job_log import follower
from pserver.service.server import Server
from pserver.transport import inprocess
from tests.checker.invariants import Invariant
from tests.checker.scenario import COPIES, RULE, Scenario
from tests.checker.tables import TableInvariants, TableReader
from tests.faults.faults import CallInjector, CallPoint, Injector, Point, faulty_calls, injected
from trainer.communicator.communicator import Communicator
from trainer.environment.environment import Connection
from transpiler.plan.plan import Deployment, Placement
from transpiler.program import Program

TIMEOUT_SECONDS = 30.0  # of a whole trial
# the part of the control calls that have a fault, where streams have random ones
CALL_RATE = 0.1
SHORT = (  # seconds of waits in a trial
    (timeouts, "PROBE_SECONDS", 0.02),
    (stream, "RETRY_SECONDS", 0.005),
    (client, "POLL_SECONDS", 0.01),
    (follower, "POLL_SECONDS", 0.01),
)
_shortening = threading.Lock()  # one trial at a time shortens the waits of this process


class ViolatedInvariant(AssertionError):
    """An invariant does not hold; the message has the trainer, the step, and the expected value."""


@dataclass
class Result:
    """The result of a trial.

    Attributes:
        failure: "" if every invariant held.
        faults: by (action, direction, kind): how often.
    """

    scenario: Scenario
    failure: str = ""
    faults: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __str__(self) -> str:
        happened = (
            ", ".join(
                f"{count} x {' '.join(fault)}" for fault, count in sorted(self.faults.items())
            )
            or "none"
        )
        return f"{self.scenario}\n  {self.failure or 'every invariant held'}\n  faults: {happened}"


class AnyTransport(Connection):
    """A connection over a transport that is not for users: "inprocess"."""

    def __post_init__(self) -> None:
        """No check of the name."""


class TwinServer(Server):
    """A server that also listens within its process."""

    def _open(self, host: str, program: Program | None) -> None:
        super()._open(host, program)
        listener = inprocess.listen(self._streams.handle, host)
        self._transports.append(listener)
        self.job.transports["inprocess"] = listener.port


@contextmanager
def short_waits() -> Iterator[None]:
    """Retries after some milliseconds in place of a second."""
    with _shortening:
        before = [vars(module)[name] for module, name, _ in SHORT]
        try:
            for module, name, seconds in SHORT:
                vars(module)[name] = seconds
            yield
        finally:
            for (module, name, _), seconds in zip(SHORT, before, strict=True):
                vars(module)[name] = seconds


class Trainer:
    """One trainer of a trial, in a thread: takes its steps and checks the values that it reads."""

    def __init__(self, scenario: Scenario, endpoints: tuple[str, ...], number: int) -> None:
        self.scenario, self.number, plan = scenario, number, scenario.plan
        self.tensors = {
            placement.name: torch.zeros(placement.shape) for placement in plan.placements
        }
        self.invariants = [Invariant(scenario, lane) for lane in plan.lanes]
        self.table_invariants = [TableInvariants(scenario, name) for name in scenario.table_names]
        self.tables: list[TableReader] = []
        self._announced = 0  # steps after which rows are read
        # (parameter, slice, trainer) -> the last value read
        self._lowest: dict[tuple[str, int, int], Fraction] = {}
        self._version = 0
        self.communicator = Communicator(
            Deployment(plan, endpoints, trainer_id=number),
            self.tensors,
            connection=AnyTransport(
                heartbeat_timeout_seconds=10.0,
                start_timeout_seconds=10.0,
                transport=scenario.transport,
            ),
        )

    def run(self) -> None:
        """All of its steps, and a check of the final values when all trainers have finished."""
        self.tables = [
            TableReader(invariants, self.number, self.communicator, self._expect)
            for invariants in self.table_invariants
        ]
        self._look_up(0)
        for step in range(1, self.scenario.steps + 1):
            time.sleep(self.scenario.pause(self.number, step))
            self._check_done(step, self._step(step))
            for placement in self.scenario.plan.placements:
                self._check_read(step, placement)
            self._look_up(step)
        for lane in self.communicator.lanes:
            lane.drain()
        self.communicator.barrier("end")
        self.communicator.pull()
        for name, tensor in self.tensors.items():
            self.check_final(name, tensor, "reads at the end")
        for table in self.tables:
            table.check_end()

    def _look_up(self, step: int) -> None:
        look_ahead = self.communicator.look_ahead
        while look_ahead is not None and self._announced <= step + look_ahead.depth:
            look_ahead.announce((table, table.ids(self._announced)) for table in self.tables)
            self._announced += 1
        for table in self.tables:
            table.read(step)

    def _step(self, step: int) -> Reply:
        change = float(self.scenario.changes[self.number][step - 1])
        for placement in self.scenario.plan.placements:
            own = torch.zeros(placement.shape)
            own[self.number :: self.scenario.trainers] = change
            if self.scenario.plan.lane_of(placement).kind.steps_on_trainer:
                self.tensors[placement.name].add_(own)
            else:
                self.communicator.send_whole({placement.name: -own})
        for table in self.tables:
            table.send(step)
        return self.communicator.commit(
            {0: RULE.hparams}, overflow=(self.number, step) in self.scenario.overflows
        )

    def _check_done(self, step: int, done: Reply) -> None:
        """Versions never go back; in sync every reply has the steps of all trainers, and says
        whether there was an overflow.
        """
        self._expect(
            done.version >= self._version,
            step,
            f"hears of version {done.version} after version {self._version}",
        )
        self._version = done.version
        if self.scenario.plan.lanes[0].kind.merges_gradients:
            overflow = any(skipped == step for _, skipped in self.scenario.overflows)
            expected = (self.scenario.trainers, overflow)
            self._expect(
                (done.committed, done.overflow) == expected,
                step,
                f"expected {expected}, got {done}",
            )

    def _check_read(self, step: int, placement: Placement) -> None:
        invariant = self.invariants[placement.lane]
        for trainer in range(self.scenario.trainers):
            allowed = invariant.allowed(self.number, step, trainer)
            for slice_, value in enumerate(
                self._counters(placement.name, self.tensors[placement.name], trainer, step)
            ):
                what = f"reads {value} of trainer {trainer} in slice {slice_} of {placement.name!r}"
                self._expect(
                    value in allowed, step, f"{what}; allowed: {', '.join(map(str, allowed))}"
                )
                if (
                    self.scenario.plan.lane_of(placement).kind.outer_optimizer
                    and trainer == self.number
                ):
                    # the mean of all trainers' changes takes the place of its own
                    continue
                lowest = self._lowest.get((placement.name, slice_, trainer), Fraction(0))
                self._expect(value >= lowest, step, f"{what} after {lowest}")
                self._lowest[placement.name, slice_, trainer] = value

    def _counters(self, name: str, tensor: torch.Tensor, trainer: int, step: int) -> list[Fraction]:
        """A trainer's counter in each slice, which has several copies of it."""
        copies = tensor[trainer :: self.scenario.trainers].view(-1, COPIES)
        whole = bool((copies == copies[:, :1]).all())
        self._expect(
            whole,
            step,
            f"reads half of an update of trainer {trainer} in {name!r}: {copies.tolist()}",
        )
        return [Fraction(float(copy)) for copy in copies[:, 0]]

    def check_final(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Every counter is the sum of its trainer's steps."""
        invariant = self.invariants[self.scenario.plan.placement(name).lane]
        expected = [
            float(invariant.final(index % self.scenario.trainers))
            for index in range(tensor.numel())
        ]
        self._expect(
            tensor.tolist() == expected,
            self.scenario.steps,
            f"{where}: {name!r} is {tensor.tolist()}, not {expected}",
        )

    def _expect(self, holds: bool, step: int, what: str) -> None:
        if not holds:
            raise ViolatedInvariant(f"trainer {self.number}, step {step}: {what}")


def play(
    scenario: Scenario, points: Sequence[Point] = (), calls: Sequence[CallPoint] = ()
) -> Result:
    """Runs a trial to its end, with faults at these points beside the random ones.

    Args:
        points: faults of streams.
        calls: faults of control calls.

    Returns:
        The result, with the first error, if there was one.
    """
    result = Result(scenario)
    with short_waits(), ExitStack() as stack:
        transport = "grpc" if scenario.transport == "inprocess" else scenario.transport
        servers = [TwinServer(ServerConfig(transport=transport)) for _ in range(scenario.servers)]
        for server in servers:
            server.start()
            stack.callback(server.stop, 0.0)
        names = {
            port: f"server {index}"
            for index, server in enumerate(servers)
            for port in server.job.transports.values()
        }
        injector = Injector(points, scenario.seed, scenario.rate, names)
        stack.enter_context(injected(injector, scenario.transport))
        call_names = {
            split_endpoint(server.endpoint)[1]: f"server {index}"
            for index, server in enumerate(servers)
        }
        call_rate = CALL_RATE if scenario.rate else 0.0
        call_injector = stack.enter_context(
            faulty_calls(CallInjector(calls, scenario.seed, call_rate, call_names))
        )
        trainers: list[Trainer] = []
        try:
            _run(scenario, servers, trainers)
        except Exception as error:
            result.failure = f"{type(error).__name__}: {error}"
        with ThreadPoolExecutor(scenario.trainers) as pool:  # a last exchange is of all at once
            leaving = [pool.submit(each.communicator.leave, result.failure) for each in trainers]
        for each in leaving:
            each.result()
        result.faults = injector.done + call_injector.done
    return result


def _run(scenario: Scenario, servers: list[TwinServer], trainers: list[Trainer]) -> None:
    endpoints = tuple(server.endpoint for server in servers)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    pool = ThreadPoolExecutor(scenario.trainers, thread_name_prefix="trainer")
    try:
        for number in range(scenario.trainers):
            trainers.append(Trainer(scenario, endpoints, number))
            _result(pool.submit(trainers[-1].communicator.start), deadline)
        running = [pool.submit(trainer.run) for trainer in trainers]
        failed = (
            each
            for each in wait(running, deadline - time.monotonic(), FIRST_EXCEPTION).done
            if each.exception()
        )
        for each in (*failed, *running):  # a failed one first: the others may be blocked on it
            _result(each, deadline)
    finally:
        pool.shutdown(wait=False)
    _check_servers(scenario, servers, trainers[0])


def _result(running: Future[None], deadline: float) -> None:
    try:
        running.result(timeout=deadline - time.monotonic())
    except TimeoutError:
        raise ViolatedInvariant(f"the trial did not end within {TIMEOUT_SECONDS:g} s") from None


def _check_servers(scenario: Scenario, servers: list[TwinServer], trainer: Trainer) -> None:
    """Checks the servers' own tables and their counts of updates."""
    skipped = len({step for _, step in scenario.overflows})
    for index, server in enumerate(servers):
        installed = server.job.installed()
        for name, slice_ in installed.slices.values.items():
            trainer.check_final(
                installed.slices.updates[name].parameter, slice_, f"server {index} holds at the end"
            )
        for invariants in trainer.table_invariants:
            if wrong := invariants.check_held(installed.tables[invariants.name], index):
                raise ViolatedInvariant(wrong)
        for steps, invariant in zip(installed.lanes, trainer.invariants, strict=True):
            expected = invariant.version(skipped)
            if expected not in (-1, steps.version):
                raise ViolatedInvariant(
                    f"server {index}, lane {steps.index}: expected {expected} updates, counted "
                    f"{steps.version}"
                )
