"""What launch does when a server of an asynchronous job has died."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.manifest import LIST, CompleteCheckpoint, list_bytes
from pserver.job_log.files import WriteAheadLog
from pserver.job_log_pb2 import OwnEntry
from pserver.launcher import supervisor
from pserver.launcher.cluster import Cluster
from pserver.launcher.lost_server import main, obstacle, part_of
from pserver.launcher.started_processes import StartedProcesses
from pserver.launcher.supervisor import Failed, RestartPolicy, Supervisor
from pserver.telemetry.job_view import notices
from pserver.wire_pb2 import StatusReply


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two checkpoints of two servers, of a plan that is called "p"."""
    kept = []
    for step in (1, 2):
        name = f"step-{step:06d}"
        parts = [
            checkpoint.save(
                tmp_path / name / f"server-{server}", {"w": torch.ones(1)}, {"fingerprint": "p"}
            )
            for server in (0, 1)
        ]
        with checkpoint.writing(tmp_path / name) as writer:
            writer.parts(parts, {})
            writer.commit({"step": step})
        kept.append(CompleteCheckpoint(name))
    (tmp_path / LIST).write_bytes(list_bytes(kept))
    return str(tmp_path)


def test_a_server_goes_on_from_its_part_of_the_newest_checkpoint(folder: str) -> None:
    """Of one that is listed, and whose servers were of the same plan."""
    assert part_of(folder, 1, "p") == (f"{folder}/step-000002/server-1", "")
    assert part_of(folder, 1, "q") == (
        "",
        f"{folder}/step-000002 was written by servers of another plan",
    )
    assert part_of(folder, 2, "p") == ("", f"{folder}/step-000002 has no part of server 2")
    shutil.rmtree(f"{folder}/step-000002/server-1")
    with pytest.raises(ValueError, match="its part in .* is missing"):
        part_of(folder, 1, "p")
    (Path(folder) / LIST).unlink()
    assert part_of(folder, 1, "p") == ("", "there is no checkpoint yet")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (StatusReply(state="serving", awaits_servers=True), ""),
        (StatusReply(state="serving", mode="sync"), "in sync mode all go back to a checkpoint"),
        (StatusReply(state="failed", failure="it is over"), "it is over"),
        (StatusReply(state="installing"), "a server is installing"),
    ],
)
def test_other_servers_say_whether_they_wait(status: StatusReply, expected: str) -> None:
    """A job that has failed says why."""
    assert obstacle(status) == expected


def test_server_0_needs_the_log_that_it_has_written(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the whole job is started again; and where nobody can be asked."""
    log = tmp_path / "log"
    main(["", "", "", "0", folder, str(log), "1"])
    log.write_text("[7]\n")
    main(["", "", "", "0", folder, str(log), "1"])
    written = WriteAheadLog(str(log))
    written.begin([OwnEntry(plan="p"), OwnEntry(plan="torn")])
    written.close()
    log.write_bytes(log.read_bytes()[:-1])
    main(["", "", "", "0", folder, str(log), "1"])
    main(["", "", "127.0.0.1:1", "1", folder, "", "0.1"])
    *without, there, unheard = map(json.loads, capsys.readouterr().out.splitlines())

    reason = "server 0 has written no log: all go back to a checkpoint"
    assert without == [{"path": "", "reason": reason}] * 2
    assert there == {"path": f"{folder}/step-000002/server-0", "reason": ""}
    assert unheard["path"] == "" and "127.0.0.1:1" in unheard["reason"]


def test_status_says_what_was_lost_and_who_is_away() -> None:
    """In a line each."""
    status = StatusReply(away=[1])
    status.reload.file, status.reload.steps, status.reload.rows = "saved/server-2", 3, 40
    status.reload.steps_by_trainer.update({0: 1, 1: 2})

    assert [each.text for each in notices({"a:1": status})] == [
        "waits for server 1 to come back",
        "a:1: came back from saved/server-2: 3 decided steps are lost here (trainer 0: 1, "
        "trainer 1: 2), with up to 40 changes of rows",
    ]


class Process:
    """One of a launch."""

    log, lived_seconds, preempted_after, killed = "server-1.log", 9.0, None, False

    def __init__(self, name: str, status: int | None) -> None:
        self.name, self.status, self.failed = name, status, bool(status)


def supervised(
    monkeypatch: pytest.MonkeyPatch, path: str, trainer: int | None = None, restarts: int = 1
) -> tuple[Supervisor, Process, list[str], list[Any]]:
    """A job of two servers whose second one has died: the supervisor, that server, what is said,
    and what is started again.
    """
    cluster = Cluster(__file__, (), ("127.0.0.1:0",) * 2, ("",))
    parts, begun, lines = cast(Any, SimpleNamespace()), list[Any](), list[str]()
    dead = Process("server 1", 137)
    servers = cast(Any, [Process("server 0", None), dead])
    started = StartedProcesses(cluster, parts, parts, parts, parts, (), 0, "saved", servers)
    started.trainers = {0: cast(Any, Process("trainer 0", trainer))}
    found = Supervisor(started, RestartPolicy(restarts, True), {}, parts, lines.append)
    found.ended.append(cast(Any, dead))
    asked = SimpleNamespace(answer={"path": path, "reason": "it is a test"}, end=lambda: None)
    monkeypatch.setattr(supervisor, "ask_for_reload", lambda *of: asked)
    monkeypatch.setattr(started, "start_server_again", lambda *of: begun.append(of))
    return found, dead, lines, begun


def test_a_server_alone_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what it has saved; the others wait for it."""
    found, dead, lines, begun = supervised(monkeypatch, "saved/step-000120/server-1")
    found._follow(cast(Any, dead))

    assert begun == [(dead, "saved/step-000120/server-1")] and not found.ended
    assert lines == [
        "server 1 failed with status 137 (killed by SIGKILL): starts it again from "
        "saved/step-000120/server-1 (restart 1 of 1); the others wait for it"
    ]


@pytest.mark.parametrize(
    ("path", "trainer", "restarts", "said"),
    [
        ("", None, 1, ["server 1 cannot be restarted alone: it is a test"]),
        ("there", 0, 1, []),  # the trainers have ended
        ("there", None, 0, []),
    ],
)
def test_otherwise_the_job_goes_back_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, path: str, trainer: int | None, restarts: int, said: list[str]
) -> None:
    """Or fails, where no restart is left."""
    found, dead, lines, begun = supervised(monkeypatch, path, trainer, restarts)

    with pytest.raises(Failed):
        found._follow(cast(Any, dead))
    assert not begun and lines == said


def test_a_server_that_dies_again_before_it_serves_takes_the_job_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its save may be what it dies of."""
    found, dead, _, begun = supervised(monkeypatch, "there", restarts=3)
    found.started._reloading.add(cast(Any, dead))

    with pytest.raises(Failed):
        found._follow(cast(Any, dead))
    assert not begun
