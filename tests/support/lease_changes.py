"""Changes of a lease table, as server 0 writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pserver.client.client import LeaseCalls
from pserver.job_log.records import write_consumed
from pserver.job_log_pb2 import (
    LeaseAdmission,
    LeaseAnswer,
    LeaseChange,
    LeaseJoin,
    OwnEntry,
    Process,
    ProcessSamples,
)
from pserver.leases.table import LeaseAsked
from pserver.wire_pb2 import LeaseReply, LeaseRequest


def entry_of(name: str, trainer: int, *arguments: Any) -> OwnEntry:
    """The entry of a call of the table's method of this name, as a file has it."""
    change, process = LeaseChange(), Process(trainer=trainer)
    if name in ("join", "lease", "decided", "remove"):
        process.incarnation, *arguments = arguments  # type: ignore[assignment]
    match name:
        case "join":
            change.join.CopyFrom(LeaseJoin(process=process, again=arguments[0]))
        case "lease":
            change.lease.CopyFrom(LeaseAnswer(process=process, request=request_of(arguments[0])))
        case "decided":
            change.decided.CopyFrom(ProcessSamples(process=process))
            write_consumed(change.decided.consumed, arguments[0])
        case "remove":
            change.remove.CopyFrom(process)
        case "expect":
            change.expect.CopyFrom(LeaseAdmission(trainer=trainer))
            for each, ranges in arguments[0].items():
                write_consumed(change.expect.consumed[each], ranges)
        case "give_up":
            change.give_up = trainer
        case "wait_for":
            change.wait_for = trainer
    return OwnEntry.FromString(OwnEntry(lease=change).SerializeToString())


def request_of(asked: LeaseAsked) -> LeaseRequest:
    """A trainer's request, as it travels."""
    sent: list[LeaseRequest] = []

    def lease(request: LeaseRequest, meanwhile: object) -> LeaseReply:
        sent.append(request)
        return LeaseReply()

    control: Any = SimpleNamespace(lease=lease)
    LeaseCalls(control, lambda ask: ask(""), lambda: None).ask(asked)
    return sent[0]
