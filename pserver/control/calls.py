"""The control calls by their names, and what answers them."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import Message

from pserver import wire_pb2 as wire

CALLS: dict[str, tuple[str, type[Message], type[Message]]] = {
    "Join": ("join", wire.JoinRequest, wire.JoinReply),
    "Install": ("install", wire.InstallRequest, wire.InstallReply),
    "Heartbeat": ("heartbeat", wire.HeartbeatRequest, wire.HeartbeatReply),
    "Announce": ("announce", wire.AnnounceRequest, wire.AnnounceReply),
    "Finish": ("finish", wire.FinishRequest, wire.FinishReply),
    "Leave": ("leave", wire.LeaveRequest, wire.LeaveReply),
    "Barrier": ("barrier", wire.BarrierRequest, wire.BarrierReply),
    "Rendezvous": ("rendezvous", wire.RendezvousRequest, wire.RendezvousReply),
    "Save": ("save", wire.SaveRequest, wire.SaveReply),
    "Load": ("load", wire.LoadRequest, wire.LoadReply),
    "Shrink": ("shrink", wire.ShrinkRequest, wire.ShrinkReply),
    "Status": ("status", wire.StatusRequest, wire.StatusReply),
    "Drain": ("drain", wire.DrainRequest, wire.DrainReply),
    "Observe": ("observe", wire.ObserveRequest, wire.ObserveReply),
    "Reset": ("reset", wire.ResetRequest, wire.ResetReply),
}


class Controlled(Protocol):
    """The object that answers control calls, with one method for each: a job, or a test's double.

    Each method may be called from any thread, and raises PServerError or ValueError.
    """

    def join(self, request: wire.JoinRequest, /) -> wire.JoinReply: ...
    def install(self, request: wire.InstallRequest, /) -> wire.InstallReply: ...
    def heartbeat(self, request: wire.HeartbeatRequest, /) -> wire.HeartbeatReply: ...
    def announce(self, request: wire.AnnounceRequest, /) -> wire.AnnounceReply: ...
    def finish(self, request: wire.FinishRequest, /) -> wire.FinishReply: ...
    def leave(self, request: wire.LeaveRequest, /) -> wire.LeaveReply: ...
    def barrier(self, request: wire.BarrierRequest, /) -> wire.BarrierReply: ...
    def rendezvous(self, request: wire.RendezvousRequest, /) -> wire.RendezvousReply: ...
    def save(self, request: wire.SaveRequest, /) -> wire.SaveReply: ...
    def load(self, request: wire.LoadRequest, /) -> wire.LoadReply: ...
    def shrink(self, request: wire.ShrinkRequest, /) -> wire.ShrinkReply: ...
    def status(self, request: wire.StatusRequest, /) -> wire.StatusReply: ...
    def drain(self, request: wire.DrainRequest, /) -> wire.DrainReply: ...
    def observe(self, request: wire.ObserveRequest, /) -> wire.ObserveReply: ...
    def reset(self, request: wire.ResetRequest, /) -> wire.ResetReply: ...
