"""``launch --max-restarts`` in a job that outlives a trainer: that trainer alone starts again, and
its script goes on where those of the others are: in the pass, in the schedule, at the joint calls,
and at the saves.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.cluster.scripted_jobs import ended, launched, records, said, trained
from tests.cluster.scripted_trainer import Plan
from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

EPOCHS = 3
FILES = (15, 3, 17, 6, 0, 25, 8, 13, 20)  # samples
EQUAL_FILES = (12,) * 9
SAVES = ("--checkpoint", "saved", "--every", "0.2")


def dying(mode: str, data: str, victim: int = 1, trainers: int = 2, restarts: int = 1) -> Plan:
    """A trainer dies in its second epoch; the others leave it its part, which whoever comes in its
    place goes on with.
    """
    files = () if data in ("samples", "iterable") else FILES
    if data == "memory" and trainers == 3:
        files = EQUAL_FILES  # what is not shuffled has to be alike on all
    awaited = "back" if restarts else "struck"
    waits = [(n, "1: 8", f"wait {awaited}") for n in range(trainers) if n != victim]
    if mode == "sync":
        waits = []  # each of its steps has all trainers
    if not restarts:  # launch asks servers about the victim before the job ends
        waits += [(n, "2: 1", "wait known") for n in range(trainers) if n != victim]
    dies = [(victim, "1: 4", "flush"), (victim, "1: 4", "SIGKILL")]
    back = (victim, "joined again", "mark back")
    samples = sum(files) or 120
    batch = 2 if files else 4
    at = (*waits, *dies, back)
    return Plan(
        mode,
        False,
        {},
        trainers,
        data=data,
        samples=samples,
        batch=batch,
        epochs=EPOCHS,
        files=files,
        at=at,
    )


@pytest.mark.parametrize(
    ("mode", "data", "victim"),
    [
        ("async", "samples", 1),
        RARE("async", "samples", 0),
        RARE("async", "iterable", 1),
        RARE("async", "queue", 1),
        RARE("half_async", "samples", 0),
        RARE("half_async", "samples", 1),
        RARE("staleness", "samples", 1),
        RARE("geo by 3", "samples", 1),
        RARE("sync", "samples", 1),
        RARE("sync", "queue", 1),
        RARE("sync", "memory", 1),
        RARE("sync", "shuffled", 1),
        RARE("async", "memory", 1),
        RARE("async", "shuffled", 1),
    ],
)
def test_a_trainer_comes_back_to_where_the_others_are(
    processes: Processes, mode: str, data: str, victim: int
) -> None:
    """Every sample of every epoch is trained on once; sums over trainers and schedules are those of
    the others, which nobody starts again.
    """
    plan = dying(mode, data, victim)
    text = ended(launched(processes, plan, 2, "--max-restarts", "2"))

    assert "killed by SIGKILL): starts it again (restart 1 of 2); the others go on" in text, text
    assert "starts the job again" not in text, text
    assert len(re.findall(rf"server \d *\| .* trainer {victim} has ended: .*the job", text)) == 2
    begun = re.findall(r"trainer (\d) *\| begins at (\d+)", text)
    assert sorted(begun[:2]) == [("0", "0"), ("1", "0")] and len(begun) == 3, text
    assert begun[2][0] == str(victim) and int(begun[2][1]) > 0, text
    assert trained(text, EPOCHS) == [Counter(range(plan.samples))] * EPOCHS, text
    for epoch in range(EPOCHS):
        told = re.findall(rf"epoch {epoch} (\[.*\])", text)
        assert len(told) == (3 if epoch == 0 else 2) and len({*told}) == 1, text
    if mode == "async":
        assert set(records(text)[-1]["samples"]) == {EPOCHS}, text


@pytest.mark.long  # the test before, and tests/trainer/job/test_sample_leases.py, stand for it
@pytest.mark.parametrize(
    ("mode", "data"),
    [
        ("sync", "shuffled"),
        ("sync", "queue"),
        ("sync", "memory"),
        ("async", "queue"),
        ("async", "memory"),
        ("async", "shuffled"),
        ("sync", "samples"),
    ],
)
def test_its_samples_go_to_the_others_where_nobody_comes(
    processes: Processes, mode: str, data: str
) -> None:
    """At once: launch has no restart left.  The next epoch is whole, too."""
    plan = dying(mode, data, trainers=3, restarts=0)
    launch = launched(processes, plan, 2)
    said(launch, "trainer 1 failed with status 137", 1)
    (processes.path / "known").touch()
    text = ended(launch)

    waits = "no process takes trainer 1's place again" in text
    assert waits == (mode == "sync"), text
    assert trained(text, EPOCHS) == [Counter(range(plan.samples))] * EPOCHS, text
    if mode == "async":
        assert set(records(text)[-1]["samples"]) == {EPOCHS}, text


@pytest.mark.long  # the test before, and tests/trainer/job/test_late_trainers.py, stand for it
def test_the_others_go_on_where_they_save_by_themselves(processes: Processes) -> None:
    """No other process is started again; the one that comes back saves with them, and the job goes
    on from a checkpoint of that time when it is started once more.
    """
    saving = ("--max-restarts", "2", "--checkpoint", "saved", "--every", "0.05")
    plan = replace(dying("async", "samples"), pause=0.02)
    text = ended(launched(processes, plan, 2, *saving))

    assert len(re.findall("begins at", text)) == 3 and "starts the job again" not in text, text
    assert "joins the others after" in text and "continues from" not in text, text
    newest = sorted((processes.path / "saved").glob("step-*/checkpoint.json"))[-1]
    place = json.loads(newest.read_text())["meta"]["place"]
    assert sorted(trainer for trainer, _ in place["trainers"]) == [0, 1], place
    assert ended(launched(processes, plan, 2, *saving)).count("continues from") == 2


@pytest.mark.long  # tests/trainer/job/test_saves_at_an_end.py stands for it
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", ["diloco", "sync", "staleness", "async"])
def test_who_comes_back_at_the_end_of_a_pass_holds_up_nobody(
    processes: Processes, mode: str, victim: int
) -> None:
    """The others have used it up, and stand in a save: its script gets nothing of the pass, waits
    for its end, and comes to the save.
    """
    other = 1 - victim
    at = (
        (victim, "0: 5", "flush"),
        (victim, "0: 5", "SIGKILL"),
        (victim, "joins again", "wait used up"),
        (victim, "joined again", "mark back"),
        (other, "0: 5", "wait struck"),
        (other, "stepped 16", "mark used up"),
        (other, "stepped 16", "wait back"),
    )
    configs = {"lost_trainer": "go_on"} if mode == "sync" else {}
    plan = Plan(mode, False, configs, data="samples", samples=80, at=at)
    text = ended(launched(processes, plan, 2, "--max-restarts", "2", *SAVES))

    assert text.count("finished") == 2, text
    assert "starts it again (restart 1 of 2); the others go on" in text, text
    assert "is put off" not in text, text


@pytest.mark.long
def test_the_others_finish_when_restarts_are_used_up(processes: Processes) -> None:
    """The job ends well although one trainer is missing at its end."""
    at = (
        (1, "stepped 5", "SIGKILL"),
        (1, "joined again", "SIGKILL"),
        (0, "before 10", "wait over"),
    )
    launch = launched(processes, Plan("async", at=at), 2, "--max-restarts", "1")
    launch.said(r"starts it again \(restart 1 of 1\); the others go on", patience=180.0)
    launch.said(r"killed by SIGKILL\); the others go on without it", patience=180.0)
    (processes.path / "over").touch()
    text = ended(launch)

    assert "done without trainer 1" in text, text


@pytest.mark.long
@pytest.mark.parametrize("end", ["mark nothing", "exit 9"])
def test_a_trainer_that_comes_when_the_job_is_done_is_not_awaited(
    processes: Processes, end: str
) -> None:
    """The others need not wait for it, and it does not wait for servers that are gone; nor does it
    matter that it meets servers that end.
    """
    at = (
        (1, "stepped 5", "SIGKILL"),
        (1, "starts again", "mark started"),
        (1, "starts again", "wait done"),
        (1, "starts again", end),
        (0, "ends", "wait started"),
        (0, "finished", "mark done"),
    )
    text = ended(launched(processes, Plan("async", at=at), 2, "--max-restarts", "1"))

    assert "trainer 1 started too late: the job is done without it" in text, text


@pytest.mark.long  # tests/pserver/launcher/test_supervisor.py and test_attendance.py stand for it
@pytest.mark.parametrize(
    ("place", "dies"), [("finishing", "soon SIGKILL"), ("finished", "SIGKILL")]
)
def test_one_that_dies_when_it_has_finished_ends_nothing(
    processes: Processes, place: str, dies: str
) -> None:
    """The job is complete: it neither fails nor begins again."""
    at = ((1, place, dies),) + (((0, "finishing", "wait struck"),) if "soon" in dies else ())
    text = ended(launched(processes, Plan("sync", at=at), 2, "--max-restarts", "2"))

    assert text.count("begins at") == 2, text
