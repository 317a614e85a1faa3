"""transformers' Trainer, which clips by default, on both trainers of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.seeded import seeded
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once

Servers = Callable[[int], str]
STEPS = 3


@pytest.mark.parametrize("clips", [True, False])
def test_transformers_trainer_is_told_that_it_clips_before_the_mean(
    servers: Servers, caplog: pytest.LogCaptureFixture, tmp_path: Path, clips: bool
) -> None:
    """Its default ``max_grad_norm`` gives the warning, and 0, which turns clipping off, none."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {} if clips else {"max_grad_norm": 0.0}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    endpoints = servers(1)
    jobs = [Trainer(endpoints, number, 2, model(transformers), adam) for number in range(2)]
    ids = torch.arange(8 * STEPS).reshape(-1, 4) % 23

    trainers = [  # one after the other: accelerate's state is the process's
        transformers.Trainer(
            model=each.model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids[number::2]],
            optimizers=(each.optimizer, None),
        )
        for number, each in enumerate(jobs)
    ]
    with caplog.at_level(logging.WARNING):
        at_once(*(each.train for each in trainers))
    for each in jobs:
        each.optimizer.close()
    said = [r.getMessage() for r in caplog.records if r.name.endswith("gradient_changes")]
    assert len(said) == clips and all("pass grad_clip=" in text for text in said)
    for one, other in zip(jobs[0].model.parameters(), jobs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert jobs[0].optimizer.steps == STEPS


def model(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=23, n_positions=4)
    with seeded(0):
        made: nn.Module = transformers.GPT2LMHeadModel(config)
        return made


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3)
