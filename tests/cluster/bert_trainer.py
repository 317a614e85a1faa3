"""A trainer under transformers: what it trains, and ``main``, which fine-tunes it and writes what
came out.

``pserver launch`` starts it, and tests train the same in their own process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    TrainingArguments,
)

from trainer import DistributedEmbedding, fleet
from trainer.huggingface import PServerTrainer

ACCUMULATED, RATE, WARM_UP = 2, 1e-3, 3
EPOCHS, BEST = 6, 8  # the metric is best after 8 of 12 steps


def bert() -> Any:
    """Of random weights, and without dropout, whose masks a reference would have to draw alike."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def samples(count: int = 26) -> list[dict[str, Any]]:
    ids = torch.randint(0, 40, (count, 6), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    more = {
        "output_dir": str(folder),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": RATE,
        "warmup_steps": WARM_UP,
        "gradient_accumulation_steps": ACCUMULATED,
        "train_sampling_strategy": "sequential",
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | more
    return TrainingArguments(**more)


def main(folder: Path, resumes: bool) -> None:
    """Fine-tunes, and writes what came out: the parameters, and what each trainer has seen."""
    fleet.init()
    number = fleet.worker_index()
    trainer = PServerTrainer(
        bert(),
        arguments(
            folder,
            num_train_epochs=EPOCHS,
            eval_strategy="epoch",
            save_strategy="epoch",
            metric_for_best_model="odd",
            load_best_model_at_end=True,
        ),
        train_dataset=samples(),
        eval_dataset=samples(8),
        # trainer 1's own metric always grows: trainer 0's decides, for both
        compute_metrics=lambda _: {"odd": min(trainer.state.global_step, (BEST, 99)[number])},
        callbacks=[EarlyStoppingCallback(1)],
    )
    trainer.train(resume_from_checkpoint=resumes)
    trainer.save_model(str(folder / "fine-tuned"))
    said = {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "rates": [line["learning_rate"] for line in trainer.state.log_history if "loss" in line],
    }
    state = {name: value.clone() for name, value in nn.Module.state_dict(trainer.model).items()}
    fleet.finish()
    torch.save(state, folder / f"state of {number}.pt")
    (folder / f"said by {number}.json").write_text(json.dumps(said))


def with_table(folder: Path, depth: int) -> None:
    """Trains a model with a table, whose rows are looked up ahead, and writes its values."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth}
    fleet.init(strategy=strategy)
    number, model = fleet.worker_index(), bert()
    model.bert.embeddings.word_embeddings = DistributedEmbedding(16, name="words")
    trainer = PServerTrainer(
        model,
        arguments(folder, train_sampling_strategy="random"),
        train_dataset=samples(52),
        optimizers=(torch.optim.Adagrad(model.parameters(), lr=0.05), None),
    )
    trainer.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    counts = fleet.metrics()
    fleet.finish()
    torch.save(state, folder / f"state of {number}.pt")
    (folder / f"said by {number}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    if sys.argv[2:3] == ["ahead"]:
        with_table(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), "resume" in sys.argv[2:])
