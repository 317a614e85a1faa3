"""``launch --checkpoint --max-restarts`` where a server dies: in an asynchronous job it alone is
started again, goes on from its part of the last checkpoint, and says what is lost; any other job
goes back as a whole.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pserver.checkpoint import checkpoint
from tests.cluster.scripted_jobs import ended, launched, records, said, servers_of, trained
from tests.cluster.scripted_trainer import GRADIENT, Plan
from tests.cluster.test_recorded_logs import check_same, run
from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 800, 2
HEARTBEAT = {"PSERVER_HEARTBEAT_TIMEOUT": "8"}  # a trainer says that it waits after a tenth of it
SAVES = ("--checkpoint", "saved", "--every", "0.3", "--keep", "50", "--max-restarts", "3")
# every process of the job imports it as it starts
DYING_SERVER = """
import os, signal, sys
from pathlib import Path

if "serve" in sys.orig_argv:
    from pserver.checkpoint import checkpoint

    commit = checkpoint.Writer.commit

    def is_first():  # two servers may write at once
        try:
            Path("died").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def dies(self, meta):  # all of its part is there but the manifest
        saved = Path("saved/checkpoints.json").exists()
        if saved and os.environ["DIES"] in str(self._place) and is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, meta)

    checkpoint.Writer.commit = dies
"""
# no server starts again before the trainers have said, as they do after a while, that they wait
PATIENT = """
import sys, time
from pathlib import Path

if "pserver.launcher.lost_server" in sys.orig_argv:
    while not Path("awaited").exists():
        time.sleep(0.02)
"""


def asynchronous(mode: str, where: str) -> Plan:
    """A job in which one dies after a checkpoint, or while trainer 0 waits for trainer 1."""
    at = [(number, "saved", action) for number in (0, 1) for action in ("save before", "say now")]
    if where == "meeting":
        at = [(1, "0: ends", "say now"), (1, "0: ends", "wait killed")]
    at += [(number, "1: ends", "wait killed") for number in (0, 1)]  # where the test is late
    at += [(number, "ends", "save end") for number in (0, 1)]
    return Plan(mode, data="samples", samples=SAMPLES, pause=0.01, at=tuple(at))


def customized(processes: Processes, program: str, **variables: str) -> dict[str, str]:
    """The environment of a job whose interpreters run this as they begin."""
    (processes.path / "sitecustomize.py").write_text(program)
    found = os.pathsep.join([str(processes.path), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": found, **variables}


def dying(processes: Processes, victim: str) -> dict[str, str]:
    """The environment of a job of which this server dies as it writes its part."""
    return customized(processes, DYING_SERVER, DIES=victim)


def last_record(path: Path) -> str:
    """The last record of the job's log that a checkpoint has."""
    meta = json.loads((path / "checkpoint.json").read_text())["meta"]
    return str(max(each["record"] for each in meta["log"]["servers"]))


def check(text: str, servers: int, victim: int, mode: str, restarts: int = 1) -> list[int]:
    """Both trainers go on; every sample was in one step; what a server holds are all steps, but for
    those that it has said to be lost.

    Returns:
        how many were, each time.
    """
    assert "starts the job again" not in text, text
    assert text.count("starts it again") == restarts, text
    assert re.findall(r"begins at (\d+)", text) == ["0", "0"], text
    pattern = rf"from (\S+)/server-{victim}: (\d+) decided steps since then are lost here"
    lost = re.findall(pattern, text)
    assert len(lost) == restarts, text
    # who comes back twice from one save has lost the steps of the first time once more
    missing = [int(count) for count in dict(lost).values()]
    assert trained(text, EPOCHS) == [Counter(range(SAMPLES))] * EPOCHS, text
    totals = [json.loads(each)[0] for each in re.findall(r"epoch \d (\[.*\])", text)]
    assert totals == [SAMPLES] * 2 * EPOCHS, text
    found = records(text)
    if mode in ("async", "staleness", "tables"):
        steps = sum(each["steps"] for each in found)
        for part in ("columns", "rows") if mode == "tables" else ("columns",):
            for each in found:
                held = [sum(sum(each, [])) / GRADIENT for each in each[part]]
                kept = [steps - sum(missing) * (server == victim) for server in range(servers)]
                assert held == kept, (part, missing, text)
    return missing


