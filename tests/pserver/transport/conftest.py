"""Each transport in turn, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pserver.transport.registry import TRANSPORTS, Transport
from tests.support.cluster_keys import SecuredTransport
from tests.support.streams import SECONDS, CheckedTransport

KINDS = [*TRANSPORTS, "tcp with keys", "grpc with keys", "tcp checksum on", "grpc checksum off"]


@pytest.fixture(params=KINDS)
def transport(request: pytest.FixtureRequest) -> Transport:
    """Each transport in turn."""
    name, *how = request.param.split()
    if "keys" in how:
        return SecuredTransport(TRANSPORTS[name])
    return CheckedTransport(TRANSPORTS[name], how[-1]) if how else TRANSPORTS[name]


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """After every test all of its threads are gone."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + SECONDS
    for thread in set(threading.enumerate()) - before:
        # a thread of C++'s pool that has run Python once
        if isinstance(thread, threading._DummyThread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} still runs"
