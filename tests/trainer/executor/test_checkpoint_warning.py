"""A program whose environment asks for checkpoints says that it writes none."""

from __future__ import annotations

import logging

import pytest

from tests.support.collective_trainers import NCCL2, Trainer, batches, ports


def test_a_program_says_that_it_does_not_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the folder that stays empty."""
    monkeypatch.setenv("PSERVER_CHECKPOINT", "/nowhere/saved")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Trainer(ports(1), 0, NCCL2).train(batches(1)[0])
    said = [record.message for record in caplog.records if "PSERVER_CHECKPOINT" in record.message]

    assert said == [
        "PSERVER_CHECKPOINT: programs do not save to /nowhere/saved by themselves: call "
        "Executor.save"
    ]
