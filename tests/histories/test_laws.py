"""The facts that the laws judge by, from a few commands: without sockets and without a clock."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checker.history import History
from tests.checker.laws import Laws
from tests.support.interaction import interaction, plan_of


class Sent:
    """A channel over which a commit has gone."""

    def __init__(self) -> None:
        self._awaited = SimpleNamespace(reply=Future[Any]())


@pytest.mark.parametrize(
    ("when", "found"),
    [("it is back", []), ("it is away", ["0a takes step 3, and trainer 1 has taken 0"])],
)
def test_a_record_that_server_0_has_written_counts_where_nobody_took_it(
    tmp_path: Path, when: str, found: list[str]
) -> None:
    """Under a bounded staleness of 1 trainer 0 waits at step 2 for step 1 of trainer 1.  Server 0
    dies behind the record of that.  Its next process stands there, so trainer 0 takes step 3; not
    before that.
    """
    history, channel = History(), Sent()
    history.follow("0a", [(0, 0, channel)])  # type: ignore[list-item]
    with history.taken_down(), interaction(tmp_path) as story:

        def run(*lines: str) -> list[str]:
            return [said for line in lines for said in story.run(line)]

        def sends() -> None:
            history._committed(channel, 3, {}, ())  # type: ignore[arg-type]

        run("job mode=stale servers=2 trainers=2", "join trainer=0a", "join trainer=1b", "deliver")
        run("save trainer=0a number=1", "deliver")
        run("step trainer=0a step=1", "deliver", "step trainer=0a step=2", "deliver")
        history.dies(story._servers[0].installed().decisions)
        said = run("step trainer=1b step=1", "deliver 1->0")
        assert "server 0, record 6: decided 1b/1" in said
        run("lose server=0")
        if when == "it is away":
            sends()
        run("restart server=0", "join trainer=0a server=0", "join trainer=0a server=0")
        run("join trainer=1b server=0")
        assert run("step trainer=0a step=2 server=0") == ["0a/2 on server 0: applied, w=0"]
        if when == "it is back":
            sends()
        run("deliver", "step trainer=1b step=2", "deliver")
        held = story._servers[0].installed()

    assert held.decisions.coordinator is not None, "it is server 0"
    log = list(held.decisions.coordinator._recent)
    lives = SimpleNamespace(held=[held], log=lambda history: log)
    world = SimpleNamespace(plan=plan_of("stale", trainers=2, servers=2))
    laws = Laws(world, history, lives, [])  # type: ignore[arg-type]
    assert log[-1].number == 7
    assert list(laws._near()) == found
