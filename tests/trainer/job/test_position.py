"""Promises of the position of a job's scripts: every checkpoint has it, and each reader takes its
own part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from pserver.checkpoint import manifest
from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.storage.place import place_at
from tests.support.threaded_scripts import Script
from tests.support.threads import at_once
from trainer import fleet
from trainer.job import save_load
from trainer.job.position import Position
from trainer.job.random_states import random_states
from trainer.samplers.pass_log import NOTHING

STEPS = 2


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "trainer 0"])
@pytest.mark.parametrize("automatic", [True, False], ids=["by the job", "by the script"])
def test_every_checkpoint_has_the_position(automatic: bool, parts: bool, tmp_path: Path) -> None:
    """Of each trainer its pass and its random sources; of the job the schedulers and the leases:
    whoever asks for the save, and whoever writes the files.
    """

    def trained(number: int) -> None:
        script = Script([server], number, checkpoint=str(tmp_path) if automatic else "")
        scheduler = StepLR(script.optimizer, 1)
        batches = iter(script.shard())
        next(batches)
        for _ in range(STEPS):
            script.step()
            scheduler.step()
            next(batches)  # the job saves before it
            script.saves.finish()
        if not automatic:
            save_load._save(script.job, str(tmp_path / f"step-{STEPS:06d}"), None, False)
        script.finish()

    config = ServerConfig(keep_failed_seconds=0.0, store=str(tmp_path) if parts else None)
    with Server(config) as server:
        at_once(lambda: trained(0), lambda: trained(1))
    newest = max(tmp_path.glob("step-*"))
    steps = int(newest.name.removeprefix("step-"))
    position = Position.from_meta(manifest.read(place_at(str(newest))).meta)

    assert steps and position.of == 2 and position.drawn == 1 and '"epochs"' in position.leases
    assert position.schedulers["0 StepLR"]["mapping"] and set(position.trainers) == {0, 1}
    for trainer in (0, 1):
        (under_way,) = position.passes(trainer, 2).under_way
        assert (under_way.loader, under_way.number, under_way.trained) == ("samples", 1, steps)
        assert set(position.random(trainer) or ()) == set(random_states())


OWN: Any = {"passes": NOTHING.plain(), "random": {"torch": ""}}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"step": 3}, Position()),  # of `pserver save`
        ({"passes": 2}, Position(2)),
        ({"passes": 2, "place": {"leases": "{}"}}, Position(2, leases="{}")),
        (
            {"passes": 2, "place": {"drawn": 2, "schedulers": {}, "trainers": [[1, OWN]]}},
            Position(2, trainers={1: OWN}),
        ),
    ],
    ids=["another command", "a count", "leases", "an automatic one"],
)
def test_checkpoints_of_earlier_versions_have_less(
    meta: dict[str, Any], expected: Position
) -> None:
    """A missing part reads as an empty one."""
    found = Position.from_meta(meta)

    assert found == expected
    assert found.passes(0, 2) == NOTHING and found.random(0) is None
    assert Position.from_meta(found.meta()) == found


def test_a_load_of_the_script_takes_no_random_numbers_and_no_schedulers(tmp_path: Path) -> None:
    """It knows its own place."""
    fleet.init()
    model = fleet.distributed_model(nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = StepLR(optimizer, 5)
    fleet.save(str(tmp_path / "saved"))
    for _ in fleet.shard(DataLoader(torch.arange(4), 2)):  # type: ignore[arg-type]  # it has a length
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        scheduler.step()
    before = random_states()
    try:
        assert fleet.load(str(tmp_path / "saved")) == 0
        assert random_states() == before and scheduler.last_epoch == 2
    finally:
        fleet.finish()
