"""What a trainer and a server say to one another, held against ``tests/testdata/protocol/``: for
each exchange of the protocol one transcript, frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch

from pserver.client.channel import Channel
from pserver.client.client import Client, Identity
from pserver.client.replies import Reply
from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, PServerError
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment, checksum
from pserver.wire_pb2 import Kind
from tests.checker.trial import TwinServer
from tests.faults.faults import Injector, Point, injected
from tests.support.links import Coordinator, Follower
from tests.support.protocol import Transcript, written
from tests.support.transcript import compare
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Clip, Rule
from transpiler.ir.tables import Constant, Segment, Table
from transpiler.plan.plan import Deployment, Plan

SECONDS = 60.0
HPARAMS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
GRADIENTS = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


def plan_of(
    trainers: int = 1, lr: float = 0.5, clip: Clip | None = None, tables: Sequence[Table] = ()
) -> Plan:
    """A weight and a bias under SGD, on one server, in sync."""
    rule = Rule("sgd", {**HPARAMS, "lr": lr}, {})
    named = [("w", (2, 3), "float32", 0), ("b", (3,), "float32", 0)]
    return plan_parameters(
        named, [rule], mode="sync", trainers=trainers, servers=1, clip=clip, tables=tables
    )


class Trainer:
    """A client of one server: what of the protocol a test wants to see, and nothing else."""

    def __init__(self, endpoint: str, plan: Plan, number: int = 0) -> None:
        self.endpoint, self.plan = endpoint, plan
        self.values: dict[str, torch.Tensor] = {}
        identity = Identity(number, "first", plan.fingerprint(), plan.manifest(), ("inprocess",))
        self.client = Client(
            endpoint,
            0,
            identity,
            SECONDS,
            SECONDS,
            1,
            bool(plan.tables),
        )

    def destination(self, name: str, blank: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.values.setdefault(name, blank())

    @property
    def channel(self) -> Channel:
        return self.client.channels[0]

    def install(self) -> None:
        deployment = Deployment(self.plan, (self.endpoint,), server_index=0)
        self.client.install(pserver_program(deployment))
        values = [("w", torch.ones(2, 3)), ("b", torch.zeros(3))]
        self.channel.load(values).result(SECONDS)

    def start(self) -> Trainer:
        self.client.join()
        self.install()
        return self

    def begin(self, step: int, gradients: dict[str, torch.Tensor]) -> Future[Reply]:
        """Sends a step; the answer may be waited for."""
        answer = self.channel.begin(self.destination)
        self.channel.push(step, gradients.items())
        self.channel.commit(step, {0: HPARAMS})
        return answer

    def step(self, step: int, gradients: dict[str, torch.Tensor] = GRADIENTS) -> Reply:
        return self.begin(step, gradients).result(SECONDS)


@contextmanager
def server() -> Iterator[str]:
    """A server's endpoint."""
    with TwinServer(ServerConfig(transport="grpc", heartbeat_timeout_seconds=SECONDS)) as running:
        yield running.endpoint


def test_join(request: pytest.FixtureRequest) -> None:
    """A trainer says who it is and what it runs; once let in, it opens a stream for its lane."""
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of())
        transcript.title("a trainer joins an empty server, and leaves")
        trainer.client.join()
        trainer.client.leave()

    compare(request, "protocol/join.txt", str(transcript))


def test_install(request: pytest.FixtureRequest) -> None:
    """Trainer 0 installs the program, and uploads the values."""
    with server() as endpoint:
        with written(Transcript()) as transcript:
            trainer = Trainer(endpoint, plan_of())
            trainer.client.join()
            transcript.title("trainer 0 installs the program, and then its values")
            trainer.install()
        trainer.client.leave()

    compare(request, "protocol/install.txt", after_title(transcript))


def after_title(transcript: Transcript) -> str:
    """A transcript from its title on: what comes before it is another transcript's."""
    text = str(transcript)
    return text[text.index("== ") :]


