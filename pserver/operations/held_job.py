"""What all servers of one job hold, between two steps: whole tensors, tables in chunks, and how far
the job is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from pserver.client.observer import Observer, Progress
from pserver.dense.slices import unmerged_states
from pserver.errors import FingerprintMismatch, Refused
from pserver.polling import poll
from pserver.security.access import Access, always_open
from pserver.table import counts
from transpiler.ir.rules import Hparam
from transpiler.ir.slice_states import slice_states
from transpiler.plan.plan import Placement, Plan
from transpiler.plan.table_planner import stored
from transpiler.program import Program

LEVEL_SECONDS = 30.0  # for servers that are a step apart to come to the same step
STEP_SECONDS = 0.05  # in which a server that is behind takes its step

log = logging.getLogger(__name__)


class Held(Protocol):
    """One server, in a pause: see :class:`~pserver.client.observer.Observer`."""

    endpoint: str
    program: Program
    fingerprint: str

    @property
    def progress(self) -> Progress:
        """How far its job is."""

    def pause(self, pausing: bool) -> None:
        """From here on no step changes a value, or steps go on."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Slices and optimizer states, by name; a state that no update has made is left out."""

    def scan(self, table: str) -> Iterator[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
        """Its rows of a table, each chunk with what is known of the table besides."""


class HeldJob:
    """What the servers of one job hold.  One thread uses it, inside :func:`holding`.

    Attributes:
        observers: of its servers, in their order.
        plan: of the job.
        apart: "", or how far the servers are apart: a job that fails in the middle of a step
            leaves some of them a step ahead.
    """

    def __init__(self, observers: Sequence[Held]) -> None:
        numbered = sorted((_index(observer), number) for number, observer in enumerate(observers))
        self.observers = [observers[number] for _, number in numbered]
        self.plan = _plan(self.observers)
        self.apart = ""
        self._states = [slice_states(observer.program.blocks) for observer in self.observers]

    @property
    def failure(self) -> str:
        """What has ended the job; "" while it runs."""
        failures = (observer.progress.failure for observer in self.observers)
        return next((failure for failure in failures if failure), "")

    @property
    def step(self) -> int:
        """The last step that every server has applied."""
        return min(observer.progress.step for observer in self.observers)

    def settle(self) -> None:
        """Lets no server change a value, when all have applied the same steps.

        A server that is behind in a lane whose steps wait for all is let go for a moment.  In a job
        that has failed it never catches up.
        """
        for observer in self.observers:
            observer.pause(True)
        text = "waiting for the servers to have applied the same steps"
        for _ in poll(log, lambda: text, LEVEL_SECONDS):
            behind = self._behind()
            if not behind or self.failure:
                break
            for observer in behind:
                observer.pause(False)
            time.sleep(STEP_SECONDS)
            for observer in behind:
                observer.pause(True)
        if behind := self._behind():
            names = ", ".join(observer.endpoint for observer in behind)
            self.apart = f"{names}: a step behind the others, so the values are of two steps"

    def _behind(self) -> list[Held]:
        lanes = [lane for lane, each in enumerate(self.plan.lanes) if each.kind.waits_for_all]
        best = {
            lane: max(each.progress.versions[lane] for each in self.observers) for lane in lanes
        }
        return [
            observer
            for observer in self.observers
            if any(observer.progress.versions[lane] < best[lane] for lane in lanes)
        ]

    def hparams(self) -> list[dict[str, Hparam]]:
        """The hyper-parameters of every group: of its last step, or the plan's before any."""
        found = [dict(rule.hparams) for rule in self.plan.groups]
        for observer in self.observers:
            for group, values in observer.progress.hparams.items():
                found[group].update(values)
        return found

    # ---- tensors ----

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every variable, and the states of its optimizer: ``model/NAME``, ``state/STATE/NAME``;
        and, with which a replay begins, what these do not have: ``server/VARIABLE``.
        """
        for placement in self.plan.placements:
            names = [self._states[each.server].get(each.name, {}) for each in placement.slices]
            arrived: list[dict[str, torch.Tensor]] = []
            for slice_, states in zip(placement.slices, names, strict=True):
                wanted = [slice_.name, *states.values()]
                arrived.append(self.observers[slice_.server].read(wanted))
            parts = [
                each[slice_.name] for each, slice_ in zip(arrived, placement.slices, strict=True)
            ]
            yield f"model/{placement.name}", _whole(parts, placement)
            outer = self.plan.lane_of(placement).kind.steps_on_trainer
            held = {name: each for some in arrived for name, each in some.items()}
            yield from unmerged_states(names, held, outer).items()
            if outer:
                continue
            for state in names[0]:
                pieces = [
                    each[own[state]]
                    for each, own in zip(arrived, names, strict=True)
                    if own[state] in each
                ]
                if pieces:
                    yield f"state/{state}/{placement.name}", _whole(pieces, placement)

    # ---- tables ----

    def chunks(self, name: str, metadata: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        """A table's rows, with their states.

        Args:
            metadata: the table's are written into it before the last chunk.
        """
        table = self.plan.table(name)
        rules = [
            [segment.begin, segment.end, rule.type, dict(rule.hparams), dict(rule.flags)]
            for segment, rule in stored(table, self.plan)
        ]
        parts: list[Mapping[str, Any]] = []
        for server, observer in enumerate(self.observers):
            for chunk, known in observer.scan(name):
                parts[server:] = [known]
                whole = counts.joint(parts)
                metadata.update(dim=table.dim, dtype=table.dtype, rules=rules, table=whole)
                yield {key: array.numpy() for key, array in chunk.items()}

    def log_places(self) -> list[dict[str, Any]]:
        """As of which entry of its recorded log each server is; nothing where one records none."""
        places = [dict(observer.progress.log_place) for observer in self.observers]
        return places if all(places) else []

    def unknown(self) -> list[str]:
        """What a job has that its servers do not know, for whoever loads the file."""
        found = [
            "the scheduler's state",
            "how many passes over the data had begun",
            "steps before a checkpoint that the job had itself loaded: they are not counted",
        ]
        own = self.plan.trainers == 1 or any(lane.buffers == "own" for lane in self.plan.lanes)
        held = [p.name for p in self.plan.placements if p.group is None]
        held = [name for name in held if own and name not in self.plan.averaged]
        if held:
            found.append(f"what the trainers have changed of {', '.join(held)} by themselves")
        if self.plan.averaged:
            names = ", ".join(self.plan.averaged)
            found.append(f"{names}: the trainers average these, and the file has initial values")
        if any(lane.optimizer for lane in self.plan.lanes):
            found.append("each optimizer's own count of steps: all begin with the largest")
        local = [p.name for p in self.plan.placements if self.plan.lane_of(p).kind.steps_on_trainer]
        if local:
            found.append(f"the optimizer states of {', '.join(local)}: the trainers have them")
        return found


@contextmanager
def holding(
    endpoints: Sequence[str], access_of: Callable[[str], Access] = always_open
) -> Iterator[HeldJob]:
    """While it lasts no step changes a value on these servers.

    Args:
        endpoints: all servers of one job, in any order.
        access_of: by endpoint, what is proved to the server.

    Raises:
        Unreachable: a server does not answer.
        Unprepared: a server holds nothing.
        FingerprintMismatch: they have different jobs.
        Refused: some of the job's servers are missing.
    """
    with ExitStack() as stack:
        observers = []
        for endpoint in endpoints:
            observers.append(Observer(endpoint, access_of(endpoint)))
            stack.callback(observers[-1].close)
        job = HeldJob(observers)
        job.settle()
        yield job


def _index(observer: Held) -> int:
    deployment = observer.program.deployment
    assert deployment is not None and deployment.server_index is not None, "a pserver program"
    return deployment.server_index


def _plan(observers: Sequence[Held]) -> Plan:
    """The plan of the job that all have.

    Raises:
        FingerprintMismatch: they have different ones.
        Refused: they are not all of the job's.
    """
    first = observers[0]
    other = next((each for each in observers if each.fingerprint != first.fingerprint), None)
    if other is not None:
        raise FingerprintMismatch(
            f"{first.endpoint} and {other.endpoint} have different jobs: expected the servers of "
            "one"
        )
    deployment = first.program.deployment
    assert deployment is not None, "a pserver program"
    found = [_index(observer) for observer in observers]
    if found != list(range(deployment.plan.servers)):
        named = ", ".join(f"{each.endpoint} (server {_index(each)})" for each in observers)
        raise Refused(
            f"expected all {deployment.plan.servers} servers of the job, each once, got {named}"
        )
    return deployment.plan


def _whole(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    if parts[0].dim() == 0 and placement.shape:
        return parts[0].clone()  # a number that every slice has: the count of steps
    return torch.cat([part.reshape(-1) for part in parts]).view(placement.shape)
