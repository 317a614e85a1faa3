"""Bits that a network changes, with checksums: each is noticed, and the job's result is what it is
without.
"""

from __future__ import annotations

import pytest
import torch

from pserver.client import stream
from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.faults.network_path import Flips, NetworkPath
from tests.support.one_parameter import Trainer

ADDRESS = "127.0.0.2"


@pytest.mark.parametrize(
    ("flips", "connections"),
    [
        (40, 1),
        (40, 3),
        (200, 1),
        pytest.param(1000, 1, marks=pytest.mark.matrix),
    ],
)
def test_every_changed_bit_is_noticed(
    monkeypatch: pytest.MonkeyPatch, flips: int, connections: int
) -> None:
    """In greetings, prefixes, headers, payloads and checksums; requests are sent again, and each
    step is applied once.
    """
    monkeypatch.setattr(stream, "RETRY_SECONDS", 0.001)
    config = ServerConfig(transport="auto", checksum="on", connections=connections)
    with Server(config) as server:
        ports = [server.job.transports[name] for name in ("tcp", "grpc")]
        with NetworkPath(ADDRESS, ports) as path:
            trainer = Trainer(f"{ADDRESS}:{ports[1]}", transports=("tcp",))
            path.flips = Flips(ports[0], every=100_000)
            path.reset()
            step, expected = 0, torch.ones(1000)
            while path.flips.count < flips:
                step += 1
                gradient = float(torch.rand(()))
                trainer.step(step, gradient)
                expected -= 0.5 * torch.full((1000,), gradient)
                assert torch.equal(trainer.value, expected), f"step {step}"
            assert trainer.channel.reconnects >= flips * 0.9
            trainer.client.leave()
        assert server.job.failure is None
