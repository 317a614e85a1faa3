"""Promises about the original's descriptions of slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import DataFeedDesc, fleet
from trainer.data.pieces import Slot

TEXT = """
# how it was written
name: "MultiSlotDataFeed"
batch_size: 2
multi_slot_desc {
  slots {
    name: "words#1"  # a name with a sign
    type: "uint64"
    is_dense: false
    is_used: true
  }
  slots { name: "weight" type: "float" is_dense: true shape: -1 shape: 3 }
  slots: { name: "label" type: "uint64" }
}
"""
LINES = "2 17 4 3 0.5 1 2 1 1\n1 99 3 1 2 3 0\n"


def written(folder: Path, text: str = TEXT) -> Path:
    path = folder / "data.prototxt"
    path.write_text(text)
    return path


def test_it_says_what_a_line_has(tmp_path: Path) -> None:
    """Slots with their types; what is dense has a width; only used ones become columns."""
    desc = DataFeedDesc(written(tmp_path))

    assert (desc.name, desc.batch_size) == ("MultiSlotDataFeed", 2)
    assert desc.slots == (
        Slot("words#1", width=None),
        Slot("weight", "float32", 3),
        Slot("label", width=None),
    )
    assert desc.used == {"words#1"}
    (tmp_path / "part-0").write_text(LINES)
    for used, expected in (
        ([], {"words#1"}),
        (["weight", "label"], {"words#1", "weight", "label"}),
    ):
        desc.set_use_slots(used)
        dataset = fleet.QueueDataset()
        dataset.init(desc.batch_size, parser=desc)
        dataset.set_filelist([str(tmp_path / "part-0")])
        (batch,) = dataset
        assert batch.keys() == expected
        assert batch["words#1"][0].tolist() == [17, 4, 99]
    assert batch["weight"].tolist() == [[0.5, 1, 2], [1, 2, 3]]
    assert [part.tolist() for part in batch["label"]] == [[1], [0, 1]]


def test_it_is_written_as_it_is_read(tmp_path: Path) -> None:
    """What a script changes is in ``desc()``, which reads as the same."""
    desc = DataFeedDesc(written(tmp_path))
    desc.set_batch_size(128)
    desc.set_dense_slots(["label"])
    desc.set_use_slots(["label"])

    again = DataFeedDesc(written(tmp_path, desc.desc()))

    assert again.batch_size == 128 and again.used == {"words#1", "label"}
    assert again.slots == desc.slots and desc.slots[2] == Slot("label", width=1)
    assert again.desc() == desc.desc()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch_size: 2", "batch_size: two", "line 4: expected a whole number for batch_size, got"),
        ("batch_size: 2", "batch_size: 0", "expected a whole number from 1, got 0"),
        ("batch_size: 2", "pipe_command: 2", "line 4: expected name, batch_size, .*pipe_command"),
        ("is_used: true", "is_used: yes", "line 10: expected true or false for is_used, got yes"),
        ("is_used: true", "is_used true", "line 10: expected : after is_used, got true"),
        ('"uint64"\n', '"int8"\n', "slot 'words#1': .* uint64 or float, got 'int8'"),
        ('name: "weight"', 'name: "label"', "slots with names of their own"),
        ("shape: 3", "shape: 0", "expected sizes from 1, got .0."),
        ("}\n}\n", "}\n", "line 13: expected slots or }, got the end"),
        (TEXT, "", "expected slots with names of their own, got .."),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    """The file, the line, what was expected and what was got."""
    assert TEXT.count(old) == 1

    with pytest.raises(ValueError, match=said):
        DataFeedDesc(written(tmp_path, TEXT.replace(old, new)))


def test_slots_that_there_are_not(tmp_path: Path) -> None:
    """Unknown names, none that is used, and slots beside the description are errors; so is a file
    that is missing.
    """
    desc = DataFeedDesc(written(tmp_path, TEXT.replace("is_used: true", "")))
    for call in (desc.set_use_slots, desc.set_dense_slots):
        with pytest.raises(ValueError, match="slots among words#1, weight, label, got 'x'"):
            call(["x"])
    with pytest.raises(TypeError, match="expected a list of slots, got 'label'"):
        desc.set_use_slots("label")
    dataset = fleet.QueueDataset()
    dataset.init(parser=desc)
    with pytest.raises(ValueError, match="expected used slots among words#1, weight, label, got"):
        _ = dataset.slots
    desc.set_use_slots(["label"])
    dataset.init(parser=desc, use_var=[Slot("label")])
    with pytest.raises(ValueError, match="expected the slots of the parser, or none"):
        _ = dataset.slots
    with pytest.raises(FileNotFoundError, match="none.prototxt"):
        DataFeedDesc(tmp_path / "none.prototxt")
