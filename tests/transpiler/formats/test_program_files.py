"""Programs as files: exact, and refused when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.serialized import PROGRAM
from transpiler.ir.graph import Block, Role, Storage, Variable, freeze
from transpiler.program import Program


def stored() -> Program:
    """The program with values that share memory, are views, are empty and have no dimension."""
    big = torch.randn(4, 3).to(torch.bfloat16)
    values = {
        "w": big[1:3],
        "empty": torch.empty(0, 7),
        "n": torch.tensor(2**40),
        "stranger": torch.ones(1),
    }
    return replace(PROGRAM, storage=Storage(values, torch.optim.SGD([torch.zeros(1)], lr=1.0)))


def test_a_file_gives_back_program_and_values(tmp_path: Path) -> None:
    """Values come back to the bit, bfloat16, empty and 0-dim ones too; the loaded storage has no
    optimizer.
    """
    program = stored()
    program.save(tmp_path / "p.safetensors")

    back = Program.load(tmp_path / "p.safetensors")

    assert back == program and back.fingerprint() == program.fingerprint()
    assert program.storage is not None and back.storage is not None
    assert back.storage.optimizer is None
    assert set(back.storage.tensors) == {"w", "empty", "n"}
    for name, value in back.storage.tensors.items():
        assert value.dtype == program.storage.tensors[name].dtype
        assert torch.equal(value, program.storage.tensors[name])
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]


def test_values_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    """Two names for one memory are two values in the file."""
    shared = torch.arange(6).to(torch.bfloat16).view(2, 3)
    variables = {name: Variable(name, (2, 3), "bfloat16", Role.PARAMETER) for name in ("a", "b")}
    program = Program(
        (Block(0, freeze(variables), ()),), None, Storage({"a": shared, "b": shared}, None)
    )
    program.save(tmp_path / "p")

    back = Program.load(tmp_path / "p").storage

    assert (
        back is not None
        and torch.equal(back.tensors["a"], shared)
        and torch.equal(back.tensors["b"], shared)
    )


def test_a_program_without_values_saves_too(tmp_path: Path) -> None:
    """What was received holds no values; it still saves and loads, inf and all."""
    PROGRAM.save(str(tmp_path / "p"))

    back = Program.load(str(tmp_path / "p"))

    assert back == PROGRAM
    assert back.storage is not None and back.storage.tensors == {}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file cut anywhere, or overwritten, raises ValueError naming the file, and a missing one
    FileNotFoundError.
    """
    path = tmp_path / "p"
    stored().save(path)
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1)]
    damaged += [b"\xff" * len(whole), whole.replace(b"aten.clone", b"aten.clown"), whole + b"more"]

    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"Program.save wrote, got '{path}'"):
            Program.load(path)
    with pytest.raises(FileNotFoundError, match="no file at"):
        Program.load(tmp_path / "absent")


def test_a_file_whose_values_are_not_the_programs_is_refused(tmp_path: Path) -> None:
    """A value of another shape or dtype, or of a variable that is not there, raises and names it;
    so does a foreign file.
    """
    path = tmp_path / "p"
    stored().save(path)
    metadata = {"program": stored_metadata(path)}
    for values, words in (
        (
            {"w": torch.ones(3, 2, dtype=torch.bfloat16)},
            r"'w': expected bfloat16\[2, 3\], got torch.bfloat16\[3, 2\]",
        ),
        ({"w": torch.ones(2, 3)}, r"got torch.float32\[2, 3\]"),
        ({"x": torch.ones(2, 3)}, "'x': the program has no persistent variable"),
    ):
        save_file(values, path, metadata)
        with pytest.raises(ValueError, match=words):
            Program.load(path)
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="no program in its metadata"):
        Program.load(path)


def stored_metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["program"])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written leaves the file that was there, and nothing beside it."""
    path = tmp_path / "p"
    PROGRAM.save(path)
    before = path.read_bytes()
    bad = replace(PROGRAM, storage=Storage({"w": torch.ones(2, 3, dtype=torch.complex32)}, None))

    with pytest.raises(Exception, match="complex32|dtype|KeyError"):
        bad.save(path)

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]
