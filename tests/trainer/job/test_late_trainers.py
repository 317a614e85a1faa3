"""A trainer that joins a job under way goes on where the others are, and its script is theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.optim.lr_scheduler import StepLR

from pserver.checkpoint import manifest
from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.storage.place import place_at
from tests.support.threaded_scripts import SAMPLES, Script, kill
from tests.support.threads import at_once
from tests.support.waiting import eventually
from trainer.checkpoint.checkpoint_folder import CheckpointFolder
from trainer.data.datasets import NUMBER, exchanged
from trainer.job.shared_values import gathered

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with Server(ServerConfig()) as one, Server(ServerConfig()) as other:
        yield [one, other]


def pair(servers: list[Server], **settings: object) -> list[Script]:
    return at_once(*(lambda n=n: Script(servers, n, **settings) for n in (0, 1)))  # type: ignore[misc]  # of lambdas


@pytest.mark.parametrize("lost", [0, 1])
def test_a_late_trainer_has_the_schedule_of_the_others(servers: list[Server], lost: int) -> None:
    """At its first step, of a loop of the script's own; also where trainer 0 comes back."""
    scripts = pair(servers)
    schedules = [StepLR(each.optimizer, 3, 0.5) for each in scripts]
    for _ in range(7):
        for script, schedule in zip(scripts, schedules, strict=True):
            script.step()
            schedule.step()
    kill(servers, scripts[lost])
    left, placed = scripts[1 - lost], threading.Event()

    def goes_on() -> None:
        while not placed.is_set():
            left.step()
            schedules[1 - lost].step()

    def comes() -> tuple[int, int, int, float]:
        try:
            late = Script(servers, lost)
            schedule = StepLR(late.optimizer, 3, 0.5)
            late.step()
            theirs = schedules[1 - lost].last_epoch
            assert late.job.is_first is False
            scripts[lost] = late
            return late.optimizer.steps, schedule.last_epoch, theirs, late.rate
        finally:
            placed.set()

    _, (steps, last, theirs, rate) = at_once(goes_on, comes)

    # the others have gone on between its joining and their answer, and since then
    assert 7 <= steps - 1 <= last <= theirs and rate == 0.5 ** (last // 3)
    at_once(*(each.finish for each in scripts))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_late_trainer_of_a_sync_job_steps_as_the_others(servers: list[Server], lost: int) -> None:
    """The others wait for it, and both have one number of steps, one schedule and one rate."""
    scripts = pair(servers, a_sync=False)
    schedules = [StepLR(each.optimizer, 3, 0.5) for each in scripts]

    def steps(script: Script, schedule: StepLR, count: int) -> tuple[int, int, float]:
        for _ in range(count):
            script.step()
            schedule.step()
        return script.optimizer.steps, schedule.last_epoch, script.rate

    at_once(*(lambda n=n: steps(scripts[n], schedules[n], 7) for n in (0, 1)))  # type: ignore[misc]  # of lambdas
    kill(servers, scripts[lost])

    def comes() -> tuple[int, int, float]:
        scripts[lost] = late = Script(servers, lost, a_sync=False)
        return steps(late, StepLR(late.optimizer, 3, 0.5), 3)

    left = 1 - lost
    found = at_once(lambda: steps(scripts[left], schedules[left], 3), comes)

    assert found == [(10, 10, 0.125)] * 2
    at_once(*(each.finish for each in scripts))


def test_passes_that_are_over_give_no_batch(servers: list[Server]) -> None:
    """Each sample of each epoch is trained on once by somebody; the schedules are one."""
    scripts = pair(servers)
    seen: list[list[int]] = [[], [], []]

    def epochs(script: Script, dies_in: int = -1) -> float:
        schedule = StepLR(script.optimizer, 1, 0.5)
        for epoch in range(3):
            for number, batch in enumerate(script.shard(), 1):
                script.step()
                seen[epoch] += batch.tolist()
                if epoch == dies_in and number == 2:
                    script.optimizer.flush()  # its steps are decided
                    kill(servers, script)
                    return epochs(Script(servers, 1))
            schedule.step()
        rate = script.rate
        script.finish()
        return rate

    rates = at_once(lambda: epochs(scripts[0]), lambda: epochs(scripts[1], 1))

    assert rates == [0.125, 0.125]
    assert [sorted(each) for each in seen] == [list(range(SAMPLES))] * 3


def test_joint_calls_of_epochs_that_are_over_give_what_they_gave(servers: list[Server]) -> None:
    """The late trainer makes none of them with the others, but the one in which these wait."""
    scripts = pair(servers)

    def script_of(script: Script, dies: bool = False) -> list[dict[int, str]]:
        told = [script.meet("begin", f"begins {script.number}")]
        for epoch in range(3):
            for number, _ in enumerate(script.shard(), 1):
                script.step()
                if dies and epoch == 2 and number == 1:
                    kill(servers, script)
                    return script_of(Script(servers, 1))
            told.append(script.meet("epoch", f"{epoch} of {script.number}"))
        script.finish()
        return told

    one, other = at_once(lambda: script_of(scripts[0]), lambda: script_of(scripts[1], True))

    assert one[:3] == other[:3] and one[1] == {0: "0 of 0", 1: "0 of 1"}
    assert one[3] in ({0: "2 of 0"}, {0: "2 of 0", 1: "2 of 1"})


def test_a_late_trainer_keeps_its_samples_in_a_shuffle_that_is_over(servers: list[Server]) -> None:
    """Its next joint call is the one behind that shuffle."""
    scripts = pair(servers)
    read = [{NUMBER: np.arange(4) + 4 * number} for number in (0, 1)]

    def script_of(script: Script, dies: bool = False) -> list[list[int]]:
        found, own = [], read[script.number]
        assert script.job.communicator is not None
        for epoch in range(2):
            for number, _ in enumerate(script.shard(), 1):
                script.step()
                if dies and epoch == 1 and number == 1:
                    kill(servers, script)
                    return script_of(Script(servers, 1))
            to = (np.asarray(own[NUMBER]) + epoch) % 2
            own = dict(exchanged(gathered(script.job.communicator), own, to, lambda count: None))
            found.append(sorted(np.asarray(own[NUMBER]).tolist()))
            script.meet("epoch")
        script.finish()
        return found

    one, other = at_once(lambda: script_of(scripts[0]), lambda: script_of(scripts[1], True))

    assert one[0] == [0, 2, 4, 6] and other[0] == [4, 5, 6, 7]
    # it has read its own once more; trainer 0 may be through with the second shuffle when it comes
    assert (one[1], other[1]) in (([5, 7], [0, 2, 4, 4, 6, 6]), ([], [4, 5, 6, 7]))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_late_trainer_saves_with_the_others(
    servers: list[Server], tmp_path: Path, lost: int
) -> None:
    """Whatever they do when it comes, wait for it in a save too; and a script that is started again
    goes on from a checkpoint that was written with it.
    """
    folder = str(tmp_path / "saved")
    scripts = pair(servers, checkpoint=folder)
    late: list[Script] = []

    def epochs(script: Script, dies: bool = False) -> Script:
        schedule = StepLR(script.optimizer, 1, 0.5)
        for epoch in range(3):
            if epoch == 2:
                eventually(lambda: bool(late))
            for number, _ in enumerate(script.shard(), 1):
                script.step()
                if dies and epoch == 1 and number == 2:
                    script.optimizer.flush()
                    kill(servers, script)
                    late.append(Script(servers, lost, checkpoint=folder))
                    return epochs(late[0])
            schedule.step()
        script.finish()
        return script

    at_once(*(lambda n=n: epochs(scripts[n], n == lost) for n in (0, 1)))  # type: ignore[misc]  # of lambdas

    names = CheckpointFolder(folder, 3).paths()
    place = manifest.read(place_at(names[0])).meta["place"]
    # the newest whole one may be of a moment just before it came
    assert {trainer for trainer, _ in place["trainers"]} <= {0, 1} and place["of"] == 2
    assert late[0].job.is_first is False
    again = pair(servers, checkpoint=folder)
    assert [each.optimizer.steps > 0 for each in again] == [True, True]
    at_once(*(each.finish for each in again))
