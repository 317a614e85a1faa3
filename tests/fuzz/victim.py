"""A server in a process of its own, with a job that runs while the server is attacked; and what is
measured of both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

from pserver.client.channel import Channel
from pserver.client.client import Client, Identity
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security import tokens
from pserver.security.access import Access
from pserver.security.tokens import Role, Secret
from pserver.wire_pb2 import HeartbeatRequest, ObserveRequest, StatusRequest
from tests.fuzz.attacks import OPEN_CALLS, Attacker
from tests.fuzz.insider import Insider
from tests.support.cluster_keys import key_folder, keys_of
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

SECONDS = 20.0
START_SECONDS = 120.0  # of a server, on a machine that is busy
HPARAMS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
SIZE = 1000  # elements of the parameter
STEP_SECONDS = 0.02  # between two steps of the good trainer
BEAT_SECONDS = 0.25


def plan_of() -> Plan:
    """One parameter; two trainers that do not wait for each other."""
    named = [("w", (SIZE,), "float32", 0)]
    return plan_parameters(named, [Rule("sgd", HPARAMS, {})], mode="async", trainers=2, servers=1)


class GoodTrainer:
    """A trainer of the job.

    Args:
        endpoint: of the server.
        number: of the trainer.
        access: what is proved to the server.
    """

    def __init__(self, endpoint: str, number: int, access: Access) -> None:
        self.value, self.steps = torch.ones(SIZE), 0
        plan = plan_of()
        who = number, f"good {number}", plan.fingerprint(), plan.manifest(), ("tcp",)
        self.client = Client(
            endpoint,
            0,
            Identity(*who),
            SECONDS,
            SECONDS,
            1,
            access=access,
        )
        if self.client.join().install:
            self.client.install(pserver_program(Deployment(plan, (endpoint,), server_index=0)))
            self.channel.load([("w", self.value)]).result(timeout=SECONDS)

    @property
    def channel(self) -> Channel:
        return self.client.channels[0]

    def step(self) -> None:
        """The next step; what it should lead to is known."""
        self.steps += 1
        reply = self.channel.begin(lambda name, blank: self.value)
        self.channel.push(self.steps, [("w", gradient(self.steps))])
        self.channel.commit(self.steps, {0: HPARAMS})
        reply.result(timeout=SECONDS)


def gradient(step: int) -> torch.Tensor:
    """Of the good trainer's step."""
    return torch.rand(SIZE, generator=torch.Generator().manual_seed(step))


def expected(steps: int) -> torch.Tensor:
    """The parameter after so many steps, by plain torch."""
    value = torch.ones(SIZE, requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=HPARAMS["lr"])
    for step in range(1, steps + 1):
        value.grad = gradient(step)
        optimizer.step()
    return value.detach()


# what a server asks for: nothing; its job's key, which attackers lack, or have; certificates
GUARDS = ("open", "a key", "a key that attackers have", "certificates that attackers have")


class Victim:
    """A server's process, its job, and a thread each for its steps and its heartbeats.

    Args:
        folder: for its log and its files.
        guard: what it asks for, of ``GUARDS``.

    Attributes:
        endpoint: of its control service.
        guard: what it asks for.
        ports: of its tensors, by transport.
        session: the good trainer's.
        slowest_beat: seconds of the slowest heartbeat, each over a connection of its own.
    """

    def __init__(self, folder: Path, guard: str) -> None:
        self.guard = guard
        environ = dict(os.environ)
        self._access, self._access_of_trainers = Access(), Access()
        if "key" in guard:
            secret = Secret.make()
            self._access, self._access_of_trainers = (
                Access(secret),
                Access(secret.of(Role.TRAINER)),
            )
            tokens.write(folder / "token", secret)
            environ["PSERVER_TOKEN_FILE"] = str(folder / "token")
        elif "certificates" in guard:
            self._access = Access(keys=keys_of("operator"))
            self._access_of_trainers = Access(keys=keys_of("trainer"))
            environ["PSERVER_KEYS"] = str(key_folder() / "a")
        self.log = folder / "server.log"
        self.slowest_beat = 0.0
        self.failures: list[BaseException] = []
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pserver", "serve", "--data-dir", str(folder)],
                stdout=log,
                stderr=log,
                env=environ,
            )
        self.endpoint = self._ready()
        self.trainer = GoodTrainer(self.endpoint, 0, self._access_of_trainers)
        self.session = self.trainer.client._reply.session
        self.ports = {name: self._port(name) for name in ("tcp", "shm")}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=args, daemon=True)
            for args in ((self.trainer.step, STEP_SECONDS), (self._beat, BEAT_SECONDS))
        ]

    def _ready(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(r"ready at (\S+)", self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server has not started:\n{self.log.read_text()}")

    def _port(self, transport: str) -> int:
        """As an observer is told it, who leaves at once."""
        control = ControlClient(self.endpoint, SECONDS, access=self._access)
        reply = control.observe(ObserveRequest(transports=[transport]))
        control.observe(ObserveRequest(session=reply.session, end=True))
        control.close()
        return reply.data_port

    def attacker(self, seed: int, which: int) -> Attacker | Insider:
        """The attacker of that number: one in four has no key, one in four an operator's."""
        known = seed, self.endpoint, self.ports, self.session
        if "have" not in self.guard or which % 4 == 3:
            return Attacker(*known, OPEN_CALLS if self.guard == "open" else ())
        if which % 4 == 2:
            return Insider(*known, self._access, Role.OPERATOR)
        return Insider(*known, self._access_of_trainers, Role.TRAINER)

    def begin(self) -> None:
        """Steps and heartbeats begin; the peak of the memory is counted from here."""
        for _ in range(100):
            self.trainer.step()
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        for thread in self._threads:
            thread.start()

    def _run(self, act: object, pause: float) -> None:
        assert callable(act)
        try:
            while not self._over.wait(pause):
                act()
        except BaseException as error:
            self.failures.append(error)

    def _beat(self) -> None:
        began = time.monotonic()
        control = ControlClient(self.endpoint, SECONDS, access=self._access)
        try:
            control.heartbeat(HeartbeatRequest(session=self.session))
        finally:
            control.close()
        self.slowest_beat = max(self.slowest_beat, time.monotonic() - began)

    def memory(self) -> tuple[int, int]:
        """Its memory now, and its peak, in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        now, peak = (status.partition(f"{name}:")[2].split()[0] for name in ("VmRSS", "VmHWM"))
        return 1024 * int(now), 1024 * int(peak)

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        if self._process.poll() is not None:
            raise AssertionError(f"the server has ended:\n{self.log.read_text()[-4000:]}")
        for failure in self.failures:
            raise AssertionError(f"the good trainer failed: {failure!r}") from failure

    def joined_in(self) -> float:
        """Seconds in which a new trainer joins; it leaves again."""
        began = time.monotonic()
        other = GoodTrainer(self.endpoint, 1, self._access_of_trainers)
        took = time.monotonic() - began
        other.client.leave()
        return took

    def finish(self) -> None:
        """Ends the good trainer's steps.

        Raises:
            AssertionError: its result is another than it is alone.
        """
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS)
        self.check()
        self.trainer.step()
        assert torch.equal(self.trainer.value, expected(self.trainer.steps)), "another result"
        control = ControlClient(self.endpoint, SECONDS, access=self._access)
        failure = control.status(StatusRequest()).failure
        control.close()
        assert not failure, failure

    def __enter__(self) -> Victim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        try:
            self.trainer.client.leave()
        except PServerError:
            pass  # it has ended before
        self._process.terminate()
        self._process.wait(SECONDS)
