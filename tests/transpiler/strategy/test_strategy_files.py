"""Files of a strategy: a load replaces everything, and a bad file changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from transpiler import DistributedStrategy


def test_a_load_replaces_everything(tmp_path: Path) -> None:
    """What the file does not name returns to its default; a file of an untouched strategy is
    empty.
    """
    DistributedStrategy().save_to_prototxt(str(tmp_path / "s"))
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.load_from_prototxt(str(tmp_path / "s"))

    assert strategy == DistributedStrategy()
    assert (tmp_path / "s").read_text() == ""


BAD_FILES = [
    (b"amp: true\nampp: true\n", "line 2: .*ampp"),
    (b"amp: true\na_sync_configs {\n  k_step: 3\n}\n", "line 3"),
    (b"amp: maybe\n", "line 1"),
    (b"a_sync_configs { k_steps: 3", "expected a strategy"),
    (
        b"a_sync_configs { k_steps: -3 }",
        r"a_sync_configs\['k_steps'\]: expected a whole number of 0 or more, got -3",
    ),
    (b"a_sync_configs { outer_optimizer { lr: -1 } }", "lr"),
    (b"a_sync_configs { modes { pattern: '*' mode: 'x' } }", "sync"),
    (b"\xff\xfe", "no UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_refused_and_changes_nothing(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """An unknown field, a wrong type, a value out of range or garbage raises ValueError naming the
    file (and line).
    """
    path = tmp_path / "bad.prototxt"
    path.write_bytes(content)
    strategy = DistributedStrategy()
    strategy.lamb = True

    with pytest.raises(ValueError, match=f"bad.prototxt.*{message}"):
        strategy.load_from_prototxt(path)

    assert strategy.unsupported(()) == ["lamb"]


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    """A file that is not there is said to be so, with its name."""
    with pytest.raises(FileNotFoundError, match="absent"):
        DistributedStrategy().load_from_prototxt(tmp_path / "absent")
