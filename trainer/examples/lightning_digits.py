"""Handwritten digits under Lightning's Trainer: one script, alone or as a cluster's trainer.

    pserver launch --servers 2 --trainers 2 trainer/examples/lightning_digits.py
    python trainer/examples/lightning_digits.py

Three lines are ours: fleet.init(), the strategy, and fleet.finish().
"""

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from pserver import fleet
from trainer.examples.digits import data
from trainer.lightning import PServerStrategy


class Digits(LightningModule):
    """A small convolutional network and its training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, batch_size=len(images), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Learns handwritten digits under Lightning, alone or in a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu, ...")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    loader, images, labels = data("cpu")
    trainer = Trainer(
        strategy=PServerStrategy(),
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs,
        gradient_clip_val=5.0,
        callbacks=[EarlyStopping("accuracy", mode="max", patience=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    test = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), batch_size=90
    )
    trainer.fit(Digits(), loader, test)
    first = fleet.is_first_worker()
    fleet.finish()
    if first:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
