"""Click models of strings: MovieLens-100K in its own form, and Criteo's and Avazu's files."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path

import pytest
import torch

from pserver import fleet
from tests.support.launched import EXAMPLES, launched
from trainer.examples import click_files, movielens

RATINGS = 4000
HEADS = {
    "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float",
    "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
    "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
}


def wheel(folder: Path) -> None:
    """A package with the data set's three files: people of two tastes, films of two kinds."""
    draw = random.Random(0)
    people, films = range(1, 41), range(1, 31)
    pairs = [(draw.choice(people), draw.choice(films)) for _ in range(RATINGS)]
    lines = {
        "inter": [
            f"{person}\t{film}\t{5 if (person + film) % 2 else 2}\t88" for person, film in pairs
        ],
        "user": [f"{person}\t{20 + person % 3}\tM\tdoctor\tV3N4P" for person in people],
        "item": [f"{film}\tL\u00e4ufer, the\t1995\tAction Comedy" for film in films],
    }
    with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as made:
        for kind, head in HEADS.items():
            made.writestr(click_files.INSIDE + kind, "\n".join([head, *lines[kind], ""]))


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """The flags that name the files of :func:`wheel`."""
    wheel(tmp_path)
    click_files.write(tmp_path)
    return ["--data", str(tmp_path / "train.tsv"), "--test", str(tmp_path / "test.tsv")]


def test_ratings_become_clicks_of_strings(data: list[str]) -> None:
    """Each rating is one line, joined with its person and its film."""
    learned, unseen = (Path(data[at]).read_text(encoding="utf-8").splitlines() for at in (1, 3))

    assert learned[0] == unseen[0] == "\t".join(click_files.HEAD)
    assert (len(learned) - 1, len(unseen) - 1) == (RATINGS * 4 // 5, RATINGS // 5)
    for line in learned[1:10]:
        click, user, movie, age, *rest = line.split("\t")
        assert int(click) == (int(user) + int(movie)) % 2 and int(age) == 20 + int(user) % 3
        assert rest == ["M", "doctor", "V3N4P", "1995", "Action Comedy"]


def test_one_process_learns(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The strings tell the clicks, so the held-out ones are nearly known."""
    movielens.main([*data, "--epochs", "6", "--batch", "64"])

    (auc,) = re.findall(r"AUC (0\.\d+|1\.0+) after", capsys.readouterr().out)
    assert float(auc) > 0.9


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_killed_trainer_costs_no_sample(tmp_path: Path, data: list[str]) -> None:
    """Two servers and two trainers, of which one is killed and started again: each sample of each
    epoch is in one step that counts.
    """
    words = [*data, "--epochs", "4", "--batch", "32", "--kill-at", "60"]
    script = str(EXAMPLES / "movielens.py")
    out, log = launched(tmp_path, "2 x 2", "--max-restarts", "1", script, *words)

    assert "trainer 1 failed with status 137 (killed by SIGKILL): starts it again" in out
    samples = RATINGS * 4 // 5
    assert log.count(f"{samples} of {samples} samples counted") == 4
    assert float(re.findall(r"AUC (\S+) after", log)[0]) > 0.85


@pytest.mark.parametrize("form", ["criteo", "avazu"])
def test_other_logs_have_their_own_columns(form: str, tmp_path: Path) -> None:
    """Empty fields, quotes and numbers, as these files have them."""
    columns = click_files.FORMATS[form]
    if form == "criteo":
        numbers, strings = ["1", "", *["7"] * 11], ['68fd1e64"', "", *["a"] * 24]
        lines = ["\t".join(["1", *numbers, *strings]), "\t".join(["0", *numbers, *strings])]
    else:
        names = ["id", "click", "hour", *sorted(set(columns.strings) - {"hour"})]
        lines = [",".join(names), *(",".join(["1", click, *["a"] * 22]) for click in "10")]
    path = tmp_path / "clicks"
    path.write_text("\n".join([*lines, ""]))
    fleet.init()
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=2, parser=columns.lines())
    dataset.set_filelist([str(path)])
    (batch,) = dataset

    assert batch["click"].tolist() == [1.0, 0.0]
    assert batch["ids"].dtype == torch.int64
    assert batch["ids"].shape == (2, len(columns.strings))
    if form == "criteo":
        assert batch["numbers"][0].tolist() == [1.0, 0.0, *[7.0] * 11]
    model = movielens.DeepFM(len(columns.strings), len(columns.numbers))
    assert model(batch).shape == (2,)
    fleet.finish()


def test_a_folder_without_the_package_is_said(tmp_path: Path) -> None:
    """The message has the command that brings it."""
    with pytest.raises(SystemExit, match="expected recbole's wheel in .*pip download"):
        click_files.write(tmp_path)
