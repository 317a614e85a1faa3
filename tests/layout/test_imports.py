"""Promises about the rooms: which way imports go, what is pure, what lies at a package's root."""

from __future__ import annotations

import ast
import importlib
import sys

import pytest

from tests.support.sources import (
    GENERATED,
    MODULES,
    PACKAGES,
    ROOT,
    first_names,
    imported,
    levels,
    modules_graph,
    nodes,
    relative,
    rooms_graph,
)

# What a package may import besides the standard library; torch's symbolic sizes are sympy's.
TRANSPILER = {"transpiler", "torch", "numpy", "safetensors", "google", "sympy"}
TRANSPILER |= {"typing_extensions"}  # for type checkers alone
IMPURE = {"threading", "socket", "time", "os", "subprocess", "multiprocessing", "concurrent"}
IMPURE |= {"asyncio", "queue", "grpc", "pyarrow"}
PURE = ("transpiler/", "pserver/table/", "pserver/dense/", "pserver/leases/")
PURE += ("pserver/telemetry/job_view.py",)
PURE += ("pserver/job_log/own_state.py",)
PURE += tuple(f"pserver/job_log/{name}.py" for name in ("coordinator", "files", "records"))
EXCEPT = {
    "transpiler/files/files.py": {"os"},  # what is saved is synced and renamed
    "transpiler/tracing/equivalence_check.py": {"random"},  # puts back what a step has drawn
    "pserver/table/tiered.py": {"os", "threading"},  # rows in RocksDB
    "pserver/job_log/files.py": {"os"},  # an entry is one write
    "pserver/table/index.py": {"os"},  # how much memory the machine has
}
# Files with imports of our own inside functions, and what is spared by each until it is needed.
LAZY = {
    "pserver/__main__.py": "torch, for `pserver --help`",
    "pserver/job/program.py": "the kernels of rows, for jobs without tables",
    "pserver/security/keys.py": "the package cryptography, for processes without keys",
    "pserver/table/gradient.py": "the kernels of rows, for trainers without tables",
    "trainer/checkpoint/export.py": "the kernels of rows",
    "trainer/executor/values.py": "the kernels of rows",
    "trainer/communicator/communicator.py": "the kernels of rows",
    "trainer/data/datasets.py": "the kernels of text",
    "trainer/embedding/autograd.py": "the kernels of rows, for `import DistributedEmbedding`",
    "trainer/embedding/conversion.py": "the kernels of rows",
    "trainer/embedding/embedding.py": "the kernels of rows, for `import DistributedEmbedding`",
    "trainer/embedding/joined_lookups.py": "the kernels of rows, for `import DistributedEmbedding`",
    "trainer/embedding/local_rows.py": "the kernels of rows, for `import DistributedEmbedding`",
    "trainer/executor/executor.py": "the kernels of rows",
    "trainer/executor/program_training.py": "the kernels of rows",
    "trainer/executor/pserver_runtime.py": "the kernels of rows",
    "trainer/fleet.py": "torch's FSDP2, which takes half a second",
    "trainer/hybrid/parallel.py": "torch's FSDP2",
    "trainer/job/job.py": "the kernels of rows",
    "trainer/job/save_load.py": "the kernels of rows",
    "trainer/job/search.py": "the planner of launch, for strategy.auto",
    "trainer/sharding/levels.py": "torch's FSDP2",
    "transpiler/tracing/backward.py": "torch's tracer, for processes that capture nothing",
    "transpiler/tracing/capture.py": "torch's tracer, for processes that capture nothing",
    "transpiler/tracing/register_rule.py": "torch's tracer, for processes without such a rule",
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core"}


def test_imports_go_one_way() -> None:
    """transpiler <- pserver <- trainer: nothing imports what comes after it.  ``pserver/__init__``
    lists the public names of all three, for type checkers.
    """
    for path in set(MODULES) - {ROOT / "pserver/__init__.py"}:
        later = PACKAGES[PACKAGES.index(relative(path).partition("/")[0]) + 1 :]

        assert not first_names(path) & set(later), relative(path)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions, and those for type checkers alone, count as well."""
    levels(modules_graph())


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_rooms_go_one_way(package: str) -> None:
    """A folder is a layer: no circle of folders."""
    levels(rooms_graph(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_entries_of_a_root_are_nouns(package: str) -> None:
    """A package's root has no file or folder for the rest."""
    entries = {path.stem for path in (ROOT / package).iterdir()}

    assert not FORBIDDEN_NAMES & entries


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_the_name_of_an_export(package: str) -> None:
    """A function would hide the folder."""
    folders = {path.parent.name for path in MODULES if path.parent.parent == ROOT / package}

    assert not folders & set(getattr(importlib.import_module(package), "__all__", ()))


def test_pure_folders_are_pure() -> None:
    """No clock, thread, socket or environment: the same input gives the same output."""
    for path in MODULES:
        name = relative(path)
        if name.startswith(PURE):
            assert not first_names(path) & (IMPURE - EXCEPT.get(name, set())), name
        if name.startswith("transpiler/"):
            outside = first_names(path) - set(sys.stdlib_module_names)

            assert not outside - TRANSPILER, name


def test_imports_inside_functions_are_few() -> None:
    """Only what takes long to import, and what few need, is imported late."""
    late = set()
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                inside = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                names = {getattr(n, "module", None) or n.names[0].name for n in inside}
                if any(str(name).partition(".")[0] in PACKAGES for name in names):
                    late.add(relative(path))

    assert late == set(LAZY)


def test_a_trainer_imports_no_generated_message() -> None:
    """The protocol has one owner: pserver/client."""
    for path in MODULES:
        if relative(path).startswith("trainer/"):
            assert not [name for name in imported(path) if name.endswith(GENERATED)], relative(path)
