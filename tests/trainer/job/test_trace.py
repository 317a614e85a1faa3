"""``fleet.trace``: one file of what all processes do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from pserver.telemetry.trace import SPANS, Recording, Span
from tests.support.eager_jobs import Servers, batches, joined, net, train
from tests.support.traces import Traced, end
from trainer import Executor, fleet
from trainer.collective.peer_meeting import PeerMeeting
from trainer.collective.rendezvous import Peers, connect_store
from trainer.communicator.trace import ServerMeeting
from trainer.environment.environment import Connection
from transpiler import DistributedStrategy, DistributeTranspiler, capture


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_trace_of_a_trainer_and_its_servers(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step's push lies before its update, and its wait ends behind it, within the bound; the
    steps before and after the trace are not in it.
    """
    model = net()
    optimizer = joined(servers(2), model, sgd(model))
    train(model, optimizer, batches(2))
    fleet.trace(str(tmp_path / "t.json"), steps=3)
    train(model, optimizer, batches(5))
    fleet.finish()
    found = Traced(tmp_path / "t.json")

    assert not SPANS.on and SPANS.watcher is None
    assert found.names("trainer 0") >= {"forward", "backward", "step", "push", "wait"}
    assert len(found.of("trainer 0", "forward")) == len(found.of("trainer 0", "step")) == 3
    assert found.about["missing"] == {} and found.about["steps"] == 3
    for server in (0, 1):
        name = f"server {server}"
        assert found.names(name) >= {"receive", "merge", "update", "answer"}
        for step in (3, 4, 5):
            (push,) = found.of("trainer 0", "push", server=server, step=step)
            (wait,) = found.of("trainer 0", "wait", server=server, step=step)
            (received,) = found.of(name, "receive", trainer=0, step=step)
            updates = found.of(name, "update", version=step)
            assert push["ts"] <= received["ts"] + found.bound
            assert received["ts"] <= updates[0]["ts"]
            assert updates[0]["ts"] <= end(wait) + found.bound
    assert f"trace: {tmp_path}/t.json: steps 3, processes 3, spans " in capsys.readouterr().out


def test_a_trainer_that_leaves_nothing_is_missing(servers: Servers) -> None:
    """After the deadline trainer 0 has the servers' spans all the same; their clocks, here its own,
    are within the bounds.
    """
    model = net()
    optimizer = joined(servers(2), model, sgd(model))
    meeting = ServerMeeting(optimizer.communicator.clients, 2)
    meeting.begin(1)
    train(model, optimizer, batches(1))
    found, missing = meeting.gather(1, 0.2, lambda: False)
    fleet.finish()

    assert [each.name for each in found] == ["server 0", "server 1"]
    assert missing == {"trainer 1": "it left no spans"}
    for each in found:
        assert abs(each.offset_ns) <= each.bound_ns and "update" in {s.name for s in each.spans}


def test_a_trace_of_a_program(servers: Servers, tmp_path: Path) -> None:
    """Segments and communication ops are spans, within those of runs."""
    model, (x, y) = net(), batches(1)[0]
    endpoints = servers(1)
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[endpoints]))
    program, startup = capture(
        model, lambda model, x, y: nn.functional.cross_entropy(model(x), y), sgd(model), (x, y)
    )
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program, endpoints, 1, startup_program=startup)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        fleet.trace(str(tmp_path / "t.json"), steps=2)
        for _ in range(4):
            executor.run(transpiler.get_trainer_program(), feed=(x, y))
    fleet.finish()
    found = Traced(tmp_path / "t.json")
    ops = {"step", "compute", "send", "send_barrier", "recv", "fetch_barrier"}

    assert found.names("trainer 0") >= ops and found.names("server 0") >= {"receive", "update"}
    first, _ = found.of("trainer 0", "step")
    inside = [span for span in found.spans if first["ts"] <= span["ts"] <= end(first)]
    assert {span["name"] for span in inside} > ops
    assert len(found.of("trainer 0", "step")) == 2