@pytest.mark.parametrize(
    ("servers", "victim", "mode", "where"),
    [
        (2, 0, "tables", "stepping"),
        RARE(2, 1, "tables", "stepping"),
        RARE(1, 0, "async", "stepping"),
        RARE(1, 0, "async", "meeting"),
        RARE(2, 0, "async", "meeting"),
        *(
            RARE(2, victim, mode, "stepping")
            for mode in ("half_async", "staleness", "geo by 3", "diloco by 3", "dc_asgd")
            for victim in (0, 1)
        ),
    ],
)
def test_only_what_the_server_had_not_saved_is_lost(
    processes: Processes, servers: int, victim: int, mode: str, where: str
) -> None:
    """The trainers and the other server stay, and nobody waits at a barrier for ever.  Server 0,
    which has the job's log, goes on with it, and with its lease table, although the checkpoint's is
    older.  What ``pserver replay`` gives is what servers hold, to the bit: in the end from the
    log's beginning and from the checkpoint from which the server came back, and what they held
    before.
    """
    record = ("--record-log", "log", "--no-panel")
    plan, role = asynchronous(mode, where), customized(processes, PATIENT, **HEARTBEAT)
    launch = launched(processes, plan, servers, *SAVES, *record, **role)
    said(launch, "now$", 2 if where == "stepping" else 1)
    servers_of(launch)[victim].send_signal(signal.SIGKILL)
    (processes.path / "killed").touch()
    for trainer in (0, 1):
        said(launch, rf"trainer {trainer} *\| waits for server {victim} at .*, which does not", 1)
    (processes.path / "awaited").touch()
    text = ended(launch)

    check(text, servers, victim, mode)
    assert "(restart 1 of 3)" in text, text
    assert len(re.findall(f"server {victim} at .* has come back: joined it again", text)) == 2
    end = (
        "--until",
        last_record(processes.path / "end"),
    )  # geo exchanges its last window behind it
    whole = run(processes, "whole", "replay", "log", *end, "--to", "whole")
    assert f"server {victim} was lost after record" in "\n".join(whole)
    loss = re.search(rf"from (\S+)/server-{victim}: ", text)
    assert loss is not None
    run(processes, "later", "replay", "log", *end, "--from", loss[1], "--to", "later")
    check_same(processes.path / "end", processes.path / "whole")
    check_same(processes.path / "end", processes.path / "later")
    if where == "stepping":
        last = last_record(processes.path / "before")
        run(processes, "until", "replay", "log", "--until", last, "--to", "until")
        check_same(processes.path / "before", processes.path / "until")


@pytest.mark.long  # tests/pserver/job/test_returned_coordinator.py stands for it
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_comes_back_twice(processes: Processes, victim: int) -> None:
    """All steps that it has named each time are missing, and no others."""
    launch = launched(processes, asynchronous("tables", "stepping"), 2, *SAVES, **HEARTBEAT)
    said(launch, "now$", 2)
    servers_of(launch)[victim].send_signal(signal.SIGKILL)
    said(launch, f"server {victim} at .* has come back: joined it again", 2)
    servers_of(launch)[-1].send_signal(signal.SIGKILL)  # who has come back is the youngest
    (processes.path / "killed").touch()
    text = ended(launch)

    check(text, 2, victim, "tables", 2)
    assert "(restart 2 of 3)" in text, text


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_dies_while_it_saves_comes_back_from_the_save_before(
    processes: Processes, victim: int
) -> None:
    """The save under way counts for nothing, and the job saves on."""
    plan = replace(asynchronous("tables", "stepping"), at=())
    launch = launched(processes, plan, 2, *SAVES, **dying(processes, f"server-{victim}"))
    text = ended(launch)

    check(text, 2, victim, "tables")
    assert (processes.path / "died").exists()
    (path,) = re.findall(rf"starts it again from (\S+)/server-{victim}", text)
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    assert Path(path).name < listed["checkpoints"][-1]["name"]


@pytest.mark.long
@pytest.mark.parametrize("paused", [0, 1])
def test_a_server_that_was_only_paused_follows_again(processes: Processes, paused: int) -> None:
    """For longer than the heartbeat timeout: nothing is lost, and nobody starts again."""
    plan, heartbeat = asynchronous("async", "stepping"), ("--heartbeat-timeout", "5")
    launch = launched(processes, plan, 2, *heartbeat, *SAVES)
    said(launch, "now$", 1)
    server = servers_of(launch)[paused]
    server.send_signal(signal.SIGSTOP)
    said(launch, "nothing is applied until it has come back", 1)
    server.send_signal(signal.SIGCONT)
    (processes.path / "killed").touch()
    text = ended(launch)

    assert "lost here" not in text and "starts" not in text, text
    assert trained(text, EPOCHS) == [Counter(range(SAMPLES))] * EPOCHS, text


# ---- a job that goes back as a whole ----


def together(mode: str, victim: str) -> Plan:
    """A job of which one dies when it has saved, or as it saves.

    Args:
        victim: "stepping trainer", "saving trainer", or what a test kills.
    """
    at = [(number, "before 5", "wait saved/checkpoints.json") for number in (0, 1)]
    if victim == "saving trainer":
        at.append((0, "completing", "SIGKILL"))
    elif victim == "stepping trainer":
        at.append((1, "stepped 8", "SIGKILL"))
    elif victim == "stepping server":
        at += [(0, "stepped 8", "say now"), (0, "stepped 8", "wait killed")]
    configs = {"lost_trainer": "stop"} if mode == "sync tables" else {}
    return Plan(mode, False, configs, data="samples", samples=80, at=tuple(at))


