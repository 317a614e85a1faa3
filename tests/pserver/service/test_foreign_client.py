"""A client that knows the .proto files and gRPC, and nothing else of the project: what they say is
enough.
"""

from __future__ import annotations

import hashlib
import queue
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.wire_pb2_grpc import ParameterServerStub
from transpiler import program_pb2 as p

NUMBERS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
FLAGS = {"nesterov": False, "maximize": False}
LANE: dict[str, Any] = {
    "mode": "sync",
    "merge": "mean",
    "max_merge_var_num": 1,
    "send_queue_size": 1,
    "send_wait_times": 1,
    "thread_pool_size": 1,
    "min_send_grad_num_before_recv": 1,
}
ABSENT = {
    "independent_recv_thread": False,
    "k_steps": 0,
    "staleness": None,
    "dc_asgd": 0.0,
    "outer": None,
}


@pytest.fixture
def endpoint() -> Iterator[str]:
    with Server(ServerConfig()) as server:
        yield server.endpoint


def hparams() -> dict[str, p.Hparam]:
    return {key: p.Hparam(values=[value]) for key, value in NUMBERS.items()}


def refers(*names: str) -> p.Argument:
    return p.Argument(list=p.Arguments(items=[p.Argument(variable=name) for name in names]))


def variable(name: str, role: int) -> p.Variable:
    return p.Variable(name=name, shape=[p.Dimension(size=4)], dtype="float32", role=role, of="w")


def update() -> p.Block:
    """sum, scale, sgd."""
    grad, param = p.Argument(variable="w@GRAD"), p.Argument(variable="w")
    rule = {key: p.Argument(real=value) for key, value in NUMBERS.items()}
    rule |= {key: p.Argument(boolean=value) for key, value in FLAGS.items()}
    return p.Block(
        index=1,
        ops=[
            p.Op(type="sum", arguments={"x": refers("w@GRAD")}, outputs=["w@GRAD"]),
            p.Op(
                type="scale",
                arguments={"x": grad, "scale": p.Argument(real=1.0)},
                outputs=["w@GRAD"],
            ),
            p.Op(
                type="sgd",
                arguments={"param": param, "grad": grad, "group": p.Argument(integer=0), **rule},
                outputs=["w"],
            ),
        ],
    )


def program(endpoint: str) -> p.Program:
    """One parameter of four elements, sgd, one trainer, one server."""
    listening = {
        "endpoint": p.Argument(text=endpoint),
        "server_index": p.Argument(integer=0),
        "trainers": p.Argument(integer=1),
        "mode": p.Argument(text="sync"),
        "optimize_blocks": p.Argument(list=p.Arguments(items=[p.Argument(integer=1)])),
    }
    main = p.Block(
        variables=[variable("w", p.PARAMETER), variable("w@GRAD", p.GRADIENT)],
        ops=[p.Op(type="listen_and_serv", arguments=listening)],
    )
    piece = p.Slice(name="w", begin=0, end=4, shape=[4], server=0)
    plan = p.Plan(
        lanes=[p.Lane(**LANE)],
        trainers=1,
        servers=1,
        groups=[p.Rule(type="sgd", hparams=hparams(), flags=FLAGS)],
        placements=[p.Placement(name="w", shape=[4], dtype="float32", group=0, slices=[piece])],
    )
    return p.Program(
        blocks=[main, update()],
        deployment=p.Deployment(plan=plan, endpoints=[endpoint], trainer_id=-1),
    )


def manifest() -> dict[str, str]:
    facts = {
        "mode": "sync",
        "trainers": "1",
        "servers": "1",
        "graph": "",
        "clip": "none",
        "group 0: optimizer": "sgd",
    }
    facts |= {f"group 0: {key}": repr(value) for key, value in {**NUMBERS, **FLAGS}.items()}
    facts |= {f"lane 0: {key}": repr(value) for key, value in {**LANE, **ABSENT}.items()}
    return facts | {"variable w": "number 0, float32[4], group 0, lane 0, w[0:4] on server 0"}


def fingerprint(facts: dict[str, str]) -> str:
    lines = "\n".join(f"{key} = {facts[key]}" for key in sorted(facts))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


