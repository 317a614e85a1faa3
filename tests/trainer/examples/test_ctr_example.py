"""The example of clicks: what its reader makes of files, what its score is, and that it learns,
saves, goes on and exports.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.examples import ctr
from trainer.examples.clicks import NUMBERS, SLOT_BITS, SLOTS, Batch, Files, Generated, auc


def line(label: str = "1", numbers: str = "0", category: str = "0000000f") -> str:
    return "\t".join([label, *[numbers] * NUMBERS, *[category] * SLOTS]) + "\n"


def written(path: Path, text: str) -> str:
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")
    with opened as file:
        file.write(text)
    return str(path)


def joined(batches: list[Batch]) -> list[torch.Tensor]:
    return [torch.cat(columns) for columns in zip(*batches, strict=True)]


# ---- clicks ----


def test_fields_become_numbers_and_ids(tmp_path: Path) -> None:
    """Integers become sign(x) log(1 + |x|), a category its slot's own id; a missing one 0, and an
    id that no category has.
    """
    fields = ["0", "7", "-2", *[""] * (NUMBERS - 2), "0000000f", "", *["ffffffff"] * (SLOTS - 2)]
    path = written(tmp_path / "day.tsv", "\t".join(fields) + "\n" + line())
    ((labels, numbers, ids),) = Files([path], 8)

    assert (
        labels.tolist() == [0, 1]
        and labels.dtype == numbers.dtype == torch.float32
        and ids.dtype == torch.int64
    )
    assert numbers[0].tolist() == pytest.approx([np.log(8), -np.log(3), *[0] * (NUMBERS - 2)])
    own, top = ids & (2 ** (SLOT_BITS + 1) - 1), ids >> (SLOT_BITS + 1)
    assert own[0].tolist() == [15, 2**SLOT_BITS, *[2**32 - 1] * (SLOTS - 2)]
    assert top.tolist() == [list(range(SLOTS))] * 2


def test_batches_go_on_from_file_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are full but the last, whatever files and blocks end where; gzip, Windows' ends and a
    last line without one too.
    """
    monkeypatch.setattr("trainer.examples.clicks.READ_BYTES", 1000)  # some lines
    text = [line("01"[i % 3 == 0], str(i)) for i in range(23)]
    paths = [
        written(tmp_path / "a.tsv.gz", "".join(text[:10])),
        written(tmp_path / "b.tsv", ""),
        written(tmp_path / "c.tsv", "".join(text[10:]).replace("\n", "\r\n").removesuffix("\r\n")),
    ]
    batches = list(Files(paths, 4))

    assert [len(batch[0]) for batch in batches] == [4] * 5 + [3]
    assert torch.equal(joined(batches)[1][:, 0], torch.arange(23).double().log1p().float())
    assert joined(batches)[0].tolist() == [float(i % 3 == 0) for i in range(23)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("1\t2\n", "got 2"),
        ("\n", "label: expected 0 or 1"),
        (line() + line("1", "x"), "'x'"),
        (line(category="12g4"), "category 1: expected at most 8 hexadecimal digits, got '12g4'"),
        (line(category="123456789"), "got '123456789'"),
        (line(label="2"), "label: expected 0 or 1"),
        (line(label=""), "label: expected 0 or 1"),
        (line().rstrip("\n") + "\tmore\n", "41"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: str, said: str) -> None:
    """A line with another number of fields, or a field that is no number, is an error with its file
    and number.
    """
    path = written(tmp_path / "day.tsv", line() * 20 + wrong + line() * 20)
    number = 20 + wrong.count("\n")
    with pytest.raises(ValueError, match=rf"day\.tsv: line {number}: .*{said}"):
        list(Files([path], 16))


def test_torn_bytes_are_an_error(tmp_path: Path) -> None:
    """A gzip file that ends too early does not pass for a shorter one."""
    path = Path(written(tmp_path / "day.tsv.gz", line() * 1000))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OSError, match="(?i)trunc"):
        list(Files([str(path)], 16))


@pytest.mark.parametrize("generated", [True, False], ids=["generated", "files"])
def test_trainers_have_as_many_batches_and_none_twice(tmp_path: Path, generated: bool) -> None:
    """Shards have equally many batches and are, in turn, those of the whole; what is left over
    nobody has.
    """
    text = "".join(line(numbers=str(i)) for i in range(110))
    whole = (
        Generated(110, 10, 100) if generated else Files([written(tmp_path / "day.tsv", text)], 10)
    )
    shares = [list(whole.shard(number, 3)) for number in range(3)]

    assert [len(share) for share in shares] == [3] * 3
    in_turn = [share[index] for index in range(3) for share in shares]
    for mine, expected in zip(joined(in_turn), joined(list(whole)[:9]), strict=True):
        assert torch.equal(mine, expected)


def test_generated_clicks_are_the_same_each_time_and_follow_their_truth() -> None:
    """A seed gives the same samples again, another one others; clicks come as often as the true
    logits say.
    """
    clicks = Generated(20_000, 1000, 50)
    for mine, again in zip(joined(list(clicks)), joined(list(clicks)), strict=True):
        assert torch.equal(mine, again)
    assert not torch.equal(
        joined(list(clicks))[2], joined(list(Generated(20_000, 1000, 50, seed=1)))[2]
    )
    labels, logits = zip(
        *((batch[0], logits) for batch, logits in clicks.with_truth()), strict=True
    )
    expected = 1 / (1 + np.exp(-np.concatenate(logits)))
    assert torch.cat(labels).mean().item() == pytest.approx(expected.mean(), abs=0.015)


def test_the_score_is_the_share_of_pairs_in_order() -> None:
    """The AUC equals what comparing every click with everything that was not clicked gives, ties
    counted half.
    """
    random = np.random.default_rng(3)
    labels, scores = (
        (random.random(200) < 0.3).astype(np.float32),
        random.integers(0, 40, 200).astype(np.float32),
    )
    above = scores[labels > 0][:, None] - scores[labels == 0][None]

    assert auc(labels, scores) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean())
    assert np.isnan(auc(np.ones(3), np.arange(3)))


# ---- the script, alone ----

SMALL = (
    "--batch 128 --categories 20 --dim 4 --hidden 16 --rate 0.03 --linear-rate 0.1 --every 50"
).split()


@pytest.mark.slow
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


def test_it_goes_on_from_what_it_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of files equal one, a new start, and the other: to the bit, in all that is
    exported.
    """
    random = np.random.default_rng(0)
    text = "".join(
        line("01"[int(random.integers(2))], str(i % 7), f"{random.integers(9):x}")
        for i in range(500)
    )
    path = written(tmp_path / "day.tsv.gz", text)
    words = [path, "--test", path, *SMALL]
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

    assert "going on from step 4, after epoch 1" in capsys.readouterr().out
    assert whole.keys() == resumed.keys() and whole["embedding.weight"].shape == (SLOTS * 9, 4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
