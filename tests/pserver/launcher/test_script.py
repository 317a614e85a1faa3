"""A script beside whose modules Python does not find our packages is refused before the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from pserver.__main__ import main
from pserver.launcher.script import OURS, check_script
from pserver.own_packages import hiding

FLEET = "from trainer import fleet\n"
HIDES = "beside the script hides our package"


def script(folder: Path, text: str, beside: dict[str, str]) -> str:
    """A script, and files beside it."""
    for name, each in {"train.py": text, **beside}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(each)
    return str(folder / "train.py")


@pytest.mark.parametrize(
    ("text", "beside", "message"),
    [
        (
            f"import os\n{FLEET}",
            "trainer.py",
            f"line 2: from trainer import fleet: trainer.py {HIDES}",
        ),
        (
            "import trainer.fleet\n",
            "trainer.py",
            f"import trainer.fleet: trainer.py {HIDES} trainer",
        ),
        (
            "def f():\n    from trainer.lr import Warmup\n",
            "trainer.py",
            "line 2: from trainer.lr im",
        ),
        (
            FLEET,
            "trainer/__init__.py",
            f"trainer/ {HIDES} trainer: write from pserver import ..., or",
        ),
        ("from transpiler import capture\n", "transpiler.py", f"transpiler.py {HIDES} transpiler"),
        ("from pserver import fleet\n", "pserver.py", f"{HIDES} pserver: rename pserver.py"),
        (FLEET, "pserver.py", f"from trainer import fleet: pserver.py {HIDES} pserver: rename"),
    ],
)
def test_an_import_that_finds_another_module_is_named(
    tmp_path: Path, text: str, beside: str, message: str
) -> None:
    """With the line, the file that hides our package, and what to write."""
    path = script(tmp_path, text, {beside: "class Trainer: pass\n"})
    with pytest.raises(ValueError) as caught:
        check_script(path)
    assert str(caught.value).startswith(path) and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        (
            "from pserver import fleet\nfrom trainer import Trainer\n",
            {"trainer.py": "class Trainer: 1"},
        ),
        ("import trainer\nfrom trainer import *\n", {"trainer.py": ""}),
        (FLEET, {"trainer.py": "from pserver import *\n"}),
        (FLEET, {"trainer.py": "from pserver import fleet\n"}),
        ("from trainer.fleet import init\n", {"trainer/__init__.py": "", "trainer/fleet.py": ""}),
        (FLEET, {"trainer/steps.py": ""}),  # a folder without __init__.py hides nothing
        (FLEET, {"transpiler.py": ""}),
        ("from .trainer import x\n", {"trainer.py": ""}),
        ("def", {"trainer.py": ""}),  # running it says what is wrong
    ],
)
def test_a_module_of_the_users_may_have_these_names(
    tmp_path: Path, text: str, beside: dict[str, str]
) -> None:
    """It has everything that the script imports from it."""
    check_script(script(tmp_path, text, beside))


def test_python_looks_beside_the_file_that_a_link_names(tmp_path: Path) -> None:
    """So it is that folder that may hide our packages."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link.py").symlink_to(script(tmp_path / "there", FLEET, {"trainer.py": ""}))
    with pytest.raises(ValueError, match=HIDES):
        check_script(str(tmp_path / "link.py"))


def test_our_own_packages_beside_a_script_hide_nothing() -> None:
    """As in a checkout."""
    root = Path(__file__).parents[3]

    assert all((root / name / "__init__.py").is_file() for name in OURS)
    assert [hiding(root, name) for name in OURS] == [None] * 3


@pytest.mark.parametrize("command", ["launch", "plan"])
def test_commands_say_so_before_they_start_anything(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and the status of a mistake in what was typed, or of a refused script."""
    path = script(tmp_path, FLEET, {"trainer.py": ""})
    status = main([command, "--servers", "1", "--trainers", "1", path])
    out, err = capsys.readouterr()

    assert status == (2 if command == "launch" else 1) and out == ""
    assert err.count("\n") == 1 and f"trainer.py {HIDES} trainer" in err
