"""Promises about datasets of one process: batches, orders, positions, wrong lines, endings."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import fleet
from trainer.data import datasets
from trainer.data.batches import Prefetched
from trainer.data.lines import WrongLine
from trainer.data.pieces import PIECE_BYTES
from trainer.job.datasets import JobTrainers
from transpiler import data

SLOTS = (fleet.Slot("id"), fleet.Slot("bag", "float32", None))
Dataset = fleet.InMemoryDataset | fleet.QueueDataset


def line(number: int) -> str:
    """A sample: its number, and as many values as its number modulo 3."""
    bag = [f"{number + 0.5}"] * (number % 3)
    return " ".join(["1", str(number), str(len(bag)), *bag])


def written(folder: Path, files: int = 3, samples: int = 10) -> list[str]:
    """Files of samples 0, 1, 2, ... in their order."""
    paths = []
    for index in range(files):
        path = folder / f"part-{index}"
        path.write_text("\n".join(line(index * samples + n) for n in range(samples)) + "\n")
        paths.append(str(path))
    return paths


def made(kind: type[Dataset], paths: list[str], **settings: Any) -> Dataset:
    """A dataset over these files, loaded where it has to be."""
    dataset = kind()
    dataset.init(**{"batch_size": 4, "thread_num": 2, "use_var": SLOTS, **settings})
    dataset.set_filelist(paths)
    if isinstance(dataset, fleet.InMemoryDataset):
        dataset.load_into_memory()
    return dataset


def ids(batches: Iterable[dict[str, Any]]) -> list[int]:
    """The samples of batches, of which each bag is checked."""
    found = []
    for batch in batches:
        values, offsets = batch["bag"]
        ends = [*offsets.tolist()[1:], len(values)]
        for number, begin, end in zip(batch["id"].tolist(), offsets.tolist(), ends, strict=True):
            assert values[begin:end].tolist() == [number + 0.5] * (number % 3)
            found.append(number)
    return found


@pytest.mark.parametrize("kind", [fleet.InMemoryDataset, fleet.QueueDataset])
def test_batches_are_the_samples_of_the_files(kind: type[Dataset], tmp_path: Path) -> None:
    """In the order of the files, batch by batch; a ragged slot is values and offsets."""
    paths = written(tmp_path)
    dataset = made(kind, paths)

    batches = list(dataset)

    assert ids(batches) == list(range(30)) == ids(dataset)
    assert [len(batch["id"]) for batch in batches] == [4] * 7 + [2]
    embedding = torch.nn.EmbeddingBag(100, 2)
    values, offsets = batches[0]["bag"]
    assert isinstance(values, torch.Tensor) and values.dtype == torch.float32
    assert embedding(values.long(), offsets).shape == (4, 2)
    assert len(list(made(kind, paths, drop_last=True))) == 7
    dataset.set_batch_size(16)
    assert [len(batch["id"]) for batch in dataset] == [16, 14]


def test_memory_is_counted_shuffled_and_released(tmp_path: Path) -> None:
    """Each epoch and each seed has an order of its own, which comes again."""
    paths = written(tmp_path)
    dataset, again, other = (made(fleet.InMemoryDataset, paths, seed=seed) for seed in (0, 0, 1))
    orders = []
    for each in (dataset, again, other):
        assert isinstance(each, fleet.InMemoryDataset)
        for _ in range(2):
            each.local_shuffle()
            orders.append(ids(each))
        each.global_shuffle()
        orders.append(ids(each))

    assert orders[:3] == orders[3:6]
    assert len(set(map(tuple, orders))) == 6
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert isinstance(dataset, fleet.InMemoryDataset)
    assert dataset.get_memory_data_size() == 30 == dataset.get_memory_data_size(everywhere=True)
    assert len(dataset) == 8
    dataset.release_memory()
    shuffles = dataset.state_dict()["shuffles"]
    for call in (dataset.get_memory_data_size, dataset.local_shuffle, lambda: list(dataset)):
        with pytest.raises(RuntimeError, match="expected load_into_memory"):
            call()
    assert dataset.state_dict()["shuffles"] == shuffles, "a shuffle that failed is none"


@pytest.mark.parametrize("kind", [fleet.InMemoryDataset, fleet.QueueDataset])
@pytest.mark.parametrize("given", [0, 3, 8])
def test_a_pass_goes_on_at_the_sample_where_it_was(
    kind: type[Dataset], given: int, tmp_path: Path
) -> None:
    """A new dataset with the state of another gives what that one had not given yet."""
    paths = written(tmp_path)
    first = made(kind, paths)
    if isinstance(first, fleet.InMemoryDataset):
        first.global_shuffle()
        first.local_shuffle()
    batches = iter(first)
    seen = ids([next(batches) for _ in range(given)])
    state = first.state_dict()
    rest = ids(batches)

    second = made(kind, paths)
    second.load_state_dict(state)

    assert ids(second) == rest and sorted(seen + rest) == list(range(30))
    assert ids(second) == seen + rest
    assert first.state_dict()["batches"] == 0
    if given:
        with pytest.raises(ValueError, match="expected batch_size=4, .* got 5"):
            made(kind, paths, batch_size=5).load_state_dict(state)


@pytest.mark.parametrize("kind", [fleet.InMemoryDataset, fleet.QueueDataset])
def test_wrong_lines_are_errors_or_counted(
    kind: type[Dataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error comes to the script; left out, lines are counted, and the first is named."""
    paths = written(tmp_path)
    Path(paths[1]).write_text(f"{line(0)}\n1 x\n1\n{line(1)}\n")

    with pytest.raises(WrongLine, match="part-1, line 2: slot 'id'"):
        list(made(kind, paths))
    dataset = made(kind, paths, on_error="skip")

    assert len(ids(dataset)) == 22 and dataset.wrong_lines == 2
    assert f"left out 2 wrong lines, the first: {paths[1]}, line 2: slot 'id'" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


