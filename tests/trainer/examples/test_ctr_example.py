"""The example of clicks: what it generates, and that it learns, saves, goes on and exports."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer import fleet
from trainer.examples import ctr
from trainer.examples.clicks import NUMBERS, SLOT_BITS, SLOTS, Generated, squashed

# ---- clicks ----


def read(files: list[str], trainer: int = 0, trainers: int = 1) -> dict[str, torch.Tensor]:
    """All samples that one trainer reads, in their order."""
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=1000, parser="criteo")
    dataset.set_filelist(files, trainer, trainers)
    batches = list(dataset)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_generated_clicks_are_the_same_each_time_and_follow_their_truth(tmp_path: Path) -> None:
    """A seed gives the same samples again, another one others; clicks come as often as the true
    logits of what was read say, and numbers are about as large as categories are many.
    """
    clicks, texts = Generated(50), []
    for seed in (0, 0, 1):
        files = Generated(50, seed=seed).files(str(tmp_path), 20_000, 4, 0, 1)
        texts.append([Path(path).read_text() for path in files])
    found = read(clicks.files(str(tmp_path), 20_000, 4, 0, 1))

    assert texts[0] == texts[1] and not {*texts[0]} & {*texts[2]} and len({*texts[0]}) == 4
    expected = clicks.truth(found["numbers"], found["ids"]).sigmoid()
    assert found["label"].mean().item() == pytest.approx(expected.mean().item(), abs=0.01)
    logits = expected.logit().float()
    assert np.corrcoef(found["label"], logits)[0, 1] > 0.5
    numbers = squashed(found["numbers"])
    assert numbers.shape == (20_000, NUMBERS) and 0.9 < numbers.std().item() < 1.1
    slots, categories = found["ids"] >> SLOT_BITS, found["ids"] & (2**SLOT_BITS - 1)
    assert (slots == torch.arange(SLOTS)).all() and {*categories.flatten().tolist()} == {*range(50)}


def test_each_trainer_writes_what_it_reads(tmp_path: Path) -> None:
    """Trainers have equally many samples of their own, on file systems of their own, too; what is
    left over nobody has.
    """
    shares = []
    for trainer in range(3):
        folder = tmp_path / str(trainer)
        folder.mkdir()
        files = Generated(1000).files(str(folder), 125, 6, trainer, 3)
        assert len(files) == 6
        shares.append(read(files, trainer, 3))

    assert [len(share["label"]) for share in shares] == [40] * 3
    everything = torch.cat([share["ids"] for share in shares])
    assert len({tuple(ids) for ids in everything.tolist()}) == 120


# ---- the script, alone ----

SMALL = (
    "--batch 128 --categories 20 --dim 4 --hidden 16 --rate 0.03 --linear-rate 0.1 --every 50"
).split()


@pytest.mark.parametrize("model", ["deepfm", "wide_deep"])
def test_it_learns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, from 20 000 samples, either model comes within 0.02 of the truth's AUC on unseen ones;
    progress is told.
    """
    ctr.main([*SMALL, "--model", model, "--samples", "20000"])
    said = capsys.readouterr().out
    found = re.search(r"test auc (0\.\d+) \(the truth itself: (0\.\d+)\)", said)

    assert found is not None and float(found[2]) - float(found[1]) <= 0.02, said
    assert re.search(
        r"19200 samples +\d+/s  loss 0\.\d+  auc 0\.\d+ +\d+ rows, \d+ MiB  \(local\)", said
    ), said


@pytest.mark.parametrize("more", [[], ["--shuffle"]], ids=["", "shuffled"])
def test_it_goes_on_from_what_it_saved(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of files equal one, a new start, and the other: to the bit, in all that is
    exported.
    """
    random, lines = np.random.default_rng(0), []
    for i in range(500):
        fields = [str(i % 7)] * NUMBERS + [f"{random.integers(9):x}"] * SLOTS
        lines.append("\t".join(["01"[int(random.integers(2))], *fields]) + "\n")
    path = tmp_path / "day.tsv.gz"
    path.write_bytes(gzip.compress("".join(lines).encode()))
    words = [str(path), "--test", str(path), *SMALL, *more]
    ctr.main([*words, "--epochs", "2", "--export", str(tmp_path / "whole.pt")])
    for epochs in ("1", "2"):
        ctr.main(
            [
                *words,
                "--epochs",
                epochs,
                "--save",
                str(tmp_path / "saved"),
                "--export",
                str(tmp_path / "resumed.pt"),
            ]
        )
    whole, resumed = (torch.load(tmp_path / name) for name in ("whole.pt", "resumed.pt"))

    assert "continuing from step 4, after epoch 1" in capsys.readouterr().out
    assert whole.keys() == resumed.keys() and whole["embedding.weight"].shape == (SLOTS * 9, 4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
