"""transformers' Trainer on two trainers and two servers, as real processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.eager_jobs import Servers, assert_same
from tests.support.launched import EXAMPLES, accuracy, launched
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.job import Job
from trainer.samplers.shard import shard
from transpiler import ClipGradByGlobalNorm

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.cluster.bert_trainer import (  # noqa: E402
    ACCUMULATED,
    BEST,
    EPOCHS,
    WARM_UP,
    arguments,
    bert,
    samples,
)

SCRIPT = Path(__file__).with_name("bert_trainer.py")
pytestmark = pytest.mark.processes


def plain_fleet(endpoints: str, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """The same training by a plain script of fleet's, on two trainers: trainer 0's parameters."""
    roles = [
        fleet.UserDefinedRoleMaker(i, worker_num=2, server_endpoints=endpoints.split(","))
        for i in range(2)
    ]
    jobs, models = [Job(role, None) for role in roles], [bert().train() for _ in range(2)]
    collate = transformers.default_data_collator
    given = [transformers.Trainer(model, arguments(folder)).create_optimizer() for model in models]

    def play(number: int) -> None:
        job, model = jobs[number], models[number]
        job.models.append(model)
        optimizer = job.join(given[number], grad_clip=ClipGradByGlobalNorm(1.0))
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARM_UP, 2 * EPOCHS)
        loader: Any = DataLoader(samples(), batch_size=4, collate_fn=collate)
        batches: Any = shard(loader, 2, number, None, job.passes)
        while optimizer.steps < steps:
            for count, batch in enumerate(batches, 1):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**batch).loss
                loss.backward()
                if count % ACCUMULATED == 0:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        optimizer.finish()

    at_once(*(partial(play, number) for number in range(2)))
    return dict(models[0].state_dict())


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """A job of transformers': what its trainers have said."""
    launched(folder, "2 x 2", str(SCRIPT), str(folder / "out"), *words)
    return [json.loads((folder / "out" / f"said by {i}.json").read_text()) for i in range(2)]


@pytest.mark.long  # tests/trainer/test_huggingface.py stands for it
def test_two_trainers_fine_tune_what_a_plain_script_does(servers: Servers, tmp_path: Path) -> None:
    """With bf16, a warm-up, accumulation and clipping, to the bit; they stop early together, go
    back to the best checkpoint, and ``from_pretrained`` reads what trainer 0 wrote.
    """
    said = run(tmp_path)
    out = tmp_path / "out"

    assert said[0] == said[1]
    assert said[0]["steps"] == BEST + 2 and said[0]["best"].endswith(f"checkpoint-{BEST}")
    assert sorted(each.name for each in out.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (10, 2, 4, 6, 8)
    ]
    states = [torch.load(out / f"state of {number}.pt") for number in range(2)]
    assert_same(states[0], states[1])
    assert_same(states[0], plain_fleet(servers(2), tmp_path, BEST))
    loaded = transformers.BertForSequenceClassification.from_pretrained(out / "fine-tuned")
    assert_same(dict(loaded.state_dict()), states[0])


@pytest.mark.long  # tests/trainer/test_huggingface.py stands for it
def test_rows_are_looked_up_ahead_on_two_trainers(tmp_path: Path) -> None:
    """Each of its own part of the samples, in random order: to the bit as without."""
    states = []
    for depth in (0, 2):
        out = tmp_path / str(depth)
        out.mkdir()
        launched(tmp_path, "2 x 2", str(SCRIPT), str(out), "ahead", str(depth))
        states += [torch.load(out / f"state of {number}.pt") for number in range(2)]
    counts = [json.loads((out / f"said by {number}.json").read_text()) for number in range(2)]

    for each in states[1:]:
        assert_same(each, states[0])
    assert all(each["rows_ahead"] > each["rows_looked_up"] for each in counts)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_learns_what_is_praised(tmp_path: Path) -> None:
    """At least 95 % of the sentences, on a cluster."""
    log = launched(tmp_path, "2 x 2", str(EXAMPLES / "transformers_bert.py")).log

    assert accuracy(log) >= 0.95
