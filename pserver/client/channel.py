"""A trainer's calls to one server on one stream, in terms of tensors, names, hyper-parameters and
steps: the lane's steps, or the tables' rows.

The order of the calls is in :mod:`pserver.client.client`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from pserver import wire_pb2 as wire
from pserver.client.replies import Reply
from pserver.client.stream import (
    LAST_BYTES,
    WAITED_BYTES,
    Destination,
    NamedTensors,
    RequestTimes,
    RetryingStream,
    dropped,
)
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.telemetry.trace import SPANS, Fact
from pserver.transport.arrays import Assignment, PushNorm, row_parts
from pserver.wire_pb2 import Commit, Frame, GroupHparams, Kind, Part, Scan
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Hparam

Hparams = Mapping[int, Mapping[str, Hparam]]  # the hyper-parameters of every group, by its number


class Channel(RetryingStream):
    """One stream to one server, and the requests that travel on it, one at a time.

    A step is :meth:`begin`, any number of :meth:`push`, :meth:`push_rows` and :meth:`assign`,
    :meth:`commit` and, where norms clip on servers, :meth:`scale`.  Every other call is a whole
    request, which begins when the one before has been answered.

    Attributes:
        rows_travel: by table, the dtype in which its gradients' rows travel, where it is not their
            own.
        heard: called with the seconds from a step's commit to its answer; None: not measured.
        track, facts: of the spans of its requests.
    """

    rows_travel: Mapping[str, torch.dtype] = MappingProxyType({})
    heard: Callable[[float], None] | None = None
    track = ""
    facts: Mapping[str, Fact] = MappingProxyType({})

    def begin(self, destination: Destination = dropped) -> Future[Reply]:
        """See :class:`RetryingStream`."""
        reply = super().begin(destination)
        self._times = RequestTimes(self.track, dict(self.facts)) if SPANS.on else None
        if self._times is not None:
            reply.add_done_callback(self._times.answered)
        return reply

    def _begin(self, name: str, destination: Destination = dropped) -> Future[Reply]:
        """Begins a request that is no step; its span has that name."""
        reply = self.begin(destination)
        if self._times is not None:
            self._times.name = name
        return reply

    # ---- a step ----

    def push(self, step: int, gradients: NamedTensors) -> None:
        """Queues gradients (or changes) of slices, small ones together; their memory stays as it
        is until the reply has come.
        """
        self._post(Kind.GRADIENT, step, gradients)

    def push_rows(
        self, step: int, gradients: Mapping[str, RowGradient], last: bool = False
    ) -> None:
        """Queues the gradients of those rows of tables that this server holds, by table; one may be
        empty.

        Args:
            last: of the servers that get rows of this step; the caller then waits for answers.
        """
        parts: list[tuple[str, torch.Tensor]] = []
        for table, gradient in gradients.items():
            parts += row_parts(table, gradient, self.rows_travel.get(table))
        if parts:
            self._post_all(Kind.ROWS, step, parts, LAST_BYTES if last else WAITED_BYTES)

    def assign(self, step: int, assignments: Mapping[str, Assignment]) -> None:
        """Queues what a script has written into slices: the server assigns it before it applies
        the step's gradients.  Its memory stays as it is until the reply has come.

        Args:
            assignments: by slice.
        """
        for name, assignment in assignments.items():
            self._post(Kind.ASSIGN, step, assignment.parts(name))

    def commit(
        self,
        step: int,
        hparams: Hparams,
        absent: Collection[str] = (),
        overflow: bool = False,
        omit_values: bool = False,
        written: Mapping[str, int] = MappingProxyType({}),
        norms: Mapping[str, PushNorm] = MappingProxyType({}),
        last: bool = False,
        buffers: Collection[str] = (),
        leases: Iterable[EpochRange] = (),
        steps: int = 1,
        changes_after: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Queues the end of a step.

        Args:
            absent: slices of the lane without a gradient in this step.
            overflow: a gradient was not finite: no trainer's part of this step is applied.
            omit_values: the reply is not to bring values, but those of buffers.
            written: in a lane whose steps wait for all trainers: by slice, the checksum of what
                this trainer's script has written.
            norms: how large what the step brings is, by parameter and table, over all servers,
                where the lane's ``outlier_push`` is set.
            last: this trainer leaves after the step, and no trainer is to wait for it.
            buffers: those of the assigned slices that are a model's buffers.
            leases: the positions of epochs that the step has consumed; to server 0, in its first
                lane.
            steps: of the script that the message brings.
            changes_after: by table, the position since which the reply is to tell what other
                trainers have changed.
        """
        groups = [
            GroupHparams(group=group, values=hparams_to_proto(values))
            for group, values in sorted(hparams.items())
        ]
        commit = Commit(
            hparams=groups,
            absent=sorted(absent),
            overflow=overflow,
            omit_values=omit_values,
            written=dict(written),
            norms=[
                wire.PushNorm(variable=name, norm=each.norm, rows=each.rows)
                for name, each in sorted(norms.items())
            ],
            last=last,
            buffers=buffers,
            leases=[wire.LeaseRange(epoch=n, start=a, stop=b) for n, a, b in leases],
            steps=steps if steps > 1 else 0,
            changes_after=changes_after or None,
        )
        if self.heard is not None:
            self._awaited.reply.add_done_callback(
                partial(self._tell, self.heard, time.perf_counter())
            )
        if self._times is not None:
            self._flush()
            self._times.committed(step)
        self._put((Frame(kind=Kind.COMMIT, step=step, commit=commit), ()))

    @staticmethod
    def _tell(heard: Callable[[float], None], since: float, reply: Future[Reply]) -> None:
        if reply.exception() is None:
            heard(time.perf_counter() - since)

    def scale(self, step: int, coefficients: Mapping[str, float]) -> None:
        """Queues the answer to the norms."""
        self._put((Frame(kind=Kind.SCALE, step=step, commit=Commit(scale=dict(coefficients))), ()))

    # ---- requests of one call ----

    def pull(self, names: Iterable[str], destination: Destination, step: int = 0) -> Future[Reply]:
        """Asks for values, which go to their destinations.

        Args:
            names: of variables; none means every slice that the server holds.
        """
        reply = self._begin("pull", destination)
        self._request_values(names, step)
        return reply

    def checksums(self, names: Iterable[str], step: int = 0) -> Future[Reply]:
        """Asks for the checksums of variables, as :func:`~pserver.transport.arrays.checksum`
        has them.

        Args:
            names: of variables that the server holds.
        """
        reply = self._begin("checksums")
        parts = [Part(name=name) for name in names]
        self._put((Frame(kind=Kind.CHECKSUM, step=step, parts=parts), ()))
        return reply

    def changes(self, after: Mapping[str, int]) -> Future[Reply]:
        """Asks for what other trainers have changed of rows.

        Args:
            after: by table, the position since which.
        """
        reply = self._begin("changes")
        self._put((Frame(kind=Kind.CHECKSUM, commit=Commit(changes_after=after)), ()))
        return reply

    def load(
        self,
        values: NamedTensors,
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        anew: Iterable[str] = (),
    ) -> Future[Reply]:
        """Replaces variables, or rows of tables (arrays NAME@ids, NAME@values, NAME@state.KEY).

        Args:
            metadata: by table, what is known of it besides its rows.
            anew: slices whose optimizer states begin anew, unless some are among the values.
        """
        reply = self._begin("load")
        self._post(Kind.VALUE, 0, values)
        said = {name: json.dumps(known) for name, known in (metadata or {}).items()}
        self._put((Frame(kind=Kind.COMMIT, step=0, commit=Commit(metadata=said, absent=anew)), ()))
        return reply

    def lookup(
        self, ids: Mapping[str, torch.Tensor], destination: Destination, number: int = 0
    ) -> Future[Reply]:
        """Asks for rows of tables: values [n, dim], in the order of the ids.

        Args:
            ids: by table, int64 [n]; this server holds them.
            number: under which the server keeps the lookup, for :meth:`refresh`; 0: it does not.
        """
        reply = self._begin("lookup", destination)
        self._post_all(Kind.LOOKUP, 0, ids.items())
        self._request_values(ids, 0, number)
        return reply

    def refresh(
        self,
        number: int,
        names: Iterable[str],
        destination: Destination,
        after: Mapping[int, int],
    ) -> Future[Reply]:
        """Asks for those rows of a lookup that have changed since they were sent: arrays
        NAME@places, int64 [c], and NAME@rows, [c, dim], of tables of which some have.

        Args:
            number: of the lookup.
            names: of its tables.
            after: by lane, a step of this trainer, which may be on its way, that is applied before.
        """
        reply = self._begin("refresh", destination)
        parts = [Part(name=name) for name in names]
        self._put((Frame(kind=Kind.REFRESH, lookup=number, parts=parts, after=after), ()))
        return reply

    def scan(
        self,
        table: str,
        cursor: int,
        limit: int,
        destination: Destination,
        changed_since_save: bool = False,
        materialized: bool = False,
    ) -> Future[Reply]:
        """Asks for a chunk of a table: arrays NAME@ids, NAME@values, NAME@state.KEY, ...

        Args:
            cursor: 0, or that of the reply before.
            limit: of rows.
            changed_since_save: only rows that changed since :meth:`mark_saved`.
            materialized: rows as a lookup reads them.
        """
        return self._scan(
            Scan(
                table=table,
                cursor=cursor,
                limit=limit,
                changed_since_save=changed_since_save,
                materialized=materialized,
            ),
            destination,
        )

    def mark_saved(self, table: str) -> Future[Reply]:
        """Tells the server that all changes of a table until now have been saved."""
        return self._scan(Scan(table=table, mark_saved=True))

    # ---- frames ----

    def _scan(self, asked: Scan, destination: Destination = dropped) -> Future[Reply]:
        reply = self._begin("scan", destination)
        self._put((Frame(kind=Kind.SCAN, scan=asked), ()))
        return reply

    def _request_values(self, names: Iterable[str], step: int, lookup: int = 0) -> None:
        parts = [Part(name=name) for name in names]
        self._put((Frame(kind=Kind.PULL, step=step, lookup=lookup, parts=parts), ()))