class Others(JobTrainers):
    """Trainers of which each is told what the others have."""

    def __init__(self, number: int, all_told: list[Any]) -> None:
        self.number, self.all_told = number, all_told

    def part(self) -> tuple[int, int]:
        return self.number, 3

    def gathered(self, told: Any) -> list[Any]:
        self.all_told.append(told)
        return self.all_told


@pytest.mark.parametrize("kind", [datasets.InMemoryDataset, datasets.QueueDataset])
def test_a_wrong_line_that_several_have_read_counts_once(
    kind: type[datasets.InMemoryDataset | datasets.QueueDataset], tmp_path: Path
) -> None:
    """Trainers share two files, in whichever folder each has them."""
    all_told: list[Any] = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = written(folder, files=2)
        Path(paths[1]).write_text(f"{line(10)}\n1 x\n{line(11)}\n1\n{line(12)}\n")
        with Path(paths[0]).open("a") as file:
            file.write("nothing\n")
        dataset = kind(Others(number, all_told))
        dataset.init(batch_size=4, use_var=SLOTS, on_error="skip")
        dataset.set_filelist(paths)
        if isinstance(dataset, datasets.InMemoryDataset):
            dataset.load_into_memory()
        else:
            list(dataset)
        own, every = dataset.wrong_lines, dataset.get_wrong_lines(everywhere=True)
        assert own == dataset.get_wrong_lines() == sum(n for *_, n in all_told[-1])

    assert every == 3 and len(all_told) == 3
    assert sum(n for told in all_told for *_, n in told) > 3


