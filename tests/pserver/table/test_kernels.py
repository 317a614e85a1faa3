"""Promises about how kernels are compiled and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.table import ids, kernels
from pserver.table import table as sparse_table
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table


def _first(values: np.ndarray) -> float:
    return values[0] + 1


def test_kernels_are_kept_under_a_digest_of_all_their_sources():
    """A change in any file that has kernels ends what was kept of all; no such file is left out of
    the digest.
    """
    folder = Path(kernels.__file__).parent
    having = {
        path.name
        for path in folder.glob("*.py")
        if "from pserver.table.kernels import" in path.read_text()
    }
    having = {name for name in having if "@kernel" in (folder / name).read_text()} | {"kernels.py"}
    assert having == set(kernels.SOURCES)
    compiled: Any = ids.mix
    assert compiled._cache._cache_file._source_stamp[-1] == kernels._digest()


def test_where_nothing_can_be_written_kernels_compile_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """A read-only installation costs compiling in each process, no more."""
    plain = kernels.njit

    def refusing(**facts: Any) -> Any:
        if facts.get("cache"):
            raise RuntimeError("cannot cache function '_first': no locator available")
        return plain(**facts)

    monkeypatch.setattr(kernels, "njit", refusing)
    assert kernels.kernel(_first)(np.array([1.0])) == 2.0


def test_a_server_compiles_before_it_is_ready():
    """After ``compile_kernels`` a table's first step compiles nothing."""
    table = Table("t", 3, (Segment(0, 3, 0),), rows=10)
    rules = [Rule("adagrad", {})]
    sparse_table.compile_kernels(table, rules)
    compiled: list[Any] = [
        value for module in ("rows", "ids", "index", "rules") for value in _kernels(module)
    ]
    before = [len(kernel.signatures) for kernel in compiled]
    one = sparse_table.SparseTable(table, rules)
    one.update(np.arange(5), np.ones((5, 3), np.float32), [{"lr": 0.1}])
    one.lookup(np.arange(10), np.empty((10, 3), np.float32))
    assert [len(kernel.signatures) for kernel in compiled] == before and sum(before) > 5


def _kernels(module: str) -> list[Any]:
    import importlib

    found = vars(importlib.import_module(f"pserver.table.{module}")).values()
    return [value for value in found if hasattr(value, "signatures")]
