"""``pserver save --programs`` writes a file for each server, and servers go on with them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.operations.save import save_programs
from pserver.service.server import Server
from tests.support.eager_jobs import assert_same, joined
from trainer import DistributedEmbedding, fleet

DATA = [torch.arange(step, step + 12) % 17 for step in range(6)]


class Rows(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = DistributedEmbedding(4, num_embeddings=17)
        self.fc = nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


@contextmanager
def serving(folder: Path | None = None) -> Iterator[str]:
    """The endpoints of two servers: new ones, or with what others have left."""
    files = [None, None] if folder is None else [folder / f"server-{i}.program" for i in range(2)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(Server(ServerConfig(program=None if f is None else str(f))))
            for f in files
        ]
        yield ",".join(server.endpoint for server in started)
        with suppress(PServerError):  # of a job that has failed
            fleet.finish()


def job(endpoints: str, seed: int) -> tuple[nn.Module, Any]:
    model = Rows(seed)
    return model, joined(endpoints, model, torch.optim.Adam(model.parameters(), lr=0.01))


def train(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trains, and gives what the model then computes."""
    for ids in data:
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return {"out": model(torch.arange(17)), **dict(model.fc.state_dict())}


def saved(endpoints: str, folder: Path) -> str:
    out = io.StringIO()
    save_programs(endpoints.split(","), str(folder), Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize("state", ["running", "failed"])
def test_servers_go_on_with_what_they_held(tmp_path: Path, state: str) -> None:
    """Of a job that runs or has failed: its trainers' next steps are as without a break, rows,
    optimizer states and the step included, to the bit.
    """
    with serving() as endpoints:
        model, optimizer = job(endpoints, 3)
        train(model, optimizer, DATA[:3])
        if state == "failed":
            optimizer.close("the data are gone")
        said = saved(endpoints, tmp_path / "held")
        expected = train(model, optimizer, DATA[3:]) if state == "running" else {}
    assert f"saved step 3 of {endpoints.split(',')[1]}: " in said
    assert "not known to servers: the scheduler's state" in said
    if state == "failed":
        with serving() as endpoints:
            expected = train(*job(endpoints, 3), DATA)
    with serving(tmp_path / "held") as endpoints:
        model, optimizer = job(endpoints, 8)
        assert fleet.metrics()["steps"] == 3
        assert_same(train(model, optimizer, DATA[3:]), expected)


def test_a_url_is_refused() -> None:
    """Programs are local files."""
    with pytest.raises(ValueError, match="pserver save --programs"):
        save_programs(["127.0.0.1:1"], "s3://bucket/held", Console())
