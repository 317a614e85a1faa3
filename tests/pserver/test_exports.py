"""The package's lazy exports."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pserver
import trainer.fleet
import trainer.metrics
import trainer.nn.functional

FOLDER = Path(pserver.__file__).parent
STUBS = [
    path
    for path in (*FOLDER.glob("*.pyi"), *FOLDER.glob("nn/*.pyi"))
    if not path.stem.endswith("_pb2")
]


@pytest.mark.processes
def test_the_package_exports_the_server_lazily() -> None:
    """``import pserver`` and the parser of the command line import neither torch nor gRPC."""
    code = (
        "import pserver, sys, pserver.__main__ as m; m.parser(); "
        "print(*{'torch', 'grpc'} & set(sys.modules)); "
        "print(pserver.Server.__name__, pserver.ServerConfig.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split("\n")[:2] == ["", "Server ServerConfig"]


def test_public_modules_are_imported_by_statements() -> None:
    """Each is one module under both names, with its own spec; a module that is missing is."""
    import pserver.fleet
    import pserver.nn.functional
    from pserver.metrics import AUC
    from pserver.row_optimizers import Adam

    assert pserver.fleet is trainer.fleet and pserver.nn is trainer.nn
    assert pserver.nn.functional is trainer.nn.functional
    assert pserver.nn.functional.__spec__ is trainer.nn.functional.__spec__
    assert pserver.nn.functional.__spec__.name == "trainer.nn.functional"
    assert AUC is trainer.metrics.AUC and pickle.loads(pickle.dumps(Adam)) is Adam
    with pytest.raises(ModuleNotFoundError, match="No module named 'pserver.nn.absent'"):
        import_module("pserver.nn.absent")


def test_type_checkers_find_the_public_modules() -> None:
    """Each has a stub below ``pserver``, where a type checker looks for it; the packages have
    none, whose names are the whole ones.
    """
    stubs = {path.stem if path.stem != "__init__" else path.parent.name: path for path in STUBS}
    modules = {name: real for name, real in pserver._MODULES.items() if name != real}

    assert {*modules, "functional"} == {*stubs}
    for name, real in modules.items():
        assert f"\nfrom {real} import *\n" in stubs[name].read_text(encoding="utf-8")
