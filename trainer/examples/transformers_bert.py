"""A small BERT of random weights learns to recognize praise, under transformers' Trainer: one
script, alone or as a cluster's trainer.  Nothing is downloaded.

    pserver launch --servers 2 --trainers 2 trainer/examples/transformers_bert.py
    python trainer/examples/transformers_bert.py
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

from pserver import fleet
from trainer.huggingface import PServerTrainer

WORDS = "[PAD] good fine great bad poor awful the a film book was".split()
GOOD, BAD, OTHER = 1, 4, 7  # where each kind of word begins


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of eight words, one of which judges."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(OTHER, len(WORDS), (count, 8), generator=generator)
    judges = torch.randint(GOOD, OTHER, (count,), generator=generator)
    rows[torch.arange(count), torch.randint(8, (count,), generator=generator)] = judges
    pairs = zip(rows, judges < BAD, strict=True)
    return [{"input_ids": row, "labels": int(label)} for row, label in pairs]


def accuracy(found: Any) -> dict[str, float]:
    """The part of the sentences that are classified right."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Trains a small BERT, alone or as one trainer of a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    depth: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4}
    trainer = PServerTrainer(
        BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **sizes, **depth)),
        TrainingArguments(
            tempfile.mkdtemp(),
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=32 // fleet.worker_num(),
            learning_rate=1e-3,
            warmup_steps=20,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=sentences(1024, seed=1),
        eval_dataset=sentences(256, seed=2),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    first = fleet.is_first_worker()
    fleet.finish()
    if first:
        print(f"accuracy {metrics['eval_accuracy']:.4f}")
