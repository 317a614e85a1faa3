"""Asks a job's servers for its progress, again and again: ``launch`` runs it as a process, because
it imports gRPC and torch, and ``launch`` does not; its waits do not delay ``launch``.

::

    python -m pserver.launcher.watch TOKEN KEYS

TOKEN is the path of the job's token file, KEYS the folder of this host's keys, each or "".  The
servers' endpoints are a line on standard input: its imports take seconds, which it spends while the
servers start.  It prints a line of JSON about once a second: a list with each server's answer, in
order.  It ends when ``launch`` ends it, or when its reader is gone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from pserver import timeouts
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access
from pserver.wire_pb2 import StatusReply, TrainerStatus

EVERY_SECONDS = 1.0
NO_ANSWER = {"state": "", "version": 0, "trainers": []}


def panel_answer(reply: StatusReply) -> dict[str, Any]:
    """The part of a server's answer that the panel needs."""
    trainers = [_trainer(each) for each in reply.trainers]
    return {"state": reply.state, "version": reply.version, "trainers": trainers}


def _trainer(trainer: TrainerStatus) -> dict[str, Any]:
    report = trainer.report
    return {
        "trainer_id": trainer.trainer_id,
        "state": trainer.state,
        "step": trainer.step,
        "activity": trainer.activity,
        "report": {
            "samples": report.samples,
            # JSON has neither NaN nor infinities: as texts
            "values": {name: str(value) for name, value in report.values.items()},
            "passes": report.passes,
            "batch": report.batch,
            "batches": report.batches,
        },
    }


def watch(access: Access, endpoints: Sequence[str]) -> None:
    """Prints the servers' states until its reader is gone."""
    clients = [ControlClient(each, timeouts.WATCH_SECONDS, access=access) for each in endpoints]
    with ThreadPoolExecutor(min(16, len(clients))) as threads:
        while True:
            began = time.monotonic()
            print(json.dumps(list(threads.map(_ask, clients))), flush=True)
            time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - began)))


def _ask(client: ControlClient) -> dict[str, Any]:
    try:
        return panel_answer(client.status())
    except PServerError:
        return NO_ANSWER


if __name__ == "__main__":
    if line := sys.stdin.readline().strip():
        access = Access.of(sys.argv[1], sys.argv[2], "operator", "trainer", "server")
        with suppress(BrokenPipeError):
            watch(access, line.split(","))