def check_whole(plan: Plan, text: str, slices: int) -> None:
    """The values of all slices are those of a job of which nobody died: each sample counts once an
    epoch, with half of it in a mean over two, and each step.
    """
    (one, other) = records(text)[-2:]
    assert one["columns"] == other["columns"] and one["samples"] == other["samples"]
    assert set(one["samples"]) == {plan.epochs / 2}, text
    steps = plan.epochs * plan.samples // plan.batch // 2
    assert one["steps"] == steps, text
    each: Sequence[Sequence[float]] = [[steps * GRADIENT / 2]] * 2
    assert one["columns"] == [each] * slices, text


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        RARE("sync tables", "saving server"),
        RARE("sync tables", "saving trainer"),
        RARE("sync tables", "stepping trainer"),
        RARE("sync tables", "stepping server"),
        RARE("collective", "stepping trainer"),
        RARE("collective", "saving trainer"),
    ],
)
def test_a_job_whose_process_dies_ends_as_one_of_which_none_dies(
    processes: Processes, mode: str, victim: str
) -> None:
    """It goes on from the checkpoint before: all that was written of another one counts for
    nothing.  For bits of states see tests/trainer/job/test_automatic_saves.py.
    """
    servers, plan = 0 if mode == "collective" else 2, together(mode, victim)
    saving = ("--checkpoint", "saved", "--every", "0.001", "--keep", "2", "--max-restarts", "1")
    role = dying(processes, "server") if victim == "saving server" else {}
    role |= {"GLOO_SOCKET_IFNAME": "lo", "PSERVER_HEARTBEAT_TIMEOUT": "5"}
    launch = launched(processes, plan, servers, *saving, **role)
    if victim == "stepping server":
        said(launch, "now$", 1)
        servers_of(launch)[-1].send_signal(signal.SIGKILL)
        (processes.path / "killed").touch()
    text = ended(launch)

    assert "starts the job again (restart 1 of 1)" in text, text
    if "server" in victim:
        back = r"server \d cannot be restarted alone: .*in sync mode all go back"
        assert re.search(back, text), text
    assert len(re.findall(r"trainer [01] *\| continues from", text)) == 2, text
    check_whole(plan, text, servers or 1)
    assert "starts the job again" not in (processes.path / "logs" / "trainer-0.log").read_text()


@pytest.mark.long  # tests/trainer/job/test_part_saves.py stands for it
@pytest.mark.parametrize("victim", ["saving trainer", "saving server"])
def test_a_job_goes_on_from_its_checkpoint_on_other_servers(
    processes: Processes, victim: str
) -> None:
    """Those that are listed are whole when a job has died while it saved."""
    saving = ("--checkpoint", "saved", "--every", "0.001", "--keep", "2")
    role = dying(processes, "server") if victim == "saving server" else {}
    plan = together("sync tables", victim)
    first = launched(processes, plan, 2, *saving, **role)
    assert first.status(patience=120) != 0, first
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    names = [each["name"] for each in listed["checkpoints"]]
    for name in names:
        reader = checkpoint.reading(processes.path / "saved" / name)
        assert reader.meta["step"] == int(name.removeprefix("step-"))
        assert len(list((processes.path / "saved" / name).glob("server-*"))) == 2
    text = ended(launched(processes, plan, 3, *saving))

    assert len(re.findall(rf"continues from \S*{names[-1]}", text)) == 2, text
    check_whole(plan, text, 2)  # 18,000 elements: a slice has 8,192 or more


@pytest.mark.long
def test_an_asynchronous_job_without_a_checkpoint_goes_back_as_a_whole(
    processes: Processes,
) -> None:
    """Launch says why."""
    at = ((0, "stepped 5", "say now"), (0, "stepped 5", "wait killed"))
    saving = ("--checkpoint", "saved", "--every", "1000", "--max-restarts", "1")
    launch = launched(processes, Plan("async", at=at), 2, *saving)
    said(launch, "now$", 1)
    servers_of(launch)[-1].send_signal(signal.SIGKILL)
    (processes.path / "killed").touch()
    text = ended(launch)

    assert re.search("server 1 cannot be restarted alone: .*no checkpoint yet", text), text
    assert "starts the job again (restart 1 of 1)" in text, text


def test_a_job_that_goes_on_failing_fails(processes: Processes) -> None:
    """After the restarts that it was given, with the status of the process that failed."""
    (processes.path / "script.py").write_text("print('begun', flush=True)\nraise SystemExit(3)\n")
    launch = ("-m", "pserver", "launch", "--nccl2", "--trainers", "1", "--max-restarts", "2")
    started = processes.python("failing", *launch, "script.py")

    assert started.status() == 3, started
    assert sum(line.endswith("| begun") for line in started.lines) == 3, started
    assert (processes.path / "logs" / "trainer-0.log").read_text() == "begun\n" * 3
