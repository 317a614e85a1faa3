"""What is installed is whole: the wheel works outside of the checkout, the sdist can make it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from pserver import __version__
from tests.support.pages import ROOT
from tests.support.tiers import RARE

SECONDS = 240.0
PACKAGES = ("transpiler", "pserver", "trainer")
SOURCES = (*PACKAGES, "protos", "docs")
FILES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"),
    "mkdocs.yml",
)
CLUSTER = re.compile("TRAINING_ROLE|TRAINER|CURRENT_ENDPOINT|PSERVER_|RANK|WORLD_SIZE|MASTER_")
EXAMPLES = {
    "digits": ("--epochs", "1"),
    "transpiler_by_hand": ("--steps", "5"),
    "ctr": ("--samples", "2048", "--categories", "50"),
}
ALONE, LAUNCHED = ("digits", "transpiler_by_hand"), ("ctr",)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def run(*command: str, cwd: Path, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not CLUSTER.match(key)}
    kept = {key: value for key, value in kept.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from it."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
        )
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder))
    tools = os.environ.get("PYTHONPATH", "")
    run(*command, str(checkout), cwd=folder, PYTHONPATH=tools)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a new virtual environment that has the wheel, and of this one's packages all
    but the checkout.
    """
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(place), cwd=place)
    python = str(place / "bin" / "python")
    wheel = str(next(built.glob("*.whl")))
    here = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place
        ).strip()
    )
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    # A line of a .pth file is a folder.  The .pth files in that folder (an editable install of the
    # checkout is one) are not read.
    (here / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_sdist_has_the_protos_and_no_tests(built: Path) -> None:
    """It has what the packages are made from, and what types them."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "protos/generate",
        "protos/pserver/wire.proto",
        "protos/transpiler/program.proto",
        "protos/transpiler/strategy.proto",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "deploy"))]


def test_the_wheel_has_every_module_and_is_typed(built: Path) -> None:
    """It has each module of the checkout, the examples among them, stubs, the marks of PEP 561 and
    the files of the page, the tables of names; its version is ``pserver.__version__``.
    """
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for kind in ("*.py", "*.pyi", "py.typed", "static/*", "*.toml")
        for path in (ROOT / package).rglob(kind)
    }

    assert wheel.name == f"pserver-{__version__}-py3-none-any.whl"
    assert {f"{package}/py.typed" for package in PACKAGES} <= modules <= names
    assert {"pserver/web/static/page.js", "transpiler/names/root.toml"} <= modules
    assert {name.partition("/")[0] for name in names} == {
        *PACKAGES,
        f"pserver-{__version__}.dist-info",
    }


def test_the_command_works_where_the_wheel_is_installed(python: str, tmp_path: Path) -> None:
    """``pserver`` and ``python -m pserver`` are one command; nothing comes from the checkout."""
    asked = run(python, "-m", "pserver", "--help", cwd=tmp_path)
    where = "import importlib.metadata as m, transpiler, pserver, trainer\n"
    where += "print(m.version('pserver'), transpiler.__file__, pserver.__file__, trainer.__file__)"
    said = run(python, "-c", where, cwd=tmp_path).split()

    assert "launch" in asked and asked == run(
        str(Path(python).with_name("pserver")), "--help", cwd=tmp_path
    )
    assert said[0] == __version__
    assert all(Path(file).is_relative_to(Path(python).parent.parent) for file in said[1:])


@pytest.mark.parametrize("example", [ALONE[0], *map(RARE, ALONE[1:])])
def test_an_example_runs_alone(example: str, python: str, tmp_path: Path) -> None:
    """``python -m trainer.examples.NAME`` trains in one process."""
    out = run(python, "-m", f"trainer.examples.{example}", *EXAMPLES[example], cwd=tmp_path)

    assert re.search(r"accuracy 0\.\d|auc 0\.\d|weight -?\d", out)


@pytest.mark.long
@pytest.mark.parametrize("example", LAUNCHED)
def test_an_example_runs_on_a_cluster(example: str, python: str, tmp_path: Path) -> None:
    """``pserver launch`` runs the installed file with one server and one trainer."""
    file = f"import trainer.examples as found; print(found.__path__[0] + '/{example}.py')"
    script = run(python, "-c", file, cwd=tmp_path).strip()
    command = (
        str(Path(python).with_name("pserver")),
        "launch",
        "--servers",
        "1",
        "--trainers",
        "1",
    )
    out = run(*command, script, *EXAMPLES[example], cwd=tmp_path)

    assert re.search(r"accuracy 0\.\d|auc 0\.\d", out)
