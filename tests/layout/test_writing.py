"""Promises about what is written: an error of a full disk names the file."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.job_log.files import WriteAheadLog
from pserver.job_log_pb2 import OwnEntry
from pserver.launcher.planning.plan import Choice
from pserver.security import tokens
from pserver.security.key_folder import write_private
from pserver.security.tokens import Secret
from pserver.storage.local import DiskFile, LocalPlace
from tests.support.sources import MODULES, relative, tree
from transpiler.files.files import whole_file, write_object
from transpiler.files.named_errors import naming

WRITES = {"write_text", "write_bytes"}
SYSTEM = {"write", "writev", "pwrite", "ftruncate", "fsync"}  # of os
NAMES = {"naming", "whole_file", "file_to_write"}
# files that write, and in which nothing has to name the file
WHY_NOT = {
    "pserver/lane/recorder.py": "the failure that it keeps begins with the path",
    "pserver/launcher/log_file.py": "the warning names the file",
    "pserver/launcher/planning/plan.py": "what a probe says, in a folder that goes with it",
    "pserver/ray/actor.py": "opens /dev/null",
    "pserver/storage/remote.py": "an object of a store, whose errors name the place",
    "trainer/communicator/termination.py": "a pipe",
    "trainer/examples/click_files.py": "an example",
    "trainer/notebook.py": "opens /dev/null",
    "trainer/examples/clicks.py": "an example",
    "trainer/examples/synthetic.py": "an example",
}


def unnamed(node: ast.AST, inside: bool = False) -> Iterator[int]:
    """The lines of what writes, outside of a block that names the file."""
    if isinstance(node, ast.With):
        calls = [each.context_expr for each in node.items]
        names = {ast.unparse(c.func).split(".")[-1] for c in calls if isinstance(c, ast.Call)}
        inside = inside or bool(names & NAMES)
    if isinstance(node, ast.Call) and not inside and _writes(node):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unnamed(child, inside)


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.split(".")[-1]
    modes = [each.value for each in call.args if isinstance(each, ast.Constant)]
    opens = last == "open" and any(isinstance(m, str) and m[:1] in "wxa" and m for m in modes)
    return last in WRITES or (name.startswith("os.") and last in SYSTEM) or opens


def test_what_writes_names_its_file() -> None:
    """Lexically: a block that names it is around what writes it."""
    modules = [path for path in MODULES if "checker" not in path.parts]
    found = {relative(path): list(unnamed(tree(path))) for path in modules}

    assert {name: lines for name, lines in found.items() if lines and name not in WHY_NOT} == {}


def test_no_reason_is_left_of_a_file_that_writes_nothing() -> None:
    """The list of reasons is as it should be."""
    writes = {relative(path) for path in MODULES if list(unnamed(tree(path)))}

    assert set(WHY_NOT) <= writes


def _place(path: Path) -> None:
    LocalPlace(path.parent).write(path.name, b"x" * 9)


def _disk_file(path: Path) -> None:
    file = DiskFile.__new__(DiskFile)
    file._path, file._file, file._unflushed = path, open("/dev/full", "wb"), 0
    try:
        file.write(b"x")
        file.finish()
    finally:
        file.give_up()


def _whole(path: Path) -> None:
    with whole_file(path) as file:
        file.write_bytes(b"x")


WRITERS: dict[str, Callable[[Path], object]] = {
    "a place": _place,
    "a growing file": _disk_file,
    "a whole file": _whole,
    "torch.save": lambda path: write_object({"a": torch.ones(99999)}, path),
    "a choice": lambda path: Choice("sync", 0, 1, 1, 0.1).write(path),
    "a token": lambda path: tokens.write(path, Secret.make()),
    "a key": lambda path: write_private(path, b"x"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_names_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system opens a file and has no room for what is written."""
    path = tmp_path / "file"
    real = open

    def full(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if "w" not in mode:
            return real(file, mode, *more, **named)
        if isinstance(file, int):
            os.close(file)
        return real("/dev/full", mode, *more, **named)

    monkeypatch.setattr("builtins.open", full)
    monkeypatch.setattr("os.fdopen", full)
    monkeypatch.setattr(Path, "open", lambda self, mode="r", *more, **named: full(self, mode))
    monkeypatch.setattr(
        Path, "write_text", lambda self, text, **named: _into(full, self, text.encode())
    )
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: _into(full, self, data))
    with pytest.raises(OSError) as raised:
        WRITERS[name](path)

    assert raised.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(raised.value), raised.value


def _into(full: Callable[..., Any], path: Path, data: bytes) -> None:
    with full(path, "wb") as file:
        file.write(data)


def test_the_log_of_server_0_names_its_file(tmp_path: Path) -> None:
    """Which is written by descriptor."""
    log = WriteAheadLog(str(tmp_path / "server-0.wal"))
    with open("/dev/full", "wb", buffering=0) as full:
        log._file = full.fileno()
        with pytest.raises(OSError, match=r"No space left on device: '.*server-0\.wal'"):
            log.append(OwnEntry(plan="f"))


def test_an_error_that_names_a_file_or_is_none_of_the_system_s_stays() -> None:
    """As it is."""
    for error in (FileNotFoundError(2, "No such file", "there"), OSError("a sentence")):
        with pytest.raises(OSError) as raised, naming("here"):
            raise error
        assert raised.value is error
    with pytest.raises(BrokenPipeError, match="'here'"), naming("here"):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
