"""Will this advertisement be clicked?  DeepFM, or Wide & Deep, with its embeddings on parameter
servers.

::

    # generated clicks: the best AUC is known
    pserver launch --servers 2 --trainers 2 trainer/examples/ctr.py
    # files in Criteo's format
    pserver launch --servers 2 --trainers 2 trainer/examples/ctr.py day_0.gz day_1.gz
    # this process alone
    python trainer/examples/ctr.py --model wide_deep
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

from pserver import DistributedEmbedding, Uniform, fleet
from trainer.examples.clicks import NUMBERS, SLOTS, Generated, squashed
from trainer.metrics import AUC
from trainer.metrics.metrics import area
from trainer.row_optimizers import Adagrad, Ftrl
from transpiler.strategy.fields import ASyncConfigs

FILES, TEST_FILES = 4, 12  # of generated clicks: each trainer's, and of all together
Dataset = fleet.InMemoryDataset | fleet.QueueDataset


class DeepFM(nn.Module):
    """Guo et al.: DeepFM, 2017: first-order weights, products of pairs of embeddings, and a deep
    network over them.
    """

    def __init__(self, dim: int, hidden: int, rate: float, linear_rate: float) -> None:
        super().__init__()
        self.embedding = DistributedEmbedding(
            dim, init=Uniform(-0.01, 0.01), optimizer=Adagrad(lr=rate), name="embedding"
        )
        self.first_order = DistributedEmbedding(
            1, init=Uniform(0, 0), optimizer=Adagrad(lr=linear_rate), name="first_order"
        )
        self.numbers = nn.Linear(NUMBERS, 1)
        self.deep = _network(SLOTS * dim + NUMBERS, hidden)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [batch, 13], int64 [batch, 26] -> logits [batch]."""
        numbers = squashed(numbers)
        rows = self.embedding(ids)  # [batch, 26, dim]
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
        first = self.first_order(ids).sum((1, 2)) + self.numbers(numbers).squeeze(1)
        deep = self.deep(torch.cat([rows.flatten(1), numbers], 1)).squeeze(1)
        logits: torch.Tensor = first + pairs + deep
        return logits


class WideDeep(nn.Module):
    """Cheng et al.: Wide & Deep, 2016: a linear model (by Ftrl, as there) beside a deep network
    over embeddings.
    """

    def __init__(self, dim: int, hidden: int, rate: float, linear_rate: float) -> None:
        super().__init__()
        self.wide = DistributedEmbedding(
            1, init=Uniform(0, 0), optimizer=Ftrl(lr=linear_rate), name="wide"
        )
        self.embedding = DistributedEmbedding(
            dim, init=Uniform(-0.01, 0.01), optimizer=Adagrad(lr=rate), name="embedding"
        )
        self.deep = _network(SLOTS * dim + NUMBERS, hidden)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [batch, 13], int64 [batch, 26] -> logits [batch]."""
        rows = self.embedding(ids).flatten(1)
        deep = self.deep(torch.cat([rows, squashed(numbers)], 1)).squeeze(1)
        logits: torch.Tensor = self.wide(ids).sum((1, 2)) + deep
        return logits


def _network(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
    )


class Progress:
    """Prints a line every ``every`` steps: samples, samples a second, and over these steps the loss
    and this trainer's AUC; rows, and the memory of them.
    """

    def __init__(self, every: int) -> None:
        self._every, self._samples, self._steps = every, 0, 0
        self._began = time.perf_counter()
        self._labels, self._logits = list[torch.Tensor](), list[torch.Tensor]()

    def step(self, label: torch.Tensor, logits: torch.Tensor) -> None:
        """Counts a batch of a step, and prints a line when it is due."""
        self._samples += len(label) * fleet.worker_num()
        self._steps += 1
        self._labels.append(label)
        self._logits.append(logits.detach())
        if self._steps % self._every == 0:
            labels, logits = torch.cat(self._labels), torch.cat(self._logits)
            self._labels, self._logits = [], []
            if fleet.is_first_worker():
                self._print(labels, logits)

    def _print(self, labels: torch.Tensor, logits: torch.Tensor) -> None:
        loss = F.binary_cross_entropy_with_logits(logits, labels).item()
        clicked = labels[logits.argsort(descending=True)]
        tables = fleet.table_status().values()
        rows, held = (sum(table[key] for table in tables) for key in ("rows", "bytes_held"))
        rate = self._samples / (time.perf_counter() - self._began)
        print(
            f"{self._samples:>10} samples  {rate:7.0f}/s  loss {loss:.4f}  auc "
            f"{area(clicked, 1 - clicked):.4f}  "
            f"{rows:>9} rows, {held / 2**20:.0f} MiB  ({fleet.transport()})",
            flush=True,
        )


def train(
    model: nn.Module, dataset: Dataset, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Trains for one epoch."""
    for batch in dataset:
        logits = model(batch["numbers"], batch["ids"])
        F.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.step(batch["label"], logits)


def evaluate(model: nn.Module, dataset: Dataset) -> float:
    """The AUC over the samples of all trainers, which all call this; it creates no rows."""
    model.eval()
    found = auc_of(model, dataset)
    model.train()
    return found


