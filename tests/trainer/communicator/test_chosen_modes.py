"""Which mode a strategy chooses, and whether a trainer waits for its servers."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.launcher.cluster import free_port
from pserver.service.server import Server
from tests.support.eager_jobs import Servers
from tests.support.eager_modes import adam, eventually, joined, net
from trainer import fleet


@pytest.mark.observes("a_sync", "a_sync_configs.modes")
def test_each_pattern_has_lanes_of_its_own_on_the_servers(servers: Servers) -> None:
    """The server's program says the mode of every slice's lane."""
    model = net()
    optimizer = joined(servers(1), model, adam(model), modes={"0.*": "sync", "*": "async"})
    plan = optimizer.communicator.plan

    modes = {each.name: plan.lane_of(each).mode for each in plan.placements}
    assert modes == {"0.weight": "sync", "0.bias": "sync", "2.weight": "async", "2.bias": "async"}
    fleet.finish()


@pytest.mark.observes("a_sync_configs.launch_barrier")
def test_a_trainer_waits_for_servers_that_come_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the barrier one that is silent for the heartbeat timeout ends the job."""
    monkeypatch.setenv("PSERVER_HEARTBEAT_TIMEOUT", "1")
    endpoint = f"127.0.0.1:{free_port()}"
    model = net()
    with pytest.raises(PServerError, match=endpoint):
        joined(endpoint, model, adam(model), launch_barrier=False)
    fleet.finish()

    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joined, endpoint, model, adam(model), launch_barrier=True)
        eventually(lambda: any("wait" in line and endpoint in line for line in caplog.messages))
        with Server(ServerConfig(endpoint=endpoint)):
            assert waiting.result(timeout=30).communicator is not None
            fleet.finish()
