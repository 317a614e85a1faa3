"""Asks a job's servers for its progress, again and again: ``launch`` runs it as a process, because
it imports gRPC and torch, and ``launch`` does not; its waits do not delay ``launch``.

::

    python -m pserver.launcher.watch TOKEN KEYS

TOKEN is the path of the job's token file, KEYS the folder of this host's keys, each or "".  The
servers' endpoints are a line on standard input: its imports take seconds, which it spends while the
servers start.  It prints a line of JSON about once a second: the fields ``SHOWN`` of a
:class:`~pserver.telemetry.job_view.JobState`.  It ends when ``launch`` ends it, or when its reader
is gone.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

from pserver.control.collector import Collector
from pserver.security.access import Access
from pserver.telemetry.job_view import JobState, JobView, Sample, jsonable

SHOWN = ("servers", "trainers", "progress", "headline", "notices")


def line(state: JobState) -> str:
    """The part of a job's state that the panel shows, as a line of JSON."""
    return json.dumps({name: jsonable(getattr(state, name)) for name in SHOWN})


def watch(access: Access, endpoints: Sequence[str]) -> None:
    """Prints the job's state until its reader is gone."""
    view, gone = JobView(endpoints), threading.Event()

    def show(sample: Sample) -> None:
        try:
            print(line(view.add(sample)), flush=True)
        except BrokenPipeError:
            gone.set()

    with Collector(endpoints, show, lambda _: access):
        gone.wait()


if __name__ == "__main__":
    if asked := sys.stdin.readline().strip():
        watch(
            Access.of(sys.argv[1], sys.argv[2], "operator", "trainer", "server"), asked.split(",")
        )