def test_what_nobody_takes_ends(tmp_path: Path) -> None:
    """A pass that is left ends its thread; an error of the iterator is the script's."""

    def fails() -> Iterable[int]:
        yield 1
        raise KeyError("after one")

    for batch in made(fleet.QueueDataset, written(tmp_path)):
        assert len(batch["id"]) == 4
        break
    found = []
    with pytest.raises(KeyError, match="after one"):
        for one in Prefetched(lambda: iter(fails()), 1):
            found.append(one)

    assert found == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_files_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file has one trainer, by the environment too; a script may say the part itself."""
    paths = written(tmp_path, files=5)
    dataset = fleet.QueueDataset()
    dataset.set_filelist(paths)
    assert dataset.get_filelist() == paths
    monkeypatch.setenv("TRAINING_ROLE", "TRAINER")
    monkeypatch.setenv("PSERVER_ENDPOINTS", "127.0.0.1:1")
    monkeypatch.setenv("TRAINERS", "2")
    shares = []
    for trainer in ("0", "1"):
        monkeypatch.setenv("TRAINER_ID", trainer)
        shares.append(dataset.get_filelist())
    assert shares == [paths[::2], paths[1::2]]
    dataset.set_filelist(paths, 2, 3)
    assert dataset.get_filelist() == paths[2::3]


@pytest.mark.parametrize("kind", [fleet.InMemoryDataset, fleet.QueueDataset])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst", ".parquet", "broken"])
def test_few_files_are_divided_by_rows(
    kind: type[Dataset], ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trainer has an equal range of all samples, in their order: of texts in several pieces,
    of compressed ones, of groups of rows, and of texts with line breaks between quotes; wrong lines
    are no rows.
    """
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (40,))
    break_ = "\n" if ending == "broken" else " "
    for file, numbers in (("a", range(7)), ("b", range(7, 60))):
        lines = [f'{number},"x{break_}y"' for number in numbers]
        lines.insert(3, "wrong,y")
        text = ("\n".join(["id,word", *lines]) + "\n").encode()
        path = tmp_path / f"{file}{ending}"
        if ending == ".parquet":
            parquet.write_table(arrow.table({"id": list(numbers)}), path, row_group_size=9)
        else:
            packed = {".gz": gzip.compress, ".zst": partial(arrow.compress, codec="zstd")}
            path.write_bytes(packed.get(ending, bytes)(text))
    settings = {"use_var": SLOTS[:1], "on_error": "skip"}
    settings["parser"] = "parquet" if ending == ".parquet" else "csv"
    paths = [str(tmp_path / f"{file}{ending}") for file in "ab"]

    found = []
    for trainer in range(7):
        dataset = kind()
        dataset.init(batch_size=4, **settings)
        dataset.set_filelist(paths, trainer, 7)
        if isinstance(dataset, fleet.InMemoryDataset):
            dataset.load_into_memory()
        found.append([number for batch in dataset for number in batch["id"].tolist()])
        assert [number for batch in dataset for number in batch["id"].tolist()] == found[-1]

    assert sum(found, []) == list(range(60)) and {len(each) for each in found} == {8, 9}


