"""The figures of a probe, which ``pserver plan`` asks a trainer to write to a file.

See [Note: what a probe measures] in pserver/launcher/planning.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pserver.client.client import Client
from pserver.launcher.planning.cost import JobLoad, LaneLoad, Measured
from trainer.environment.environment import Connection
from trainer.senders.pipeline import LaneSender
from transpiler.formats.text import plan_text, server_load
from transpiler.plan.plan import Lane, Plan

if TYPE_CHECKING:
    from trainer.senders.served_rows import Lookups

WARM_SECONDS, WARM_STEPS = 1.0, 5  # after the first step: kernels compile, buffers get warm
LEAST_STEPS = 10  # of a window
MOST_WINDOWS = 2.0  # times its length, for a script whose steps are long


def show_if_only(plan: Plan, connection: Connection) -> None:
    """Prints the plan and ends, if only the plan was asked for; in a probe, writes its loads to the
    file.

    Raises:
        SystemExit: only the plan was asked for.
    """
    if not connection.plan_only:
        return
    print(plan_text(plan), flush=True)
    if connection.probe:
        load_of(plan).write(connection.probe)
    raise SystemExit(0)


def probe_of(
    connection: Connection,
    plan: Plan,
    clients: Sequence[Client],
    lanes: Sequence[LaneSender],
    lookups: Lookups | None,
) -> AbstractContextManager[object]:
    """The context manager around the exchange of each step: a probe if one was asked for.

    Raises:
        SystemExit: the servers of the plan would wait for more trainers than a probe has.
    """
    if not connection.probe or connection.plan_only:
        return nullcontext()
    if plan.trainers > connection.probe_trainers:
        sys.exit(
            f"the program was transpiled for {plan.trainers} trainers: its servers wait for all "
            f"of them, and a probe has {connection.probe_trainers} (--trainers 1)"
        )
    return StepProbe(connection, clients, lanes, lookups)


def load_of(plan: Plan) -> JobLoad:
    """The quantities of a plan that its job's cost depends on."""
    servers = [server_load(plan, server) for server in range(plan.servers)]
    lanes = tuple(
        LaneLoad(
            lane.mode,
            _waits(lane),
            _steps(lane),
            lane.kind.waits_for_all,
            tuple(load.sent[index] for load in servers),
            tuple(load.received[index] for load in servers),
        )
        for index, lane in enumerate(plan.lanes)
    )
    memory = tuple(load.memory for load in servers)
    return JobLoad(plan.trainers, lanes, memory, bool(plan.tables))


def _waits(lane: Lane) -> bool:
    """Whether the script's thread waits for the answer to a message."""
    if lane.kind.outer_optimizer or lane.kind.collects or not lane.kind.steps_on_trainer:
        return not lane.kind.queues or lane.kind.collects or _one_at_a_time(lane)
    return False


def _one_at_a_time(lane: Lane) -> bool:
    return lane.send_queue_size == 1 or lane.staleness is not None


def _steps(lane: Lane) -> int:
    """The most steps of the script in one message."""
    if lane.kind.steps_on_trainer:
        return lane.k_steps
    return lane.max_merge_var_num if lane.kind.queues else 1


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at one moment; the names are those of :class:`Measured`, or shorter."""

    steps: int
    seconds: float
    within: float
    cpu: float
    within_cpu: float
    messages: int
    lookups: int
    sent: list[int]
    received: list[int]
    looked_up: list[int]
    update_seconds: list[float]


class StepProbe:
    """Measures the steps of one trainer, and writes the figures.

    The script's thread enters it for the exchange of each step.

    Args:
        connection: the file, the length of the window, and the latest time at which it ends.
        clients, lanes: the trainer's.
        lookups: of rows, where the plan has tables.
    """

    def __init__(
        self,
        connection: Connection,
        clients: Sequence[Client],
        lanes: Sequence[LaneSender],
        lookups: Lookups | None,
    ) -> None:
        self._path, self._seconds = connection.probe, connection.probe_seconds
        self._end = connection.probe_end or math.inf
        self._clients, self._lanes, self._lookups = clients, lanes, lookups
        self._steps = 0
        self._first = 0.0  # when the first step had ended
        self._messages = 0
        self._begun: _Counts | None = None  # the window's first counts
        self._entered = self._entered_cpu = 0.0  # the exchange under way
        self._within = self._within_cpu = 0.0  # in all exchanges

    def __enter__(self) -> None:
        """Begins the exchange of a step."""
        self._entered, self._entered_cpu = time.monotonic(), time.process_time()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the exchange of a step.

        Raises:
            SystemExit: the probe is over, and its file written.
        """
        if kind is None and self._is_over(time.monotonic()):
            raise SystemExit(0)

    def _is_over(self, now: float) -> bool:
        self._within += now - self._entered
        self._within_cpu += time.process_time() - self._entered_cpu
        self._steps += 1
        # a window is whole messages, however many steps each stands for
        before, self._messages = self._messages, sum(lane.step for lane in self._lanes)
        sent = self._messages > before
        if self._begun is None:
            self._first = self._first or now
            warm = self._steps >= WARM_STEPS and now - self._first >= WARM_SECONDS
            if (warm and sent) or now >= self._end - self._seconds:
                self._begun = self._counts(now)
            return False
        passed, steps = now - self._begun.seconds, self._steps - self._begun.steps
        enough = passed >= self._seconds and steps >= LEAST_STEPS and sent
        if not enough and passed < MOST_WINDOWS * self._seconds and now < self._end:
            return False
        self._measured(self._begun, self._counts(now)).write(self._path)
        return True

    def _counts(self, now: float) -> _Counts:
        tables = [client.tables for client in self._clients]
        return _Counts(
            self._steps,
            now,
            self._within,
            time.process_time(),
            self._within_cpu,
            self._messages,
            0 if self._lookups is None else self._lookups.lookups,
            [sum(each.bytes_out for each in client.every_channel) for client in self._clients],
            [sum(each.bytes_in for each in client.every_channel) for client in self._clients],
            [0 if each is None else each.bytes_in for each in tables],
            [client.update_seconds() for client in self._clients],
        )

    def _measured(self, begun: _Counts, ended: _Counts) -> Measured:
        steps = ended.steps - begun.steps

        def mean(name: str) -> float:
            return float(getattr(ended, name) - getattr(begun, name)) / steps

        def means(name: str) -> tuple[float, ...]:
            pairs = zip(getattr(begun, name), getattr(ended, name), strict=True)
            return tuple((after - before) / steps for before, after in pairs)

        return Measured(
            steps,
            mean("seconds"),
            mean("within"),
            mean("cpu"),
            mean("within_cpu"),
            mean("messages"),
            mean("lookups"),
            means("sent"),
            means("received"),
            means("looked_up"),
            means("update_seconds"),
            begun.seconds,
            ended.seconds,
        )
