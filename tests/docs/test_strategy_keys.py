"""A test observes the effect of each key of a strategy."""

from __future__ import annotations

from docs.generators import strategy_keys
from transpiler.strategy.strategy import every_setting


def test_a_test_observes_every_key_that_acts() -> None:
    """A key that some job reads is one whose effect a test sees; tests name keys that exist."""
    settings, tests = dict(every_setting()), strategy_keys.observers()

    assert not [key for key in tests if key not in settings]
    acting = [key for key, setting in settings.items() if setting.modes or setting.jobs]
    assert not [key for key in acting if key not in tests]
