"""The metrics of a server: measurements of its job, and its existing counters.

The job is read only when the page is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

import torch
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver import wire_pb2 as wire
from pserver.job.background_saves import BackgroundSaves
from pserver.job.job import Job
from pserver.job.program import InstalledProgram
from pserver.lane.lane import LaneExecutor
from pserver.membership.lifecycle import JobState
from pserver.security.keys import Keys
from pserver.telemetry.metrics import (
    JobSteps,
    Labelled,
    build_info,
    current,
    job_labels,
    public_name,
)

PHASES = (*(state.value for state in JobState), "draining")  # of jobs
STATES = ("joined", "finished", "left", "preempted", "lost")  # of trainers
REASONS = {"evicted": "capacity", "expired": "ttl", "shrunk": "score"}
RESULTS = {"admitted": "admitted", "refused": "refused"}


class ServerMetrics(Collector):
    """The contents of a server's page.

    Args:
        job: the server's.
        name: of the job, where the user has named it.
        keys: of this server.
    """

    def __init__(self, job: Job, name: str = "", keys: Keys | None = None) -> None:
        self._job, self._name, self._keys = job, name, keys
        self._incarnation = public_name(secrets.token_hex(8))

    @property
    def page(self) -> Labelled:
        """The page, with the labels of this process."""
        process = ProcessCollector(registry=None)
        return Labelled(self.labels, lambda: (self, process, *self._measured()))

    def labels(self) -> Mapping[str, str]:
        """The labels of this process, as of now."""
        index, fingerprint = self._job.server_index, self._job.fingerprint
        process = f"server {index}" if fingerprint else "server"
        return job_labels(self._name, fingerprint, self._job.run, self._incarnation, process)

    def _measured(self) -> Iterator[Collector]:
        installed = self._job.program
        yield JobSteps() if installed is None else installed.steps

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`.  All metrics, also of a server without a job: their names and
        types, of which some have no sample then.
        """
        job, status = self._job, self._job.status(wire.StatusRequest())
        yield build_info(torch.__version__)
        yield current(
            "pserver_job_state",
            "1 for the phase that the job is in: empty, installing, serving, failed, draining.",
            {(each,): float(each == status.state) for each in PHASES},
            "state",
        )
        yield from _of_trainers(status.trainers)
        yield current(
            "pserver_bytes_total",
            "Payload of tensors, from (in) and to (out) trainers.",
            {
                **{("in", name): float(count) for name, count in list(job.received.items())},
                **{("out", name): float(count) for name, count in list(job.sent.items())},
            },
            *("direction", "transport"),
        )
        yield current(
            "pserver_held_bytes",
            "Parameters, optimizer states and rows.",
            {(): float(status.bytes_held)},
        )
        keys = self._keys
        yield current(
            "pserver_certificate_expiry_timestamp_seconds",
            "With keys: when this server's certificate expires.",
            {} if keys is None else {(): keys.bearer.until.timestamp()},
        )
        yield from _of_saves(job.saves)
        yield from _of_losses(status, job.program)
        yield from _of_lanes(() if job.program is None else job.program.lanes)
        yield from _of_tables(status.tables)


def _of_trainers(trainers: Sequence[wire.TrainerStatus]) -> Iterator[Metric]:
    words = [trainer.state for trainer in trainers]
    yield current(
        "pserver_trainers",
        "Trainers that are joined, finished, left, preempted, lost.",
        {(state,): float(words.count(state)) for state in STATES},
        "state",
    )
    yield current(
        "pserver_heartbeat_silence_seconds",
        "Since a trainer's last call or frame.",
        {(str(t.trainer_id),): t.silence_seconds for t in trainers if t.state == "joined"},
        "trainer",
    )
    yield current(
        "pserver_compute_seconds",
        "A trainer's own part of a step, lately: what it waits is left out.",
        {(str(t.trainer_id),): t.compute_seconds for t in trainers if t.compute_seconds},
        "trainer",
    )
    yield current(
        "pserver_straggler_ratio",
        "Of a slow trainer: its own part of a step over the median of the others'.",
        {(str(t.trainer_id),): t.behind for t in trainers if t.behind},
        "trainer",
    )
    yield current(
        "pserver_kept_lookup_bytes",
        "Ids and rows of a trainer's lookups ahead of its steps.",
        {(str(t.trainer_id),): t.kept_lookup_bytes for t in trainers if t.kept_lookup_bytes},
        "trainer",
    )