class Trainer:
    """Joins as trainer 0 and installs."""

    def __init__(self, endpoint: str, channel: grpc.Channel) -> None:
        self.stub = ParameterServerStub(channel)  # type: ignore[no-untyped-call]  # generated
        facts = manifest()
        self.joined = self.stub.Join(
            wire.JoinRequest(
                protocol=3,
                incarnation="one",
                fingerprint=fingerprint(facts),
                manifest=facts,
                transports=["grpc"],
            ),
            timeout=10,
        )
        self.out: queue.Queue[wire.Frame | None] = queue.Queue()
        self.back = self.stub.Exchange(iter(self.out.get, None), timeout=30)
        self.out.put(wire.Frame(kind=wire.HELLO, hello=wire.Hello(session=self.joined.session)))
        self.stub.Install(
            wire.InstallRequest(session=self.joined.session, program=program(endpoint)), timeout=10
        )

    def tensor(self, kind: int, step: int, *values: float) -> None:
        part = wire.Part(name="w", dtype="float32", shape=[4], size=16)
        self.out.put(
            wire.Frame(kind=kind, step=step, parts=[part], payload=struct.pack("<4f", *values))
        )

    def commit(self, step: int) -> None:
        groups = [wire.GroupHparams(values=hparams())] if step else []
        self.out.put(wire.Frame(kind=wire.COMMIT, step=step, commit=wire.Commit(hparams=groups)))

    def answer(self) -> tuple[float, ...]:
        """What the parameter is, once all of an answer has come."""
        payload = b""
        for frame in self.back:
            assert frame.kind in (wire.VALUE, wire.DONE), frame
            payload += frame.payload
            if frame.kind == wire.DONE:
                break
        return struct.unpack(f"<{len(payload) // 4}f", payload)

    def leave(self) -> None:
        self.out.put(wire.Frame(kind=wire.BYE))
        self.out.put(None)
        self.stub.Leave(wire.LeaveRequest(session=self.joined.session, success=True), timeout=10)


def test_the_proto_files_are_enough_to_write_a_client_from(endpoint: str) -> None:
    """Join, Install, upload, PULL, two steps, Leave, over grpc alone; then a second job on the same
    server.
    """
    with grpc.insecure_channel(endpoint) as channel:
        for _ in range(2):
            trainer = Trainer(endpoint, channel)
            assert trainer.joined.install and trainer.joined.transport == "grpc"
            trainer.tensor(wire.VALUE, 0, 1, 2, 3, 4)
            trainer.commit(0)
            assert trainer.answer() == ()
            trainer.out.put(wire.Frame(kind=wire.PULL))
            assert trainer.answer() == (1, 2, 3, 4)
            for step, expected in ((1, (0.5, 1.5, 2.5, 3.5)), (2, (0, 1, 2, 3))):
                trainer.tensor(wire.GRADIENT, step, 1, 1, 1, 1)
                trainer.commit(step)
                assert trainer.answer() == expected
            assert (
                trainer.stub.Heartbeat(
                    wire.HeartbeatRequest(session=trainer.joined.session), timeout=10
                ).failure
                == ""
            )
            assert trainer.stub.Status(wire.StatusRequest(), timeout=10).trainers[0].step == 2
            trainer.leave()


def test_a_fingerprint_that_is_not_the_manifests_is_refused(endpoint: str) -> None:
    """What was joined with and what is installed must be one plan."""
    with grpc.insecure_channel(endpoint) as channel:
        joined = ParameterServerStub(channel).Join(  # type: ignore[no-untyped-call]  # generated
            wire.JoinRequest(
                protocol=3,
                incarnation="one",
                fingerprint="0" * 32,
                manifest=manifest(),
                transports=["grpc"],
            ),
            timeout=10,
        )
        with pytest.raises(grpc.RpcError) as caught:
            ParameterServerStub(channel).Install(  # type: ignore[no-untyped-call]  # generated
                wire.InstallRequest(session=joined.session, program=program(endpoint)), timeout=10
            )
    assert dict(caught.value.trailing_metadata())["pserver-error"] == "FingerprintMismatch"
