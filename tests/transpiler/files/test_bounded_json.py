"""JSON of files and peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pserver.checkpoint import checkpoint
from pserver.checkpoint.manifest import packed
from transpiler.files import bounded_json
from transpiler.files.bounded_json import DEEPEST, loads


@pytest.mark.parametrize("opens, closes", [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_too_deep_is_a_value_error(opens: str, closes: str) -> None:
    """As text and as bytes, whole or torn; what is nested less is read."""
    for depth in (DEEPEST + 1, 5000, 200_000):
        for text in (opens * depth + "1" + closes * depth, opens * depth):
            for content in (text, text.encode()):
                with pytest.raises(ValueError, match="within one another"):
                    loads(content)
    text = opens * DEEPEST + "1" + closes * DEEPEST
    assert loads(text) == loads(text.encode()) == json.loads(text)


def test_brackets_in_a_text_are_no_depth() -> None:
    """Nor quotes in it, nor what stands side by side."""
    for said in ("[" * 500, '"' + "{" * 500, "\\" * 7 + '"[' * 300, ["["] * 500, [[1]] * 500):
        text = json.dumps(said)
        assert loads(text) == loads(text.encode()) == said


def test_what_is_no_json_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of another encoding, numbers without an end, and what is longer than is read."""
    for content in (b"\xff\xfe{}", "9" * 10_000, "", '"[' * 200, "{" * 50 + '"'):
        with pytest.raises(ValueError):
            loads(content)
    monkeypatch.setattr(bounded_json, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="up to 10 bytes, got 11"):
        loads(" " * 11)


def test_a_manifest_of_any_depth_is_a_value_error(tmp_path: Path) -> None:
    """With the right checksum, too."""
    deep = json.loads("[" * 400 + "]" * 400)
    for content in (b"[" * 200_000, packed({"by": "x", "meta": {"a": deep}, "files": {}})):
        (tmp_path / "checkpoint.json").write_bytes(content)
        with pytest.raises(ValueError, match="within one another"):
            checkpoint.load(tmp_path)
