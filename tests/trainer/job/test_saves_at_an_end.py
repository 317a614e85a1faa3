"""A trainer that comes back when the others have used up the pass: it waits for samples, and they
wait for it in a save.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.threaded_scripts import SAMPLES, Script, kill
from tests.support.threads import at_once
from tests.support.tiers import RARE
from trainer.job.automatic_saves import AutomaticSaves

pytestmark = pytest.mark.timeout(60)

PATIENCE = 20.0
OUTER = {"type": "sgd", "lr": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"a_sync": False, "a_sync_configs": {"lost_trainer": "go_on"}},
    "async": {"a_sync_configs": {}},
    "staleness": {"a_sync_configs": {"staleness": 2}},
    "diloco": {"a_sync_configs": {"k_steps": 2, "outer_optimizer": OUTER}},
}


@pytest.mark.parametrize("lost", [0, RARE(1)])
@pytest.mark.parametrize("mode", ["sync", "diloco", RARE("async"), RARE("staleness")])
def test_who_comes_back_at_the_end_of_a_pass_saves_with_the_others(
    tmp_path: Path, mode: str, lost: int
) -> None:
    """Although it gets no batch of that pass, and its script is not yet where theirs is."""
    settings, folder = MODES[mode], str(tmp_path / "saved")
    died, used_up, back = threading.Event(), threading.Event(), threading.Event()
    with Server(ServerConfig()) as one, Server(ServerConfig()) as other:
        servers = [one, other]

        def script(number: int) -> Script:
            return Script(servers, number, checkpoint=folder, **settings)

        def stays(own: Script) -> int:
            for epoch in range(2):
                for number, _ in enumerate(own.shard(), 1):
                    if not epoch and number == 5:
                        assert died.wait(PATIENCE)
                    own.step()
                    own.optimizer.flush()
                    held = servers[0].job.installed()
                    if not epoch and held.leases.accounts[0].decided == SAMPLES:
                        used_up.set()
                        assert back.wait(PATIENCE)  # and then it saves
            own.finish()
            return own.optimizer.steps

        def comes_back(own: Script) -> int:
            for number, _ in enumerate(own.shard(), 1):
                own.step()
                if number == 4:
                    break
            own.optimizer.flush()
            kill(servers, own)
            died.set()
            assert used_up.wait(PATIENCE)
            again = script(lost)
            back.set()
            for _ in range(2):
                for _ in again.shard():
                    again.step()
            again.finish()
            return again.optimizer.steps

        scripts = at_once(*(lambda n=n: script(n) for n in (0, 1)))  # type: ignore[misc]  # of lambdas
        taken = at_once(
            *(lambda n=n: (comes_back if n == lost else stays)(scripts[n]) for n in (0, 1))  # type: ignore[misc]  # of lambdas
        )

    assert all(taken), taken


def test_without_that_the_rule_puts_the_save_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One who looks for no save while it waits for samples holds up the others for a while only."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(AutomaticSaves, "waits", lambda saves: None)
    test_who_comes_back_at_the_end_of_a_pass_saves_with_the_others(tmp_path, "diloco", 0)

    assert any("is put off" in each for each in caplog.messages)


@pytest.mark.parametrize("checkpoint", [True, RARE(False)])
def test_who_comes_back_at_the_end_of_a_pass_comes_to_the_call_of_the_others(
    tmp_path: Path, checkpoint: bool
) -> None:
    """Which they make at the end of each iteration, of which it makes none any more."""
    settings = MODES["sync"] | {"checkpoint": str(tmp_path / "saved") if checkpoint else ""}
    died, used_up, back = threading.Event(), threading.Event(), threading.Event()
    with Server(ServerConfig()) as one, Server(ServerConfig()) as other:
        servers = [one, other]

        def stays(own: Script) -> list[int]:
            sizes = []
            for epoch in range(2):
                for number, _ in enumerate(own.shard(), 1):
                    if not epoch and number == 5:
                        assert died.wait(PATIENCE)
                    own.step()
                    held = servers[0].job.installed()
                    if not epoch and held.leases.accounts[0].decided == SAMPLES:
                        used_up.set()
                        assert back.wait(PATIENCE)
                    sizes.append(len(own.meet("mean", str(own.number))))
            own.finish()
            return sizes

        def comes_back(own: Script) -> list[int]:
            for number, _ in enumerate(own.shard(), 1):
                own.step()
                own.meet("mean", str(own.number))
                if number == 4:
                    break
            kill(servers, own)
            died.set()
            assert used_up.wait(PATIENCE)
            again = Script(servers, 0, **settings)
            back.set()
            sizes = []
            for _ in range(2):
                for _ in again.shard():
                    again.step()
                    sizes.append(len(again.meet("mean", str(again.number))))
            again.finish()
            return sizes

        scripts = at_once(*(lambda n=n: Script(servers, n, **settings) for n in (0, 1)))  # type: ignore[misc]  # of lambdas
        came, stayed = at_once(lambda: comes_back(scripts[0]), lambda: stays(scripts[1]))

    assert came == [2] * 6 and stayed[-6:] == [2] * 6, (came, stayed)
