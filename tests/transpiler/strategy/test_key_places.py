"""A key of ``a_sync_configs`` is declared once: what follows from its row of settings is there, or
is written by ``pytest --rewrite``.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.support.key_places import ROOT, missing
from transpiler.plan.plan import UNSAID, Lane
from transpiler.plan.settings import A_SYNC_CONFIGS, Setting, above, count, table


def test_every_key_is_in_all_of_its_places(request: pytest.FixtureRequest) -> None:
    """The message has the line that is missing."""
    found = list(missing())
    if request.config.getoption("--rewrite"):
        for each in found:
            path = ROOT / each.path
            path.write_text(each.written(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert [str(each) for each in found] == []


def test_a_new_key_needs_its_row_alone() -> None:
    """Its other lines are known, at places that the files have."""
    factor = Setting("new_factor", 2.5, above(1.0), "How far is far.", ("sync",), lane="new_factor")
    of_trainers = Setting("new_count", 3, count(least=0), "How many.", ("sync",))
    found = list(missing(table(*A_SYNC_CONFIGS.values(), factor, of_trainers)))
    lines = [(each.path.rpartition("/")[2], each.text.strip()) for each in found]

    next_number = 1 + max(
        int(line.partition(" = ")[2].rstrip(";"))
        for name, line in lines
        if name == "strategy.proto" and "new_factor" in line
    )
    assert lines == [
        ("strategy.proto", f"optional double new_factor = {next_number - 1};"),
        ("distribute_config.py", "new_factor: float"),
        ("program.proto", lines[2][1]),
        ("plan.py", "new_factor: how far is far."),
        ("plan.py", "new_factor: float = 2.5"),
        ("strategy.proto", f"optional int64 new_count = {next_number};"),
        ("distribute_config.py", "new_count: int"),
    ]
    assert lines[2][1].startswith("optional double new_factor = ")
    for each in found:
        source = (ROOT / each.path).read_text(encoding="utf-8")
        assert each.text in each.written(source) and each.text not in source


def test_the_defaults_of_a_lane_are_those_of_its_keys() -> None:
    """Manifests leave such fields out, so that plans of before keep their fingerprints."""
    defaults = {each.name: each.default for each in fields(Lane)}
    for setting in A_SYNC_CONFIGS.values():
        if setting.lane in UNSAID:
            assert defaults[setting.lane] == setting.default == UNSAID[setting.lane]
    assert replace(Lane("sync"), **UNSAID) == Lane("sync")
