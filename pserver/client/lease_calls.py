"""A trainer's calls to server 0 about who trains on which samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pserver.control.control_client import ControlClient
from pserver.leases.epoch import Lease
from pserver.leases.lease_table import EpochRange, LeaseAsked
from pserver.wire_pb2 import LeaseEnd, LeaseEpoch, LeaseRange, LeaseReply, LeaseRequest


class LeaseCalls:
    """The calls of one trainer.  Any thread may make them, one at a time.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        asked: the answer to a call that is given the session of this trainer.
        check: raises what has ended the job.
    """

    def __init__(
        self,
        control: ControlClient,
        asked: Callable[[Callable[[str], LeaseReply]], LeaseReply],
        check: Callable[[], None],
    ) -> None:
        self._control, self._asked, self._check = control, asked, check

    def ask(self, asked: LeaseAsked) -> Lease:
        """One request; where there is nothing now, it waits a second at most."""
        request = LeaseRequest(
            number=asked.number,
            most=asked.most,
            unstepped=asked.unstepped,
            unused=_messages(asked.unused),
            skipped=_messages(asked.skipped),
            stopped=asked.stopped,
            ended=[LeaseEnd(epoch=n, segment=s, length=length) for n, s, length in asked.ended],
        )
        if asked.epoch is not None:
            request.epoch.CopyFrom(LeaseEpoch(**asked.epoch.plain()))
        reply = self._call(request)
        ranges = tuple((each.start, each.stop) for each in reply.ranges)
        return Lease(ranges, reply.batches, reply.over, reply.left, reply.stripes)

    def kept(self) -> str:
        """What a checkpoint is to keep."""
        return self._call(LeaseRequest()).table

    def restore(self, kept: str) -> None:
        """Goes on where a checkpoint was, if nobody has asked for a lease yet."""
        self._call(LeaseRequest(restored=kept))

    def _call(self, request: LeaseRequest) -> LeaseReply:
        def ask(session: str) -> LeaseReply:
            request.session = session
            return self._control.lease(request, meanwhile=self._check)

        return self._asked(ask)


def _messages(ranges: Iterable[EpochRange]) -> list[LeaseRange]:
    return [LeaseRange(epoch=n, start=start, stop=stop) for n, start, stop in ranges]