def test_push(request: pytest.FixtureRequest) -> None:
    """A step: gradients, the hyper-parameters with the commit; new values, and DONE."""
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of()).start()
        transcript.title("a step")
        trainer.step(1)
        transcript.title("a step in which b has no gradient, and the values are not wanted")
        answer = trainer.channel.begin(trainer.destination)
        trainer.channel.push(2, [("w", GRADIENTS["w"])])
        trainer.channel.commit(2, {0: HPARAMS}, absent=["b"], omit_values=True)
        answer.result(SECONDS)
        transcript.title("a step with an overflow, which nobody takes")
        answer = trainer.channel.begin(trainer.destination)
        trainer.channel.push(3, GRADIENTS.items())
        trainer.channel.commit(3, {0: HPARAMS}, overflow=True)
        answer.result(SECONDS)
        transcript.title("goodbye")
        trainer.client.leave()

    compare(request, "protocol/push.txt", after_title(transcript))


def test_assign(request: pytest.FixtureRequest) -> None:
    """A step that carries what the script has written: all of b, two elements of w; the trainer
    finds out by their checksums that it has.
    """
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of()).start()
        transcript.title("the checksums of what the server has")
        held = trainer.channel.checksums(["w", "b"]).result(SECONDS).checksums
        assert held == {"w": checksum(torch.ones(2, 3)), "b": checksum(torch.zeros(3))}
        transcript.title("a step that assigns b and two elements of w")
        assignments = {
            "w": Assignment(torch.tensor([7.0, 8.0]), torch.tensor([1, 4])),
            "b": Assignment(torch.tensor([1.0, 2.0, 3.0])),
        }
        after = torch.tensor([[1.0, 7, 1], [1, 8, 1]])
        answer = trainer.channel.begin(trainer.destination)
        trainer.channel.assign(1, assignments)
        trainer.channel.push(1, GRADIENTS.items())
        trainer.channel.commit(
            1,
            {0: HPARAMS},
            written={"w": checksum(after), "b": checksum(assignments["b"].values)},
        )
        answer.result(SECONDS)
        trainer.client.leave()

    assert torch.equal(trainer.values["w"], after - 0.5 * GRADIENTS["w"])
    compare(request, "protocol/assign.txt", after_title(transcript))


def test_norms(request: pytest.FixtureRequest) -> None:
    """A step of two trainers that the server clips by the global norm: it says its part of the
    norm, and gets the coefficient.
    """
    plan = plan_of(trainers=2, clip=Clip("global_norm", 1.0))
    with server() as endpoint:
        with written(Transcript()) as transcript:
            trainer = Trainer(endpoint, plan).start()
        other = Trainer(endpoint, plan, number=1)
        other.client.join()
        transcript.title("a step of trainers 0 and 1, clipped by the norm, as trainer 0 sees it")
        theirs = other.begin(1, {"w": torch.zeros(2, 3), "b": torch.zeros(3)})
        answer = trainer.begin(
            1, {"w": torch.tensor([[8.0, 0, 0], [0, 0, 0]]), "b": torch.tensor([6.0, 0, 0])}
        )
        for each in (trainer, other):
            squared = each.channel.norms.result(SECONDS)
            each.channel.scale(1, {"": 1 / sum(squared.values()) ** 0.5})
        answer.result(SECONDS)
        theirs.result(SECONDS)
        other.client.leave()
        trainer.client.leave()

    compare(request, "protocol/norms.txt", after_title(transcript))


def test_pull(request: pytest.FixtureRequest) -> None:
    """Values on request: of one variable, and of all."""
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of()).start()
        for names in (["b"], []):
            transcript.title(f"a pull of {' '.join(names) or 'everything'}")
            trainer.channel.pull(names, trainer.destination).result(SECONDS)
        trainer.client.leave()

    compare(request, "protocol/pull.txt", after_title(transcript))