def test_torchs_spans_are_inside(tmp_path: Path) -> None:
    """With ``profiler=True``, alone: the ops of a forward lie in the forward, by the same clock."""
    fleet.init()
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model))
    fleet.trace(str(tmp_path / "t.json"), steps=1, profiler=True)
    train(model, optimizer, batches(1))
    fleet.finish()
    found = Traced(tmp_path / "t.json")
    (forward,) = found.of("trainer 0", "forward")
    linear = found.of("trainer 0", "aten::linear")

    assert len(linear) == 2
    for op in linear:
        assert forward["ts"] - 200 <= op["ts"] and end(op) <= end(forward) + 200  # us


def test_what_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    """Before training: no job, no steps, no file; and two traces at a time."""
    with pytest.raises(RuntimeError, match=r"call fleet\.init"):
        fleet.trace(str(tmp_path / "t.json"))
    fleet.init()
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model))
    with pytest.raises(ValueError, match="steps: expected 1 or more, got 0"):
        fleet.trace(str(tmp_path / "t.json"), steps=0)
    with pytest.raises(TypeError, match="steps: expected a whole number"):
        fleet.trace(str(tmp_path / "t.json"), steps=2.0)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="the trace cannot be written to"):
        fleet.trace(str(tmp_path / "file" / "t.json"))
    fleet.trace(str(tmp_path / "t.json"), steps=2)
    with pytest.raises(RuntimeError, match="a trace is under way"):
        fleet.trace(str(tmp_path / "other.json"))
    train(model, optimizer, batches(2))
    fleet.trace(str(tmp_path / "other.json"), steps=9)
    train(model, optimizer, batches(1))
    fleet.finish()

    assert len(Traced(tmp_path / "t.json").of("trainer 0", "step")) == 2
    about = Traced(tmp_path / "other.json").about
    assert about["processes"]["trainer 0"]["notes"] == ["the job ended after 1 of 9 steps"]


def test_the_environment_asks_for_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PSERVER_TRACE: of the steps after the first two."""
    monkeypatch.setenv("PSERVER_TRACE", str(tmp_path / "t.json"))
    monkeypatch.setenv("PSERVER_TRACE_STEPS", "1")
    fleet.init()
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model), DistributedStrategy())
    noted = []
    for _ in range(4):
        noted.append(SPANS.on)
        train(model, optimizer, batches(1))
    fleet.finish()

    assert noted == [False, False, True, False]
    assert len(Traced(tmp_path / "t.json").of("trainer 0", "step")) == 1


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")], ids=["one host", "two hosts"])
def test_trainers_without_servers_meet_at_their_store(hosts: tuple[str, str]) -> None:
    """On one host the clock is the same; on two the offset, here 0, is within the bound.  Who comes
    too late is missing.
    """
    first = connect_store("127.0.0.1", 0, 0, Connection())
    second = connect_store("127.0.0.1", first.port, 1, Connection())
    names = ("", "", "")
    meetings = [
        PeerMeeting(Peers(rank, names, store), host)
        for rank, (store, host) in enumerate(zip((first, second), hosts, strict=True))
    ]
    spans = [Span("forward", 1.0, 2.0, "script", {})]
    other = threading.Thread(
        target=meetings[1].deliver, args=(1, Recording("trainer", 1, spans), 10.0)
    )
    other.start()
    meetings[0].begin(1)
    found, missing = meetings[0].gather(1, 1.0, lambda: False)
    other.join()
    (recording,) = found

    assert recording.spans == spans and missing == {"trainer 2": "it left no spans"}
    assert abs(recording.offset_ns) <= recording.bound_ns
    assert (recording.bound_ns == 0) == (hosts[0] == hosts[1])
    assert ("rounds" in recording.clock) == (hosts[0] != hosts[1])
