"""Type checkers find a user's mistakes, and nothing in what is right."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "testdata" / "types"
RIGHT, MISTAKES = SCRIPTS / "right.py", SCRIPTS / "mistakes.py"


def checked(*command: str | Path) -> str:
    """The output of a type checker that has found mistakes."""
    line = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done
    return done.stdout


def mypys() -> set[tuple[str, int]]:
    """The file and line of each error of ``mypy --strict``."""
    # the project's settings, under which `make types` has left its cache
    said = checked("mypy", "--config-file", "pyproject.toml", RIGHT, MISTAKES)
    found = re.findall(r"^(.*?):(\d+): error: ", said, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in found}


def pyrights(folder: Path) -> set[tuple[str, int]]:
    """The file and line of each error of pyright, in its strict mode."""
    settings = {
        "include": [str(RIGHT), str(MISTAKES)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    python = ("--pythonpath", sys.executable)
    said = checked("basedpyright", "--outputjson", "-p", folder / "pyrightconfig.json", *python)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(said)["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checkers_find_each_mistake_and_no_other(checker: str, tmp_path: Path) -> None:
    """They are the lines with a comment.  basedpyright is pyright with its program in the wheel."""
    pytest.importorskip(checker, reason=f"{checker}, a development dependency, is not installed")
    lines = MISTAKES.read_text(encoding="utf-8").splitlines()
    wrong = {
        (MISTAKES.name, number) for number, line in enumerate(lines, 1) if "  # mistake: " in line
    }

    assert len(wrong) >= 5
    assert (mypys() if checker == "mypy" else pyrights(tmp_path)) == wrong


def test_what_type_checkers_accept_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The right script trains, alone."""
    runpy.run_path(str(RIGHT), run_name="__main__")

    assert "a_sync_configs.staleness" not in (said := capsys.readouterr().out)
    assert "gradient_merge_configs.k_steps" in said and said.endswith("\n2 0.5\n"), said
