"""A table that outgrows its server's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from pserver.config import ServerConfig
from pserver.errors import PServerError, Refused
from pserver.service.server import Server
from tests.support.table_trainers import Net, sgd
from trainer import fleet


@pytest.fixture
def small() -> Iterator[Server]:
    with Server(ServerConfig(max_memory=5e-4)) as server:
        yield server
        with suppress(PServerError):  # the job has failed
            fleet.finish()


def test_the_step_that_does_not_fit_is_refused_whole(small: Server) -> None:
    """The error names the flag, and the rows before that step are still there."""
    model = Net()
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[small.endpoint])
    fleet.init(role)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(sgd(model))
    model.add(list(range(100)), 2.0)
    optimizer.step()
    model.add(list(range(6_000)), 1.0)  # 0.34 MB, so that as many again would not fit
    optimizer.step()
    model.add(list(range(6_000)), 1.0)  # but these rows are there
    optimizer.step()
    rows = fleet.table_status()["emb"]["rows"]

    optimizer.zero_grad()
    model.add(list(range(20_000, 30_000)), 1.0)
    with pytest.raises(Refused, match="table 'emb' for 0.6 MB: .*--max-memory"):
        optimizer.step()

    table = small.job.installed().tables["emb"]
    assert rows == len(table.rows) == 6_000
