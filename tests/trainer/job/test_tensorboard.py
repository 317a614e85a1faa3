"""``PSERVER_TENSORBOARD``: what scripts report, in files that TensorBoard reads."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from trainer import fleet


def test_reported_values_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, at the job's steps, in the trainer's own folder."""
    reason = "needs TensorBoard: pip install '.[tensorboard]'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TensorBoard imports
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator", reason=reason
        )
    monkeypatch.setenv("PSERVER_TENSORBOARD", str(tmp_path))
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.report(loss=2.0)
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        fleet.report(samples=8, loss=0.5**step, auc=0.75)
    fleet.finish()

    assert [each.name for each in tmp_path.iterdir()] == ["trainer-0"]
    events = accumulator.EventAccumulator(str(tmp_path / "trainer-0"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "auc"]
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 2.0), (1, 1.0), (2, 0.5), (3, 0.25)]
    assert [event.step for event in events.Scalars("auc")] == [1, 2, 3]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of the job, not at the first report; then there is no job."""
    monkeypatch.setenv("PSERVER_TENSORBOARD", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install '.\[tensorboard\]' .* \(.*tensorboard"):
        fleet.init()
    with pytest.raises(RuntimeError):
        fleet.report(loss=1.0)

    monkeypatch.setenv("PSERVER_TENSORBOARD", "s3://bucket/events")
    with pytest.raises(ValueError, match="PSERVER_TENSORBOARD: expected a path on this machine"):
        fleet.init()