@pytest.mark.parametrize("name", ["lost_answer", "lost_commit"])
def test_a_broken_stream(request: pytest.FixtureRequest, name: str) -> None:
    """The stream breaks before the answer is there, or before the step is: another stream, the same
    frames again, and one update.
    """
    direction, kind = {"lost_answer": ("in", Kind.DONE), "lost_commit": ("out", Kind.COMMIT)}[name]
    injector = Injector([Point("reset", direction, kind, step=2)])
    with (
        server() as endpoint,
        injected(injector, "inprocess"),
        written(Transcript()) as transcript,
    ):
        trainer = Trainer(endpoint, plan_of()).start()
        trainer.step(1)
        transcript.title(f"a step whose {name.removeprefix('lost_')} is lost with its connection")
        done = trainer.step(2)
        trainer.client.leave()

    assert done.version == 2
    compare(request, f"protocol/broken_{name}.txt", after_title(transcript))


def test_a_refused_step(request: pytest.FixtureRequest) -> None:
    """A commit without one of the gradients: FAILURE, which says what is missing, and the stream
    ends.
    """
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of()).start()
        transcript.title("a step without b's gradient, of which the commit says nothing")
        with pytest.raises(PServerError):
            trainer.step(1, {"w": GRADIENTS["w"]})
        transcript.title("what the trainer says on leaving")
        trainer.client.leave("the server has refused a step")

    compare(request, "protocol/refused.txt", after_title(transcript))


def test_a_refused_trainer(request: pytest.FixtureRequest) -> None:
    """A trainer whose learning rate is another one: the answer says in words what differs."""
    with server() as endpoint:
        trainer = Trainer(endpoint, plan_of(trainers=2)).start()
        with written(Transcript()) as transcript:
            transcript.title("trainer 1 joins with a plan of its own")
            stranger = Trainer(endpoint, plan_of(trainers=2, lr=0.1), number=1)
            with pytest.raises(FingerprintMismatch):
                stranger.client.join()
            stranger.client.leave()
        trainer.client.leave()

    compare(request, "protocol/refused_join.txt", str(transcript))


def test_link(request: pytest.FixtureRequest) -> None:
    """Server 1 follows server 0: a message each way, and one that is said again on another stream
    because the first broke under it.
    """
    injector = Injector([Point("reset", "out", Kind.STAGED, occurrence=2)])
    with (
        Coordinator(heartbeat_timeout_seconds=SECONDS) as coordinator,
        injected(injector, "inprocess"),
        written(Transcript()) as transcript,
    ):
        transcript.title("server 1 follows, and is answered")
        with Follower(coordinator) as follower:
            for number in (b"1", b"2"):
                follower.link.send(b"staged " + number)
                assert coordinator.hear(1) == [(1, b"staged " + number)]
                coordinator.links.send(1, b"record " + number)
                assert follower.hear(1) == [b"record " + number]

    compare(request, "protocol/link.txt", str(transcript))


def test_lookup(request: pytest.FixtureRequest) -> None:
    """Rows of a table, by id, on the tables' own stream; and a step that trains one of them."""
    table = Table("emb", 2, (Segment(0, 2, 0),), initial=Constant(0.25))
    with server() as endpoint, written(Transcript()) as transcript:
        trainer = Trainer(endpoint, plan_of(tables=(table,))).start()
        look_up(transcript, trainer, "a lookup of two rows that nobody has trained")
        transcript.title("a step that trains row 7")
        answer = trainer.channel.begin(trainer.destination)
        trainer.channel.push(1, GRADIENTS.items())
        trainer.channel.push_rows(1, {"emb": RowGradient(torch.tensor([7]), torch.ones(1, 2))})
        trainer.channel.commit(1, {0: HPARAMS})
        answer.result(SECONDS)
        look_up(transcript, trainer, "the same lookup again")
        trainer.client.leave()

    compare(request, "protocol/lookup.txt", after_title(transcript))


def look_up(transcript: Transcript, trainer: Trainer, title: str) -> None:
    """Ids 7 and 3, in one request."""
    transcript.title(title)
    trainer.values.clear()
    tables = trainer.client.tables
    assert tables is not None
    tables.lookup({"emb": torch.tensor([7, 3])}, trainer.destination).result(SECONDS)
