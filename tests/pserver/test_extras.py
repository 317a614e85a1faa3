"""Errors about missing packages name the extra, and quote the failed import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import pytest

from pserver.extras import extra
from pserver.storage.remote import RemotePlace
from trainer.data.pieces import files_at


@pytest.mark.parametrize(
    ("name", "absent", "use", "need"),
    [
        ("lightning", "lightning", lambda: import_module("trainer.lightning"), "needs Lightning"),
        ("transformers", "transformers", lambda: import_module("trainer.huggingface"), "needs tra"),
        ("s3", "s3fs", lambda: RemotePlace("s3://bucket/x"), "s3://bucket/x: it needs s3fs"),
        ("s3", "s3fs", lambda: files_at(["s3://bucket/*"]), r"s3://bucket/\*: it needs s3fs"),
    ],
)
def test_an_absent_package_is_named_with_its_extra(
    name: str, absent: str, use: Callable[[], object], need: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the original error is quoted, and its cause."""
    for module in ("trainer.lightning", "trainer.huggingface"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    known = import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "s3", raising=False)  # it may be loaded already
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
