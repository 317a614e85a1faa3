"""Promises of checkpoints of which others have written parts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.checkpoint import Saved
from pserver.checkpoint.manifest import WholeTensor
from pserver.storage.place import place_at

WEIGHT = torch.arange(12.0).reshape(4, 3)
LAYOUT = {
    "model/w": WholeTensor((4, 3), ((0, "w.block0"), (1, "w.block1"))),
    "state/step/w": WholeTensor((4, 3), ((0, "w.block0.step"), (1, "w.block1.step"))),
    "state/never/w": WholeTensor((4, 3), ((0, "w.block0.never"), (1, "w.block1.never"))),
}


def rows(ids: Sequence[int], value: float) -> dict[str, np.ndarray]:
    return {
        "ids": np.array(ids, np.int64),
        "values": np.full((len(ids), 2), value, np.float32),
    }


def part(path: Path, number: int, base: Saved | None = None, value: float = 1.0) -> Saved:
    """What one of two servers writes: half of the weight, and rows of its own."""
    flat = WEIGHT.view(-1)[:5] if number == 0 else WEIGHT.view(-1)[5:]
    with checkpoint.writing(path / f"server-{number}", base) as writer:
        name = f"w.block{number}"
        writer.tensors({name: flat * value, f"{name}.step": torch.tensor(7.0)})
        changed = [number] if base is not None else [number, 10 + number]
        writer.chunks("rows", [rows(changed, value)])
        return writer.commit({"server": number})


def joint(path: Path, parts: Sequence[Saved], bias: float = 1.0) -> Saved:
    """What names them, and adds a tensor of its own."""
    with checkpoint.writing(path) as writer:
        writer.parts(parts, LAYOUT)
        writer.tensors({"model/b": torch.full((2,), bias)})
        return writer.commit({"step": 3})


def held(path: Path) -> dict[int, float]:
    """The rows of a checkpoint's table, by id."""
    return {
        int(row): float(values[0])
        for chunk in checkpoint.reading(path).chunks("rows")
        for row, values in zip(chunk["ids"], chunk["values"], strict=True)
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two parts."""
    path = tmp_path / "step-1"
    joint(path, [part(path, 0), part(path, 1)])
    return path


def test_slices_are_put_together_and_rows_follow_one_another(saved: Path) -> None:
    """A number that each slice has is one; a state that no slice has is none."""
    reader = checkpoint.reading(saved)
    tensors = reader.tensors()

    assert tensors.keys() == {"model/w", "model/b", "state/step/w"}
    assert torch.equal(tensors["model/w"], WEIGHT)
    assert tensors["state/step/w"].shape == () and tensors["state/step/w"] == 7
    assert reader.tables == ["rows"] and reader.meta == {"step": 3}
    assert held(saved) == {0: 1, 10: 1, 1: 1, 11: 1}


def test_a_folder_of_parts_can_be_moved(saved: Path, tmp_path: Path) -> None:
    """Parts are named relative to the checkpoint."""
    shutil.move(saved, tmp_path / "elsewhere")

    assert torch.equal(checkpoint.load(tmp_path / "elsewhere")[0]["model/w"], WEIGHT)


def test_a_tensor_of_its_own_takes_the_place_of_the_parts(tmp_path: Path) -> None:
    """What a script has written is newer than what servers hold."""
    with checkpoint.writing(tmp_path) as writer:
        writer.parts([part(tmp_path, 0), part(tmp_path, 1)], LAYOUT)
        writer.tensors({"model/w": WEIGHT + 1})
        writer.commit({})

    assert torch.equal(checkpoint.load(tmp_path)[0]["model/w"], WEIGHT + 1)


@pytest.mark.parametrize("damage", ["manifest", "tensors", "rows", "replaced"])
def test_a_damaged_part_damages_the_checkpoint(saved: Path, damage: str) -> None:
    """Nothing is taken from what lacks a part, or has another's."""
    folder = saved / "server-1"
    if damage == "manifest":
        (folder / "checkpoint.json").unlink()
    elif damage == "replaced":
        part(saved, 1, value=2.0)
    else:
        (file,) = folder.glob(f"{damage}-*")
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    expected = {"manifest": "is missing", "replaced": "was replaced"}.get(damage, "checksum")
    with pytest.raises(ValueError, match=f"server-1.*{expected}"):
        checkpoint.reading(saved)


def test_parts_continue_their_own_bases(saved: Path, tmp_path: Path) -> None:
    """Each part has a chain: of its table it has the rows that changed."""
    bases = [checkpoint.saved_in(saved / f"server-{number}") for number in range(2)]
    path = tmp_path / "step-2"
    joint(path, [part(path, number, bases[number], 2.0) for number in range(2)])

    assert held(path) == {0: 2, 10: 1, 1: 2, 11: 1}
    assert torch.equal(checkpoint.load(path)[0]["model/w"], WEIGHT * 2)


def test_a_delta_may_continue_parts(saved: Path, tmp_path: Path) -> None:
    """A trainer that writes alone goes on from what servers have written."""
    path = tmp_path / "step-2"
    with checkpoint.writing(path, checkpoint.saved_in(saved)) as writer:
        writer.tensors({"model/w": WEIGHT + 1})
        writer.chunks("rows", [rows([10, 20], 3.0)])
        writer.commit({})

    assert held(path) == {10: 3, 20: 3, 0: 1, 1: 1, 11: 1}
    assert checkpoint.load(path)[0].keys() == {"model/w"}
    with (
        checkpoint.writing(path, checkpoint.saved_in(saved)) as writer,
        pytest.raises(ValueError, match="without a base"),
    ):
        writer.parts([part(tmp_path, 0)], {})


def test_a_compacted_checkpoint_has_no_parts(saved: Path, tmp_path: Path) -> None:
    """It stands by itself."""
    checkpoint.compact(saved, tmp_path / "one")
    shutil.rmtree(saved)

    assert manifest.read(place_at(tmp_path / "one")).parts is None
    assert torch.equal(checkpoint.load(tmp_path / "one")[0]["model/w"], WEIGHT)
    assert held(tmp_path / "one") == {0: 1, 10: 1, 1: 1, 11: 1}


def test_parts_may_be_behind_urls() -> None:
    """In the checkpoint's store, or in another one."""
    parts = []
    for number in range(2):
        with checkpoint.writing(f"memory://parts/server-{number}") as writer:
            writer.tensors({f"w.block{number}": WEIGHT.view(-1)[number * 5 : 5 + number * 7]})
            parts.append(writer.commit({}))
    with checkpoint.writing("memory://parts") as writer:
        writer.parts(parts, LAYOUT)
        writer.commit({})

    assert torch.equal(checkpoint.load("memory://parts")[0]["model/w"], WEIGHT)


def test_a_part_on_this_machine_is_none_of_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    """Who reads the store would look on another machine's disk."""
    with (
        checkpoint.writing("memory://far") as writer,
        pytest.raises(ValueError, match="expected a place in the store"),
    ):
        writer.parts([part(tmp_path, 0)], LAYOUT)


def test_the_parts_of_stopped_saves_are_removed(tmp_path: Path) -> None:
    """By the next save to the path; those that it names stay, and what a link of such a name
    leads to.
    """
    saved, there = tmp_path / "saved", tmp_path / "elsewhere"
    stopped, mine, link = (saved / f"parts-{digit * 16}" for digit in "abc")
    part(stopped, 0)
    there.mkdir()
    (there / "precious").write_text("mine")
    link.symlink_to(there)
    joint(saved, [part(mine, 0), part(mine, 1)])

    assert sorted(each.name for each in saved.glob("parts-*")) == [mine.name, link.name]
    assert held(saved) == {0: 1.0, 10: 1.0, 1: 1.0, 11: 1.0}
    checkpoint.save(saved, {"w": WEIGHT}, {})
    assert not mine.exists() and (there / "precious").read_text() == "mine"
