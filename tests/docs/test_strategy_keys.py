"""The page of all keys of a strategy, and that a test observes each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from transpiler.strategy.fields import every_setting

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("strategy_keys", DOCS / "strategy_keys.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_generated_one(generator: ModuleType) -> None:
    """``python docs/strategy_keys.py`` has been run since the last change."""
    assert (DOCS / "strategy_keys.md").read_text(encoding="utf-8") == generator.page()


def test_a_test_observes_every_key_that_acts(generator: ModuleType) -> None:
    """A key that some job reads is one whose effect a test sees; tests name keys that exist."""
    settings, tests = dict(every_setting()), generator.observers()

    assert not [key for key in tests if key not in settings]
    acting = [key for key, setting in settings.items() if setting.modes or setting.jobs]
    assert not [key for key in acting if key not in tests]
