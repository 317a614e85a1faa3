"""``pserver launch --trace`` with real servers and trainers, of which one is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import launched
from tests.support.sources import ROOT
from tests.support.traces import Traced, end

pytestmark = pytest.mark.processes

DELAY = 0.3  # seconds, of trainer 1's first gradient in each step
SCRIPT = f"""
import sys

import torch

sys.path.append({str(ROOT)!r})
from tests.faults import faults
from pserver.wire_pb2 import Kind
from trainer import fleet

faults.DELAY_SECONDS = {DELAY}
points = [
    faults.Point("delay", "out", Kind.GRADIENT, step, trainer=1) for step in (3, 4, 5)
]
fleet.init()
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Linear(64, 64))
with faults.injected(faults.Injector(points)):
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(7):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.finish()
"""


def test_a_slow_trainer_shows_as_the_others_wait(tmp_path: Path) -> None:
    """All four processes are in the file, each update lies behind all pushes, within the bound;
    what trainer 1 is late, trainer 0 waits for.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    said = launched(tmp_path, "2 x 2", "--trace", "t.json", "script.py")
    found = Traced(tmp_path / "t.json")

    assert set(found.about["processes"]) == {"trainer 0", "trainer 1", "server 0", "server 1"}
    assert found.about["missing"] == {} and "steps 3, processes 4, spans " in said.output
    for server in (0, 1):
        for step in (3, 4, 5):
            (update,) = found.of(f"server {server}", "update", version=step)
            for trainer in (0, 1):
                (push,) = found.of(f"trainer {trainer}", "push", server=server, step=step)
                (wait,) = found.of(f"trainer {trainer}", "wait", server=server, step=step)
                assert end(push) <= update["ts"] + found.bound
                assert update["ts"] <= end(wait) + found.bound
            assert push["dur"] >= DELAY * 1e6
            (waited,) = found.of(f"server {server}", "wait", trainer=0, step=step)
            (received,) = found.of(f"server {server}", "receive", trainer=1, step=step)
            assert end(waited) >= end(received)
        first, second = (
            sum(span["dur"] for span in found.of(f"server {server}", "wait", trainer=trainer))
            for trainer in (0, 1)
        )
        assert first > DELAY * 1e6 > second
