"""A trainer that leaves takes its threads with it: an interpreter that ends beside a thread in the
middle of a tensor ends by SIGABRT.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.service.server import Server
from tests.support.table_trainers import Trainer

MODES: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "async": {"send_queue_size": 2},
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 0.5}},
}
OURS = ("lane ", "_inbox", "_outbox")  # of lanes and streams, which hold tensors


def ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(OURS)}


@pytest.mark.parametrize("mode", MODES)
def test_no_thread_of_a_lane_outlives_it(mode: str) -> None:
    """Its server is gone, and messages may be on their way."""
    before = ours()
    with Server(ServerConfig(heartbeat_timeout_seconds=5.0)) as server:
        trainer = Trainer(server.endpoint, 0, 1, nn.Linear(4, 2), **MODES[mode])
        for _ in range(3):
            trainer.optimizer.zero_grad()
            trainer.model(torch.ones(1, 4)).sum().backward()
            trainer.optimizer.step()
        assert ours() > before
        server.stop()
        with suppress(PServerError):
            trainer.optimizer.close()
    assert ours() <= before
