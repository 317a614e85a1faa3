"""Handwritten digits, 8 x 8 pixels, learned by a small convolutional network: one script, alone or
as a cluster's trainer.

    pserver launch --servers 2 --trainers 2 trainer/examples/digits.py     a cluster on this machine
    python trainer/examples/digits.py                                      this process alone
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pserver import fleet
from pserver.extras import extra
from trainer.examples import digits_program
from trainer.examples.display import Display

with extra("examples", "the handwritten digits need scikit-learn"):
    from sklearn.datasets import load_digits


def data(device: str) -> tuple[DataLoader[tuple[torch.Tensor, ...]], torch.Tensor, torch.Tensor]:
    """Batches of 1437 images and labels to learn from; the images and the labels of the other
    360.
    """
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, device=device)
    learn, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split(
        [1437, 360]
    )
    return (
        DataLoader(TensorDataset(images[learn], labels[learn]), batch_size=32, shuffle=True),
        images[test],
        labels[test],
    )


def train(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], epochs: int) -> None:
    """Trains by the ordinary loop; four calls of fleet make it a cluster's."""
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=2e-3))
    display = Display(epochs, fleet.transport())
    for _ in range(epochs):
        for images, labels in fleet.shard(loader, progress=display.live):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            display.step(loss, len(images))
        display.epoch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Learns handwritten digits, alone or as one trainer of a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--program", action="store_true", help="train a captured program: see digits_program.py"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    loader, images, labels = data(arguments.device)
    convolutions = [
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    model = nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(arguments.device)
    (digits_program.train if arguments.program else train)(model, loader, arguments.epochs)
    first = fleet.is_first_worker()
    fleet.finish()
    if first:
        print(f"accuracy {(model(images).argmax(1) == labels).float().mean().item():.4f}")
