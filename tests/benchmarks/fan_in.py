"""Rows: one server with 64 light trainers, against the same server with 2 that send as much."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from harness import Contender, Promise, Row, alternate
from processes import server

from pserver.client.client import Client, Identity
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment

SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
FEW, MANY = 2, 64
SECONDS = 60.0
FAN_IN = {
    mode: Promise(
        f"wire/tcp fan-in, {MANY} trainers, {mode}",
        f"{FEW} trainers, as many steps in all",
        0.8,
        setting=f"{MANY} steps of 256 KB; 1 server; all trainers are threads of one process",
    )
    for mode in ("async", "sync")
}
PROMISES = tuple(FAN_IN.values())


class Light:
    """A trainer of one parameter, without the sender threads of a whole one.

    Args:
        mode: of its lane.
        number, trainers: which of how many.
        elements: of the parameter.
    """

    def __init__(self, endpoint: str, mode: str, number: int, trainers: int, elements: int) -> None:
        self._value, self._gradient = torch.ones(elements), torch.full((elements,), 1e-3)
        named = [("w", (elements,), "float32", 0)]
        plan = plan_parameters(named, [Rule("sgd", SGD)], mode=mode, trainers=trainers, servers=1)
        facts = plan.fingerprint(), plan.manifest(), ("tcp",)
        self._steps = 0
        self.client = Client(
            endpoint,
            0,
            Identity(number, f"light {number}", *facts),
            SECONDS,
            SECONDS,
            1,
        )
        if self.client.join().install:
            self.client.install(pserver_program(Deployment(plan, (endpoint,), server_index=0)))
            self.client.channels[0].load([("w", self._value)]).result(timeout=SECONDS)

    def step(self) -> None:
        """Pushes the gradient and pulls the parameter."""
        self._steps += 1
        channel = self.client.channels[0]
        answer = channel.begin(lambda name, blank: self._value)
        channel.push(self._steps, [("w", self._gradient)])
        channel.commit(self._steps, {0: SGD})
        answer.result(timeout=SECONDS)


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """All rows of this file that are wanted."""
    torch.set_num_threads(1)
    elements, rounds = (64, 1) if tiny else (2**16, 10)
    for mode, promise in FAN_IN.items():
        if promise in wanted:
            with ExitStack() as stack:
                contenders = {
                    str(count): stack.enter_context(_trainers(mode, count, elements, rounds))
                    for count in (FEW, MANY)
                }
                medians = alternate(contenders, runs)
            yield Row(promise, medians[str(MANY)], medians[str(FEW)], runs)


@contextmanager
def _trainers(mode: str, count: int, elements: int, rounds: int) -> Iterator[Contender]:
    """So many trainers of one server: milliseconds in which they have taken ``MANY`` steps."""
    with server("tcp") as (_, endpoint), ThreadPoolExecutor(count) as pool:
        trainers = [Light(endpoint, mode, number, count, elements) for number in range(count)]

        def steps(trainer: Light) -> None:
            for _ in range(rounds * MANY // count):
                trainer.step()

        def run() -> float:
            began = time.perf_counter()
            list(pool.map(steps, trainers))
            return (time.perf_counter() - began) / rounds * 1e3

        yield run
        for trainer in trainers:
            trainer.client.leave()
