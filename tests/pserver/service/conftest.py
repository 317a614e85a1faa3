"""A stranger over each transport; whatever it does, the next job is fine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stranger import Servers, Stranger, good_job


@pytest.fixture(params=["tcp", "grpc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PSERVER_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def stranger(servers: Servers, transport: str) -> Iterator[Stranger]:
    one = Stranger(servers(1), transport)
    yield one
    one.leave()
    good_job(servers(1))
