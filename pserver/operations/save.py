"""``pserver save``: writes what the servers of a running or a failed job hold, as a checkpoint that
``fleet.load`` reads on any number of servers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from pserver import timeouts
from pserver.checkpoint import checkpoint
from pserver.client.observer import JobProgress, Observer
from pserver.control.control_client import ControlClient
from pserver.dense.slices import unmerged_states
from pserver.errors import FingerprintMismatch, PServerError, Refused
from pserver.polling import poll
from pserver.security.access import Access, always_open
from pserver.table import counts
from transpiler.files.files import local_path
from transpiler.ir.graph import Role, Storage
from transpiler.ir.rules import Hparam
from transpiler.ir.served import HeldRows, Served
from transpiler.ir.slice_states import slice_states
from transpiler.plan.plan import Placement, Plan
from transpiler.plan.planner import stored
from transpiler.program import Program

# ---- each server ----
#
# One call to each of several servers, with a line for each.


def ask_each(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access],
    ask: Callable[[ControlClient], str],
    refused: str,
) -> int:
    """Asks each server, and prints the outcome.

    Args:
        endpoints: HOST:PORT of each server.
        access_of: by endpoint, what is proved to the server.
        ask: makes the call, and returns a text about its outcome.
        refused: the words for a failure, in the line of a server that refuses or does not answer.

    Returns:
        0 if all have done it, otherwise 1.
    """
    failed = 0
    for endpoint in endpoints:
        control = ControlClient(endpoint, timeouts.CALL_SECONDS, access=access_of(endpoint))
        try:
            line = f"{endpoint}: {ask(control)}"
        except PServerError as error:
            failed, line = 1, f"{refused}: {error}"
        finally:
            control.close()
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return failed


# ---- drain ----
#
# ``pserver drain``: ends servers as SIGTERM does, from anywhere.


def drain(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> int:
    """Drains each server, and prints a line for each.

    A server that drains takes no new step, tells its trainers, sends what it has begun to send, and
    ends within seconds; a job that runs on it fails.

    Args:
        endpoints: HOST:PORT of each server.
        console: where to print.
        access_of: by endpoint, what is proved to the server.

    Returns:
        0 if all of them have taken it; otherwise 1: one does not answer, or refuses.
    """
    return ask_each(endpoints, console, access_of, _drain, "not drained")


def _drain(control: ControlClient) -> str:
    control.drain()
    return "drains, and then ends"


# ---- held job ----
#
# What all servers of one job hold, between two steps: whole tensors, tables in chunks, and how far
# the job is.


LEVEL_SECONDS = 30.0  # for servers that are a step apart to come to the same step
STEP_SECONDS = 0.05  # in which a server that is behind takes its step

log = logging.getLogger(__name__)


class PausedServer(Protocol):
    """One server, in a pause: see :class:`~pserver.client.observer.Observer`."""

    endpoint: str
    program: Program
    fingerprint: str

    @property
    def progress(self) -> JobProgress:
        """The progress of its job."""

    def pause(self, pausing: bool) -> None:
        """Pauses the server's steps, or ends the pause."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Slices and optimizer states, by name; a state that no update has made is left out."""

    def scan(self, table: str) -> Iterator[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
        """Its rows of a table, each chunk with what is known of the table besides."""


class HeldJob:
    """The values of one job's servers.  One thread uses it, inside :func:`holding`.

    Attributes:
        observers: of its servers, in their order.
        plan: of the job.
        apart: "", or the difference between the servers: a job that fails in the middle of a step
            leaves some of them a step ahead.
    """

    def __init__(self, observers: Sequence[PausedServer]) -> None:
        numbered = sorted((_index(observer), number) for number, observer in enumerate(observers))
        self.observers = [observers[number] for _, number in numbered]
        self.plan = _plan(self.observers)
        self.apart = ""
        self._states = [slice_states(observer.program.blocks) for observer in self.observers]

    @property
    def failure(self) -> str:
        """The error that ended the job; "" while it runs."""
        failures = (observer.progress.failure for observer in self.observers)
        return next((failure for failure in failures if failure), "")

    @property
    def step(self) -> int:
        """The last step that every server has applied."""
        return min(observer.progress.step for observer in self.observers)

    def settle(self) -> None:
        """Pauses all servers at the moment when all have applied the same steps.

        A server that is behind in a lane whose steps wait for all is resumed for a moment.  In a
        failed job it never catches up.
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

    def _behind(self) -> list[PausedServer]:
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
        """The entry of its recorded log at which each server is; nothing where one records none."""
        places = [dict(observer.progress.log_place) for observer in self.observers]
        return places if all(places) else []

    def unknown(self) -> list[str]:
        """The parts of a job that its servers do not know, in words, for readers of the file."""
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
    """Pauses the steps of these servers while the block runs.

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


def _index(observer: PausedServer) -> int:
    deployment = observer.program.deployment
    assert deployment is not None and deployment.server_index is not None, "a pserver program"
    return deployment.server_index


def _plan(observers: Sequence[PausedServer]) -> Plan:
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


# ---- reset ----
#
# ``pserver reset``: drops what a failed job has left, so that any job may begin.


def reset(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> int:
    """Resets each server, and prints a line for each.

    Args:
        endpoints: HOST:PORT of each server.
        console: where to print.
        access_of: by endpoint, what is proved to the server.

    Returns:
        0 if all of them are empty now; otherwise 1: one does not answer, or has a running job.
    """
    return ask_each(endpoints, console, access_of, _reset, "not reset")


def _reset(control: ControlClient) -> str:
    before = control.reset().state
    return "was empty" if before == "empty" else f"reset (it was {before})"


# ---- save programs ----
#
# ``pserver save --programs``: writes what each server of a running or a failed job holds as its
# program, for ``pserver serve --program``.


def save_programs(
    endpoints: Sequence[str],
    path: str,
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> None:
    """Writes ``server-0.program`` and so on, each whole or not at all.  A running job waits
    meanwhile, between two of its steps.

    Memory holds one server's part of the job.

    Args:
        endpoints: HOST:PORT of every server of the job, in any order.
        path: a directory, which is made.
        console: where the result is shown.
        access_of: by endpoint, what is proved to the server.

    Raises:
        PServerError: a server does not answer, holds nothing, or has another job; some of the job's
            servers are missing; or a job that has failed has left them at different steps.
        OSError: a file cannot be written.
        ValueError: the path is a URL.
    """
    folder = local_path(path, "pserver save --programs")
    with holding(endpoints, access_of) as job:
        if job.apart:
            raise Refused(f"{job.apart}: no job can resume from there; use pserver save")
        folder.mkdir(parents=True, exist_ok=True)
        for index, observer in enumerate(job.observers):
            file = folder / f"server-{index}.program"
            _program(observer, job).save(file)
            said = f"saved step {job.step} of {observer.endpoint}: {file}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        unknown = ", ".join(thing for thing in job.unknown() if "checkpoint" not in thing)
    console.print(f"not known to servers: {unknown}", markup=False, highlight=False, soft_wrap=True)


def _program(observer: PausedServer, job: HeldJob) -> Program:
    """A server's program with what the server holds."""
    program = observer.program
    held = [each.name for each in program.main.variables_of(Role.PARAMETER, Role.BUFFER)]
    states = [name for own in slice_states(program.blocks).values() for name in own.values()]
    storage = Storage(observer.read([*held, *states]), None)
    versions = observer.progress.versions
    storage.served = Served(
        versions,
        {trainer: (job.step,) * len(versions) for trainer in range(job.plan.trainers)},
        observer.progress.hparams,
        {table.name: _rows(observer, table.name) for table in job.plan.tables},
    )
    return replace(program, storage=storage)


def _rows(observer: PausedServer, table: str) -> HeldRows:
    scanned = list(observer.scan(table))
    arrays = {
        name: torch.cat([chunk[name] for chunk, _ in scanned if name in chunk])
        for name in {name for chunk, _ in scanned for name in chunk}
    }
    return HeldRows(arrays, json.dumps(dict(scanned[-1][1])))


# ---- save ----


SAVED_BY = "pserver save"


def save(
    endpoints: Sequence[str],
    path: str,
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> None:
    """Writes the checkpoint: whole, or not at all.  A running job waits meanwhile, between two of
    its steps.

    Memory holds the job's dense tensors, and one chunk of a table.

    Args:
        endpoints: HOST:PORT of every server of the job, in any order.
        path: the checkpoint's directory, or its URL.
        console: where progress is shown, if it is a terminal, and the result.
        access_of: by endpoint, what is proved to the server.

    Raises:
        PServerError: a server does not answer, holds nothing, or has another job; or some of the
            job's servers are missing.
        OSError: the directory cannot be written; the checkpoint that was there stays.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        ProgressBar(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar,
        holding(endpoints, access_of) as job,
    ):
        task = bar.add_task("")
        told = partial(bar.update, task)
        written = write(job, path, SAVED_BY, lambda text: told(description=text))
        said = f"saved step {job.step} of the {'failed' if job.failure else 'running'} job, "
        said += written
    console.print(f"{said}: {path}", markup=False, highlight=False, soft_wrap=True)
    if job.apart:
        console.print(f"warning: {job.apart}", markup=False, highlight=False, soft_wrap=True)


def write(job: HeldJob, path: str, by: str, tell: Callable[[str], None]) -> str:
    """Writes what a job holds as a checkpoint.

    Args:
        by: the command that writes it.
        tell: called with the progress.

    Returns:
        The amount written, for a sentence.

    Raises:
        OSError: the directory cannot be written; the checkpoint that was there stays.
    """
    tensors = {}
    for name, tensor in job.tensors():
        tell(f"reading {name}")
        tensors[name] = tensor
    meta: dict[str, Any] = {
        "step": job.step,
        "groups": job.hparams(),
        "saved_by": by,
        "unknown": job.unknown(),
    }
    if places := job.log_places():
        meta["log"] = {"servers": places}
    rows = 0
    with checkpoint.writing(path) as writer:
        tell(f"writing {path}")
        writer.tensors(tensors)
        for table in job.plan.tables:
            tell(f"reading table {table.name}")
            known = meta.setdefault("tables", {})[table.name] = dict[str, Any]()
            rows += writer.chunks(table.name, job.chunks(table.name, known))
        writer.commit(meta)
    tables = f", {rows} rows of {len(job.plan.tables)} tables" if job.plan.tables else ""
    return f"{len(tensors)} tensors{tables}"