@torch.no_grad()
def auc_of(logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dataset: Dataset) -> float:
    """The AUC of any function that computes a batch's logits."""
    found = AUC()
    for batch in dataset:
        found.update(logits(batch["numbers"], batch["ids"]).sigmoid(), batch["label"])
    return found.compute()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every trainer is given the same flags.",
        allow_abbrev=False,
    )
    _add_data(parser)
    _add_model(parser)
    add = parser.add_argument
    add("--epochs", type=int, default=1, help="in all, those before a resumption too; default: 1")
    add("--every", type=int, default=100, help="steps between two lines of progress; default: 100")
    add(
        "--save",
        metavar="DIRECTORY",
        help="to save to after each epoch, and to resume from if it has a checkpoint",
    )
    add(
        "--export",
        metavar="FILE",
        help="written at the end for plain PyTorch (.pt or .safetensors)",
    )
    return parser.parse_args(arguments)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "files", nargs="*", help="in Criteo's format, *.gz decompressed; none: clicks are generated"
    )
    test = parser.add_mutually_exclusive_group()
    test.add_argument("--test", nargs="+", default=[], help="files to evaluate on after each epoch")
    test.add_argument("--no-test", action="store_true", help="evaluate on generated clicks neither")
    add(
        "--shuffle",
        action="store_true",
        help="before each epoch, over all trainers: the files are in memory then, and all trainers "
        "have equally many batches, as sync mode needs",
    )
    add("--batch", type=int, default=512, help="samples of a trainer's step; default: 512")
    add("--samples", type=int, default=1_000_000, help="to generate for an epoch; default: 1000000")
    add("--categories", type=int, default=2_000, help="of each generated slot; default: 2000")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=("deepfm", "wide_deep"), default="deepfm", help="default: deepfm")
    add("--mode", choices=MODES, default="async", help="of updates on the servers; default: async")
    add("--dim", type=int, default=16, help="of an embedding; default: 16")
    add("--hidden", type=int, default=128, help="width of the two hidden layers; default: 128")
    add("--rate", type=float, default=0.01, help="of the embeddings' Adagrad; default: 0.01")
    add(
        "--linear-rate",
        type=float,
        default=0.05,
        help="of the weights of single categories; default: 0.05",
    )
    add("--dense-rate", type=float, default=1e-3, help="of the network's Adam; default: 0.001")


MODES: dict[str, ASyncConfigs | None] = {  # a_sync_configs; None: sync
    "sync": None,
    "async": {},
    "half_async": {"half_async": True, "max_merge_var_num": 4},
    "k_step": {"k_steps": 10},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, evaluates, saves and exports."""
    asked = parsed(arguments)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    configs = MODES[asked.mode]
    strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
    fleet.init(strategy=strategy)
    made = DeepFM if asked.model == "deepfm" else WideDeep
    epochs = torch.zeros((), dtype=torch.int64)  # completed ones; saved with the rest
    net = made(asked.dim, asked.hidden, asked.rate, asked.linear_rate)
    net.register_buffer("epochs", epochs)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adam(model.parameters(), lr=asked.dense_rate)
    )
    if asked.save:
        with suppress(FileNotFoundError):  # nothing was saved there yet
            step = fleet.load(asked.save)
            print(f"continuing from step {step}, after epoch {int(epochs)}", flush=True)
    with TemporaryDirectory() as folder:
        learned, test, best = datasets(asked, folder)
        progress = Progress(asked.every)
        for epoch in range(int(epochs) + 1, asked.epochs + 1):
            if isinstance(learned, fleet.InMemoryDataset):
                learned.global_shuffle(epoch)
            train(model, learned, optimizer, progress)
            epochs.fill_(epoch)
            fleet.barrier_worker()
            if test is not None:
                optimizer.flush()
                found = evaluate(model, test)
                if fleet.is_first_worker():
                    truth = "" if best is None else f" (the truth itself: {best:.4f})"
                    print(f"epoch {epoch}: test auc {found:.4f}{truth}", flush=True)
            if asked.save:
                fleet.save(asked.save)
    if asked.export:
        fleet.export(asked.export)
    fleet.finish()


def datasets(
    asked: argparse.Namespace, folder: str
) -> tuple[Dataset, Dataset | None, float | None]:
    """The datasets to learn from and to evaluate on, and for generated clicks the AUC of the true
    logits: no model does better.
    """
    learned: Dataset = fleet.InMemoryDataset() if asked.shuffle else fleet.QueueDataset()
    test, trainers = fleet.QueueDataset(), fleet.worker_num()
    place = fleet.worker_index(), trainers
    for dataset, batch in ((learned, asked.batch), (test, 4096)):
        dataset.init(batch_size=batch, thread_num=2, parser="criteo")
    clicks = Generated(asked.categories)
    own = place if asked.shuffle else (0, 1)  # of a queue any trainer may get any file
    learned.set_filelist(asked.files or clicks.files(folder, asked.samples, FILES * trainers, *own))
    if isinstance(learned, fleet.InMemoryDataset):
        learned.load_into_memory()
    if asked.test:
        test.set_filelist(asked.test)
        return learned, test, None
    if asked.files or asked.no_test:
        return learned, None, None
    unseen = replace(clicks, seed=1)
    test.set_filelist(unseen.files(folder, min(asked.samples, 50_000), TEST_FILES, *place))
    return learned, test, auc_of(clicks.truth, test)


if __name__ == "__main__":
    main()
