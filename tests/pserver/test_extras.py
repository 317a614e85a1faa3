"""Errors about missing packages name the extra, and quote the failed import."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from fsspec.registry import _registry as drivers

import pserver.ray
from pserver.extras import extra
from pserver.storage.remote import RemotePlace
from pserver.table.tiered import ColdRows
from tests.support.floors import PROJECT, TOOLS
from trainer import fleet
from trainer.data.formats import format_of
from trainer.data.pieces import files_at

# by extra: a module that it brings, what needs that module, and the beginning of the error
USES: list[tuple[str, str, Callable[[], object], str]] = [
    ("data", "pyarrow", lambda: format_of("csv", [fleet.Slot("x")]), "parser='csv' needs pyarrow"),
    ("data", "pyarrow", lambda: format_of("parquet", [fleet.Slot("x")]), "parser='parquet' needs"),
    ("disk", "rocksdict", lambda: ColdRows({}, Path()), r"rows on disk \(memory_bytes\) need"),
    ("examples", "sklearn", lambda: import_module("trainer.examples.digits"), "need scikit-learn"),
    ("lightning", "lightning", lambda: import_module("trainer.lightning"), "needs Lightning"),
    ("ray", "ray", lambda: pserver.ray.run(print), "pserver.ray.run needs Ray"),
    ("s3", "s3fs", lambda: RemotePlace("s3://bucket/x"), "s3://bucket/x: it needs s3fs"),
    ("s3", "s3fs", lambda: files_at(["s3://bucket/*"]), r"s3://bucket/\*: it needs s3fs"),
    ("tensorboard", "torch.utils.tensorboard", fleet.init, "PSERVER_TENSORBOARD=.* needs TensorB"),
    ("transformers", "accelerate", lambda: import_module("trainer.huggingface"), "and accelerate"),
    ("transformers", "transformers", lambda: import_module("trainer.huggingface"), "needs tra"),
]


def test_every_extra_has_a_row() -> None:
    """Of those that users install, and that are no other name of one."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    aliases = {name for name in extras if all(each.startswith("pserver[") for each in extras[name])}

    assert {name for name, *_ in USES} == {*extras} - aliases - {*TOOLS}


@pytest.mark.parametrize(
    ("name", "absent", "use", "need"), USES, ids=lambda value: value if type(value) is str else ""
)
def test_an_absent_package_is_named_with_its_extra(
    name: str, absent: str, use: Callable[[], object], need: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the original error is quoted, and its cause."""
    for module in ("trainer.lightning", "trainer.huggingface", "trainer.examples.digits"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delitem(drivers, "s3", raising=False)  # imported before
    monkeypatch.setenv("PSERVER_TENSORBOARD", "events")
    for module in [each for each in sys.modules if each.startswith(f"{absent}.")]:
        monkeypatch.delitem(sys.modules, module)  # they are found without their package
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ImportError, match=rf"{need}.*: pip install '\.\[{name}\]' in a") as caught:
        use()

    assert str(caught.value.__cause__) in str(caught.value)


def test_a_package_that_fails_by_itself_is_quoted() -> None:
    """The error keeps its class, and the name of the module that is missing."""
    with pytest.raises(
        ModuleNotFoundError, match=r"'\.\[disk\]' .* \(No module named 'lib'\)"
    ) as e:
        with extra("disk", "rows on disk need rocksdict"):
            raise ModuleNotFoundError("No module named 'lib'", name="lib")

    assert e.value.name == "lib"
