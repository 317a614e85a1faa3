"""``pserver status`` for programs, and again and again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator

import pytest
from rich.console import Console

from pserver import wire_pb2
from pserver.__main__ import WIDE
from pserver.config import ServerConfig
from pserver.launcher import status
from pserver.launcher.cluster import free_port
from pserver.service.server import Server
from pserver.telemetry.job_view import JobView, TrainerView
from tests.support.one_parameter import Trainer
from tests.support.samples import HERE, THERE, reply, table


@pytest.fixture
def running() -> Iterator[Server]:
    with Server(ServerConfig()) as server:
        yield server


def shown(endpoints: list[str]) -> tuple[int, dict[str, object]]:
    """The exit status, and the first server's object."""
    console = Console(file=io.StringIO(), width=40)
    code = status.show_json(status.ask_each(endpoints, variables=True), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == 1
    (found,) = json.loads(text)["servers"]
    return code, found


def test_json_has_what_a_server_says(running: Server) -> None:
    """In one line: numbers are numbers, and lists and maps are there when they are empty."""
    code, empty = shown([running.endpoint])
    assert (code, empty["endpoint"], empty["error"]) == (0, running.endpoint, "")
    assert (empty["state"], empty["trainers"], empty["variables"]) == ("empty", [], {})

    trainer = Trainer(running.endpoint)
    trainer.step(1, 1.0)
    code, busy = shown([running.endpoint])
    assert (code, busy["state"], busy["version"], busy["bytes_held"]) == (0, "serving", 1, 4000)
    assert isinstance(busy["trainers"], list) and isinstance(busy["variables"], dict)
    assert (busy["trainers"][0]["state"], busy["trainers"][0]["step"]) == ("joined", 1)
    assert busy["variables"]["w"]["bytes_in"] == 8000  # its value, and a gradient
    trainer.client.leave()


def test_a_trainers_line_tells_what_is_applied_from_what_it_said() -> None:
    """Both are steps, so the later one has its name."""
    trainer = wire_pb2.TrainerStatus(
        trainer_id=1, state="joined", step=9, transport="shm", activity="step 7"
    )
    expected = "trainer 1 joined, step 9, shm, silent for 0.0 s; last reported: step 7"
    assert status.trainer_line(TrainerView.of([trainer])) == expected


def test_a_job_is_shown_once() -> None:
    """A trainer has one line, whatever servers say of it, and a table, too; rates are known from
    the second time on.
    """
    view, out = JobView([HERE, THERE]), Console(file=io.StringIO(), width=WIDE)
    for second in (1, 2):
        said = [reply(second, {0: 0.0}, {"loss": 0.5}, tables=[table(50, evicted=2)]) for _ in "ab"]
        said[1].trainers[0].transport = "tcp"
        answers = [
            status.StatusAnswer(endpoint, each, heard=float(second))
            for endpoint, each in zip((HERE, THERE), said, strict=True)
        ]
        assert status.show(answers, out, view) == 0
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    once, again = text.split("server  ")[1:]

    for shown_, rate, speed in ((once, "", ""), (again, "640 samples/s   ", ", 10 steps/s")):
        step = 10 if shown_ is once else 20
        assert shown_.splitlines()[3:] == [
            f"{rate}loss 0.5",
            f"trainer 0 joined, step {step}, shm, tcp, silent for 0.1 s{speed}; last reported: "
            f"step {step}",
            "table users: 100 rows, 10.0 kB, 4 evicted",
        ]


def test_json_of_a_server_that_is_not_there() -> None:
    """It has its endpoint and the error, and the exit status is 1."""
    endpoint = f"127.0.0.1:{free_port()}"
    code, found = shown([endpoint])
    assert code == 1 and set(found) == {"endpoint", "error", "warnings"}
    assert endpoint in str(found["error"])


@pytest.mark.parametrize("show", [status.show, status.show_json])
def test_a_job_that_waits_for_a_server_is_not_well(
    show: Callable[[Iterable[status.StatusAnswer], Console], int],
) -> None:
    """The exit status is 1, though all that were asked have answered; until it has come back."""
    well = status.StatusAnswer("a:1", wire_pb2.StatusReply(state="serving"))
    waits = status.StatusAnswer("b:1", wire_pb2.StatusReply(state="serving", away=[2]))
    out = Console(file=io.StringIO(), width=200)

    assert [show(each, out) for each in ([well, waits], [well, well])] == [1, 0]
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    assert ("waits for server 2 to come back" in text) == (show is status.show)


def test_it_is_shown_until_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the servers are asked first, and only then is the terminal cleared; the last exit
    status is the command's.
    """
    codes, happened, out = [0, 0, 1], list[str](), Console(file=io.StringIO())

    def wait(seconds: float) -> None:
        happened.append(f"wait {seconds}")
        if not codes:
            raise KeyboardInterrupt

    def asked() -> Iterator[status.StatusAnswer]:
        happened.append("ask")
        yield status.StatusAnswer("here:1", None)

    def show(answers: Iterable[status.StatusAnswer], console: Console) -> int:
        happened.append(f"show {len(list(answers))}")
        return codes.pop(0)

    monkeypatch.setattr(status.time, "sleep", wait)
    monkeypatch.setattr(out, "clear", lambda: happened.append("clear"))
    assert status.watch(0.5, asked, show, out) == 1
    assert happened == ["ask", "clear", "show 1", "wait 0.5"] * 3
