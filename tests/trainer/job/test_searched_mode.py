"""The update mode that a search has found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pserver.launcher.planning.plan import Choice
from tests.support.eager_jobs import Servers
from trainer import fleet
from trainer.job.job import present

GEO = Choice("geo", 10, 1, 1, 0.001)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is such a script's; where its choice would be."""
    path = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    return Choice.beside(str(path))


def begun(servers: Servers, strategy: fleet.DistributedStrategy) -> list[str]:
    """The modes of a job with such a strategy."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(torch.nn.Linear(4, 2))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    communicator = present().communicator
    assert communicator is not None
    return [f"{lane.mode} {lane.k_steps}" for lane in communicator.plan.lanes]


@pytest.mark.observes("auto", "auto_search")
@pytest.mark.parametrize("switch", ["auto", "auto_search"])
@pytest.mark.parametrize(
    ("choice", "mode"), [(GEO, "geo 10"), (Choice("sync", 0, 1, 1, 0.001), "sync 0")]
)
def test_the_mode_is_that_which_was_chosen(
    servers: Servers, script: Path, switch: str, choice: Choice, mode: str
) -> None:
    """The file lies beside the script."""
    choice.write(script)
    strategy = fleet.DistributedStrategy()
    setattr(strategy, switch, True)

    assert begun(servers, strategy) == [mode]
    assert strategy.a_sync and getattr(strategy, switch)  # the user's own stays as it is
    fleet.finish()


def test_what_is_set_by_hand_and_what_chooses_it_are_both_named(script: Path) -> None:
    """One of the two has to go."""
    GEO.write(script)
    for by_hand in (False, True):  # True is its default, too
        strategy = fleet.DistributedStrategy()
        strategy.auto_search, strategy.a_sync = True, by_hand

        with pytest.raises(
            ValueError, match=r"strategy\.auto_search: excludes strategy\.a_sync, .* leave one"
        ):
            fleet.init(strategy=strategy)


def test_without_a_choice_the_job_says_how_to_make_one(servers: Servers, script: Path) -> None:
    """It does not train in another mode than was asked for."""
    strategy = fleet.DistributedStrategy()
    strategy.auto = True

    with pytest.raises(ValueError, match=r"expected the choice .*train\.plan\.json.*--write"):
        begun(servers, strategy)


@pytest.mark.parametrize(
    "changed", [{"mode": "best"}, {"k_steps": 0}, {"k_steps": True}, {"more": 1}, {"mode": "sync"}]
)
def test_a_file_of_something_else_is_refused(script: Path, changed: dict[str, object]) -> None:
    """The file is named."""
    GEO.write(script)
    script.write_text(json.dumps({**json.loads(script.read_text()), **changed}))

    with pytest.raises(ValueError, match=r"train\.plan\.json: expected what `pserver plan"):
        Choice.read(script)
