"""Calls of trainers about one another: barriers, agreements, samples, where the script is."""

from __future__ import annotations

from pserver import wire_pb2 as wire
from pserver.job.job_identity import check_names
from pserver.job.reloading import Reloading


class JointCalls(Reloading):
    """The part of a :class:`~pserver.job.job.Job` that answers Barrier, Rendezvous, Lease and
    Position.  Any thread may call it.
    """

    def barrier(self, request: wire.BarrierRequest) -> wire.BarrierReply:
        """Waits up to a second until every trainer that has not left has reached the barrier."""
        check_names([request.name], self.config.limits)
        return self.installed().barriers.come(self.member(request.session), request)

    def rendezvous(self, request: wire.RendezvousRequest) -> wire.RendezvousReply:
        """The address at which trainers meet: trainer 0 gives it, the others ask.  With a topic,
        what the first trainer said about it.
        """
        installed, member = self.installed(), self.member(request.session)
        if request.topic:
            check_names([request.topic], self.config.limits)
            with self.condition:
                said = installed.topics.agree(request.topic, request.address, member.trainer)
            return wire.RendezvousReply(address=said)
        return wire.RendezvousReply(address=installed.rendezvous(member, request.address))

    def lease(self, request: wire.LeaseRequest) -> wire.LeaseReply:
        """Gives a trainer samples to train on, and takes back what it does not train on."""
        check_names([request.epoch.loader, request.epoch.seed], self.config.limits)
        return self.installed().leases.lease(self.member(request.session), request)

    def position(self, request: wire.PositionRequest) -> wire.PositionReply:
        """Tells a trainer that has joined late where the script is; takes that from another one."""
        return self.installed().position.position(self.member(request.session), request)
