"""A trainer under Lightning: what it trains, and ``main``, which fits it and writes what came out.

``pserver launch`` starts it, and tests train the same in their own process.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from trainer import fleet
from trainer.lightning import PServerStrategy

CLIP, ACCUMULATED = 0.3, 2


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loader(shuffle: bool = True) -> DataLoader[Any]:
    x = torch.randn(42, 6, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    generator = torch.Generator().manual_seed(5)
    return DataLoader(data, batch_size=4, shuffle=shuffle, generator=generator)


def adam(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Module(LightningModule):
    """A small regression, with a scheduler that steps once an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.seen = SumMetric()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)
        self.seen(len(batch[0]))
        self.log("seen", self.seen)
        self.log("own", torch.tensor(float(self.current_epoch * (1 - self.global_rank))))

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = adam(self)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def made(folder: Path, epochs: int, **more: Any) -> Trainer:
    """A Trainer that says little."""
    more = {
        "strategy": PServerStrategy(),
        "max_epochs": epochs,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    } | more
    return Trainer(**more)


def main(folder: Path, epochs: int, checkpoint: str) -> None:
    """Fits, validates, and writes what came out: the parameters, and what each trainer has seen."""
    fleet.init()
    folder.mkdir(exist_ok=True, parents=True)
    number = fleet.worker_index()
    saving = ModelCheckpoint(folder / f"files of {number}", monitor="val", save_top_k=-1)
    # trainer 1's own value never grows: it stops after three epochs, and trainer 0 with it
    stopping = EarlyStopping("own", mode="max", patience=2, min_delta=0.5)
    trainer = made(
        folder,
        epochs,
        logger=CSVLogger(folder / f"log of {number}"),
        enable_checkpointing=True,
        callbacks=[saving, stopping],
        gradient_clip_val=CLIP,
        accumulate_grad_batches=ACCUMULATED,
        log_every_n_steps=1,
    )
    module = Module()
    val = loader(shuffle=False)
    trainer.fit(module, loader(), val, ckpt_path=checkpoint or None)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    tested = trainer.validate(module, val, verbose=False)[0]
    said = {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "best": saving.best_model_path,
        "val": tested["val"],
        "seen": tested["seen"],
        "files": sorted(str(each.relative_to(folder)) for each in folder.rglob("*.c[ks]*")),
    }
    fleet.finish()
    torch.save(state, folder / f"state of {number}.pt")
    (folder / f"said by {number}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
