"""The calls of a connection that are grouped by what they are about."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pserver.client.lease_calls import LeaseCalls
from pserver.client.save_calls import SaveCalls
from pserver.client.trace_calls import TraceCalls
from pserver.control.control_client import ControlClient
from pserver.wire_pb2 import JoinReply


class GroupedCalls(ABC):
    """A part of a :class:`~pserver.client.client.Client`."""

    _control: ControlClient
    _reply: JoinReply

    @abstractmethod
    def check(self) -> None:
        """Raises what ended the connection, if something did."""

    @property
    def store(self) -> str:
        """The directory, or the URL, below which the server keeps files; "": it keeps none."""
        return self._reply.store

    @property
    def saves(self) -> SaveCalls:
        """The calls that have the server write what it holds."""
        return SaveCalls(self._control, self._reply.session)

    @property
    def leases(self) -> LeaseCalls:
        """The calls about who trains on which samples; server 0 answers them."""
        return LeaseCalls(self._control, self._reply.session, self.check)

    @property
    def tracing(self) -> TraceCalls:
        """The calls that belong to a trace."""
        return TraceCalls(self._control, self._reply.session, str(self))
