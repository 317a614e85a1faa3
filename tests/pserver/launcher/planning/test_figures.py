"""The file of what probes have measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pserver.launcher.planning.cost import Figures, JobLoad, LaneLoad, Measured, Probed
from pserver.launcher.planning.plan import PlanSettings, check_figures

LOAD = JobLoad(8, (LaneLoad("sync", True, 1, True, (80, 40), (80, 40)),), (400, 200), True)
ALONE = Measured(
    *(100, 0.012, 0.002, 0.011, 0.001, 1.0, 1.0, (8e6,), (8e6,), (1e6,), (0.0005,)),
    server_cpu_seconds=(0.001,),
)
FIGURES = Figures(2, True, "tcp", LOAD, {1: Probed(ALONE, replace(ALONE, seconds=0.014))})
SETTINGS = PlanSettings(2, 8, link=1e9, apart=True, figures="kept.json")


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    """With its load and both probes."""
    path = str(tmp_path / "kept.json")

    FIGURES.write(path)

    assert Figures.read(path) == FIGURES


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"load": 1}', '{"load": {"lanes": []}}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """And the message says what to do."""
    path = tmp_path / "kept.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"kept.json: expected what .* remove it to probe again"):
        Figures.read(str(path))


@pytest.mark.parametrize(
    ("load", "settings", "what"),
    [
        (replace(LOAD, trainers=9), SETTINGS, "the plan"),
        (LOAD, replace(SETTINGS, link=None), "--link"),
        (LOAD, replace(SETTINGS, apart=False), "--hosts"),
    ],
)
def test_figures_hold_for_their_job(load: JobLoad, settings: PlanSettings, what: str) -> None:
    """On any link; one server is all that a search on 2 cores probes, too."""
    check_figures(FIGURES, LOAD, replace(SETTINGS, link=2e9, latency=0.001, search=True))

    with pytest.raises(ValueError, match=f"kept.json has figures of another job: {what}"):
        check_figures(FIGURES, load, settings)


def test_a_search_on_one_machine_needs_its_own() -> None:
    """One server and two, where the file has two alone."""
    found = replace(FIGURES, apart=False, probes={2: FIGURES.probes[1]})
    settings = replace(SETTINGS, apart=False)

    check_figures(found, LOAD, settings)
    with pytest.raises(ValueError, match="--search differs"):
        check_figures(found, LOAD, replace(settings, search=True))