def _of_saves(saves: BackgroundSaves) -> Iterator[Metric]:
    yield current(
        "pserver_checkpoint_in_progress",
        "1 while a save is being written beside the steps, else 0.",
        {(): float(saves.under_way)},
    )
    yield current(
        "pserver_checkpoint_bytes_total",
        "Bytes of saves that were written beside the steps.",
        {(): float(saves.bytes_written)},
    )
    yield current(
        "pserver_checkpoint_failures_total",
        "Saves beside the steps that have failed.",
        {(): float(saves.failed)},
    )


def _of_losses(status: wire.StatusReply, installed: InstalledProgram | None) -> Iterator[Metric]:
    """Unreachable servers, and this server's losses when it came back."""
    yield current(
        "pserver_servers_away",
        "Servers of the job that are lost, and for which it waits.",
        {(): float(len(status.away))},
    )
    lost = {} if installed is None else installed.lost
    yield current(
        "pserver_lost_steps_total",
        "Decided steps that this server has lost, as it came back from saves.",
        {(str(trainer),): float(loss.steps) for trainer, loss in lost.items()},
        "trainer",
    )
    yield current(
        "pserver_lost_rows_total",
        "Changes of rows in them: at most so many.",
        {(str(trainer),): float(loss.rows) for trainer, loss in lost.items()},
        "trainer",
    )


def _of_lanes(lanes: Sequence[LaneExecutor]) -> Iterator[Metric]:
    yield current(
        "pserver_updates_total",
        "Updates applied; a sync step of all trainers is one.",
        {(str(lane.index),): float(lane.version) for lane in lanes},
        "lane",
    )
    yield current(
        "pserver_queue_steps",
        "Steps that have arrived and are not applied yet.",
        {(str(lane.index),): float(lane.queued) for lane in lanes},
        "lane",
    )


def _of_tables(tables: Sequence[wire.TableStatus]) -> Iterator[Metric]:
    counters = {table.name: dict(table.counters) for table in tables}

    def each(parts: Mapping[str, str]) -> dict[tuple[str, ...], float]:
        return {
            (table, label): float(found.get(key, 0))
            for table, found in counters.items()
            for key, label in parts.items()
        }

    tiers, lookups = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
    for table, found in counters.items():
        cold, disk, new = (found.get(key, 0) for key in ("cold", "lookups_disk", "lookups_new"))
        tiers |= {(table, "memory"): found["rows"] - cold, (table, "disk"): cold}
        memory = found["lookups"] - disk - new
        lookups |= {(table, "memory"): memory, (table, "disk"): disk, (table, "new"): new}
    yield current("pserver_table_rows", "Rows in memory and on disk.", tiers, "table", "tier")
    yield current(
        "pserver_table_lookups_total",
        "Ids looked up, by where their row was: memory, disk; new: there was none.",
        lookups,
        *("table", "tier"),
    )
    yield current(
        "pserver_table_evictions_total",
        "Rows and waiting ids that were removed by capacity, ttl, score.",
        each(REASONS),
        *("table", "reason"),
    )
    yield current(
        "pserver_table_admissions_total",
        "Pushes to ids without a row: admitted, which made one, and refused.",
        each(RESULTS),
        *("table", "result"),
    )
    yield current(
        "pserver_table_waiting_ids",
        "Ids that are counted and have no row yet.",
        {(table,): float(found["waiting"]) for table, found in counters.items()},
        "table",
    )
    yield current(
        "pserver_table_bytes",
        "A table's rows with their states and their index, in memory.",
        {(table.name,): float(table.bytes_held) for table in tables},
        "table",
    )