@pytest.mark.parametrize("kind", [fleet.InMemoryDataset, fleet.QueueDataset])
def test_a_trainer_may_have_no_sample(
    kind: type[Dataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are more trainers than samples: it says so, and gives no batch."""
    dataset = made(kind, written(tmp_path, samples=1), batch_size=1)
    dataset.set_filelist(dataset.get_filelist(), 0, 5)
    if isinstance(dataset, fleet.InMemoryDataset):
        dataset.load_into_memory()
        dataset.global_shuffle()

    assert list(dataset) == [] == list(dataset)
    assert "trainer 0 of 5 has no sample: there are 3" in caplog.text


def test_a_file_that_changes_is_said(tmp_path: Path) -> None:
    """A file that has other samples when it is read than when they were counted; the next pass
    counts them again.
    """
    (path,) = written(tmp_path, files=1)
    dataset = made(fleet.QueueDataset, [path])
    dataset.set_filelist([path], 0, 2)
    mine = dataset._mine()
    Path(path).write_text("1 3 0\n" * 30)

    with pytest.raises(ValueError, match=r"expected 10 samples, .* got \d+: a file must not"):
        list(dataset._read_all(mine))
    assert ids(dataset) == [3] * 15


def test_an_evaluation_may_be_unequal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file for two trainers: each has a half of its samples; under ``no_grad`` trainers ask no
    other one, also where one has more batches.
    """
    paths, found = written(tmp_path, files=1, samples=9), []
    for name, value in (("TRAINING_ROLE", "TRAINER"), ("PSERVER_ENDPOINTS", "h:1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINERS", "2")
    for trainer in range(2):
        monkeypatch.setenv("TRAINER_ID", str(trainer))
        dataset = made(fleet.InMemoryDataset, paths)
        with torch.no_grad():
            found.append((ids(dataset), len(dataset)))

    assert found == [([0, 1, 2, 3], 1), ([4, 5, 6, 7, 8], 2)]


def test_settings_that_cannot_be_are_named(tmp_path: Path) -> None:
    """Each says what was expected, and what was got."""
    paths, dataset = written(tmp_path), fleet.InMemoryDataset()
    for call, why in (
        (lambda: dataset.init(batch_size=0), "batch_size: expected a whole number from 1, got 0"),
        (lambda: dataset.init(on_error="log"), "expected 'raise' or 'skip', got 'log'"),
        (lambda: dataset.set_filelist([*paths, paths[0]]), "got .*part-0 twice"),
        (lambda: dataset.set_filelist(paths, 2, 2), "expected trainer_id below trainers"),
        (lambda: dataset.set_use_var([SLOTS[0], SLOTS[0]]), "names of their own"),
        (lambda: dataset.set_use_var([data("x", [None, 2, 3])]), r"expected \[batch\] or"),
        (dataset.load_into_memory, "expected set_filelist"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=why):
            call()
    for settings, why in (
        ({"parser": "cvs"}, "got 'cvs': did you mean 'csv'?"),
        ({"parser": "Parquet"}, "got 'Parquet': did you mean 'parquet'?"),
        ({"parser": "zzqqxx"}, "parser: expected one of criteo, csv, .*, tsv, got 'zzqqxx'$"),
        ({"parser": 5}, "parser: expected one of .*, or a function from a line to a dict, got int"),
        (
            {"parser": "tsv", "fill": {"x": 0}},
            r"'fill': it is an .* parser=CsvLines\(slots, delimiter='\\t', fill=...\)$",
        ),
        ({"parser": "tsv", "delimiter": ";"}, r"parser=CsvLines\(slots, delimiter=...\)$"),
        ({"parser": "parquet", "fill": {}}, r"parser=ParquetRows\(slots, fill=...\)$"),
        ({"delimeter": ";"}, r"did you mean 'delimiter'\? it is .*\(slots, delimiter=...\)$"),
        ({"batchsize": 5}, r"init: unexpected keyword 'batchsize': did you mean 'batch_size'\?$"),
        ({"zzqqxx": 5}, "'zzqqxx': it has 'batch_size', .*, 'prefetch'$"),
        ({"pipe_command": "cat"}, "'pipe_command': parser= in place of pipe_command, use_var= of"),
    ):
        with pytest.raises((TypeError, ValueError), match=why):
            dataset.init(**settings)
    for given in ("part-0", None, [None], []):
        with pytest.raises((TypeError, ValueError), match="expected a list of paths, got "):
            dataset.set_filelist(given)  # type: ignore[arg-type]
    dataset.init(use_var=[data("id", [None], "int64"), data("bag", [None, None])])
    assert dataset.slots == SLOTS


def test_paths_may_be_of_pathlib(tmp_path: Path) -> None:
    """And come from a generator, as that of a folder's files."""
    paths, dataset = written(tmp_path), fleet.InMemoryDataset()
    dataset.set_filelist(path for path in sorted(tmp_path.iterdir()))

    assert dataset.get_filelist() == sorted(paths)


def test_large_files_are_many_pieces(tmp_path: Path) -> None:
    """A pass over pieces that are parsed at once is in the order of the file."""
    path, samples = tmp_path / "large", 2 * PIECE_BYTES // 20
    numbers = range(10**18, 10**18 + samples)
    path.write_text("\n".join(f"{number}" for number in numbers))
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=2**20, thread_num=2, use_var=SLOTS[:1], parser=csv())
    dataset.set_filelist([str(path)])
    dataset.load_into_memory()

    found = torch.cat([batch["id"] for batch in dataset])  # type: ignore[arg-type]  # dense

    assert torch.equal(found, torch.arange(10**18, 10**18 + samples))


def csv() -> Any:
    """One column without a name in the file."""
    from trainer.data.arrow import CsvLines

    return CsvLines(SLOTS[:1], columns=["id"])


def by_hand(text: str) -> dict[str, Any]:
    """A parser of a script."""
    number, *bag = text.split(",")
    return {"id": int(number), "bag": [float(one) for one in bag]}


@pytest.mark.processes
def test_a_parser_of_the_script_runs_in_processes(tmp_path: Path) -> None:
    """They give the same samples, end with the pass, and an error of theirs is the script's."""
    import multiprocessing

    path, worse = tmp_path / "a.csv", tmp_path / "b.csv"
    path.write_text("0\n1,1.5\n2,2.5,2.5\n")
    worse.write_text("0\nx\n")
    dataset = made(fleet.InMemoryDataset, [str(path)], parser=by_hand, thread_num=2)

    assert ids(dataset) == [0, 1, 2]
    assert ids(made(fleet.QueueDataset, [str(path)], parser=by_hand, thread_num=1)) == [0, 1, 2]
    with pytest.raises(WrongLine, match="b.csv, line 2: the parser raised ValueError in"):
        made(fleet.InMemoryDataset, [str(worse)], parser=by_hand, thread_num=1)
    assert not multiprocessing.active_children()
