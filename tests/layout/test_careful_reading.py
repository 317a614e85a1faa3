"""One module opens files where others may write, and one reads JSON."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import MODULES, nodes, relative

# whose files lie in folders of checkpoints, logs and servers' data
CAREFUL = (
    *("pserver/checkpoint/", "pserver/storage/", "pserver/job/", "pserver/job_log/"),
    *("pserver/lane/", "pserver/membership/"),
    *("pserver/table/", "pserver/operations/re", "trainer/checkpoint/"),
)
OPENERS = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "save_file", "load_file"}
EXCEPT = {
    "pserver/storage/plain_file.py",
    "pserver/storage/remote.py",  # a store, and folders of its own
    "trainer/checkpoint/export.py",  # folders of its own
    "trainer/checkpoint/arrays.py",  # files that the script names
    "pserver/table/kernels.py",  # its own sources
}
BY_DESCRIPTOR = {"pserver/storage/local.py: load_file"}


def called(path: Path) -> list[tuple[str, str]]:
    """The calls of a file: what is called, and of which name it is an attribute."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name):
                found.append((name.id, ""))
            elif isinstance(name, ast.Attribute):
                owner = name.value.id if isinstance(name.value, ast.Name) else "?"
                found.append((name.attr, owner))
    return found


def test_files_in_shared_folders_are_opened_by_one_module() -> None:
    """``pserver/storage/plain_file.py``, which follows no link."""
    found = {
        f"{relative(path)}: {name}"
        for path in MODULES
        if relative(path).startswith(CAREFUL) and relative(path) not in EXCEPT
        for name, owner in called(path)
        if name in OPENERS and owner != "plain_file"
    }
    assert found == BY_DESCRIPTOR


def test_json_is_read_by_one_module() -> None:
    """``transpiler/files/bounded_json.py``, which has an error for what is nested too deep."""
    found = [
        relative(path)
        for path in MODULES
        for name, owner in called(path)
        if (name, owner) in (("loads", "json"), ("load", "json"))
    ]
    assert found == ["transpiler/files/bounded_json.py"]
