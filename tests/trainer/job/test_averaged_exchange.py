"""How the gradients travel that trainers average among themselves beside servers, by the switches
of a strategy: the collectives, recorded outside of the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, PServerError
from pserver.service.server import Server
from tests.support.exchanges import of_one, recorded_backends
from tests.support.seeded import seeded
from tests.support.threads import at_once
from trainer import DistributedEmbedding, Uniform
from trainer.collective.gradient_means import _buckets
from trainer.environment.environment import Role, RoleMaker
from trainer.job.job import Job
from transpiler import DistributedStrategy
from transpiler.strategy.exchange import exchange_of

Servers = Callable[[int], str]
SIZES = [12, 3, 4, 2]  # elements of the averaged parameters; five numbers travel before them


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(2):
            self.emb = DistributedEmbedding(4, num_embeddings=30, init=Uniform(-1, 1))
            self.fc = nn.Linear(4, 3)
            self.out = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(self.emb(ids))
        found: torch.Tensor = self.out(hidden[:, :2])
        return found


def strategy_of(**switches: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"modes": {"emb": "sync", "*": "collective"}}
    for name, value in switches.items():
        setattr(strategy, name, value)
    return strategy


def trained(servers: Servers, trainers: int, **switches: Any) -> tuple[list[Any], list[Model]]:
    """One step of such a job: what was recorded, and the models."""
    endpoints, models = servers(1), [Model() for _ in range(trainers)]

    def play(rank: int) -> None:
        role = RoleMaker(Role.TRAINER, rank, trainers, tuple(endpoints.split(",")))
        job = Job(role, strategy_of(**switches))
        job.models.append(models[rank])
        optimizer = job.join(torch.optim.SGD(models[rank].parameters(), lr=0.1))
        models[rank](torch.tensor([rank, 7 + rank])).sum().backward()
        optimizer.step()
        job.finish()

    with recorded_backends() as found:
        at_once(*(lambda rank=rank: play(rank) for rank in range(trainers)))
    return found, models


@pytest.mark.parametrize("raises", [False, True])
def test_who_goes_on_alone_is_told_who_has_finished(servers: Servers, raises: bool) -> None:
    """Trainers that take different numbers of steps do not wait for one another for ever; nor does
    one that finishes on the way of an exception.
    """
    endpoints, models = servers(1), [Model() for _ in range(2)]

    def play(rank: int) -> str:
        role = RoleMaker(Role.TRAINER, rank, 2, tuple(endpoints.split(",")))
        job = Job(role, strategy_of())
        job.models.append(models[rank])
        optimizer = job.join(torch.optim.SGD(models[rank].parameters(), lr=0.1))
        try:
            for number in range([3, 1 + raises][rank]):
                optimizer.zero_grad()
                models[rank](torch.tensor([rank, 7])).sum().backward()
                if raises and rank and number:
                    raise KeyError("boom")
                optimizer.step()
        except PServerError as error:
            job.communicator.leave(str(error))  # type: ignore[union-attr]
            return f"{type(error).__name__}: {error}"
        except KeyError:
            pass
        try:
            job.finish()
        except PServerError as error:
            return str(error)
        return "finished"

    told, other = at_once(lambda: play(0), lambda: play(1))
    assert told == (
        "TrainerLost: trainer 1 has left the job, and trainer 0 is in the dense all-reduce: all "
        "trainers run the same number of steps"
    )
    assert "trainer 0 ended the job" in other and told.partition(": ")[2] in other


def sums(sizes: list[int], dtype: str = "float32") -> list[Any]:
    return [("allreduce", 5, "float32", 2, 0)] + [
        ("allreduce", size, dtype, 2, 0) for size in sizes
    ]


@pytest.mark.observes("fuse_all_reduce_ops", "fuse_grad_size_in_num", "fp16_allreduce")
@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, sums([21])),
        ({"fuse_all_reduce_ops": False}, sums(SIZES)),
        ({"fuse_grad_size_in_num": 3}, sums([19, 2])),
        ({"fp16_allreduce": True}, sums([21], "float16")),
    ],
)
def test_the_number_size_and_dtype_of_sums(
    servers: Servers, switches: dict[str, Any], expected: list[Any]
) -> None:
    """Five numbers, then the gradients in buckets; all trainers have the same bits after it."""
    found, models = trained(servers, 2, **switches)

    assert of_one(found) == expected
    for one, other in zip(models[0].fc.parameters(), models[1].fc.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.observes("fuse_grad_size_in_MB")
def test_the_size_of_a_bucket() -> None:
    """In MB of the gradients; a larger one travels by itself."""
    parameters = [torch.empty(rows, 1024, device="meta") for rows in (128, 128, 128, 300, 10)]
    found = _buckets(parameters, exchange_of(strategy_of(fuse_grad_size_in_MB=1)))

    assert [len(own) for own in found] == [2, 1, 1, 1]


@pytest.mark.observes("nccl_comm_num")
def test_buckets_take_the_groups_in_turn(servers: Servers) -> None:
    """Three groups: the five numbers in the first, then one gradient in each."""
    found, _ = trained(servers, 2, nccl_comm_num=3, fuse_all_reduce_ops=False)

    assert [each[-1] for each in of_one(found)] == [0, 1, 2, 0, 1]


@pytest.mark.observes("sync_nccl_allreduce")
@pytest.mark.parametrize("waits", [False, True])
def test_the_trainer_waits_right_away(servers: Servers, waits: bool) -> None:
    """After each sum, not after all of them."""
    found, _ = trained(servers, 2, sync_nccl_allreduce=waits)
    mine = ["wait" if each == "wait" else "sum" for at, each in found if at == found[0][0]]

    assert mine[:2] == ["sum", "wait" if waits else "sum"]


@pytest.mark.observes("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
def test_four_trainers_in_rows_of_two(servers: Servers) -> None:
    """Each sum is reduced in both rows, added between their first trainers, and broadcast."""
    rows = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
    found, models = trained(servers, 4, **rows)
    _, flat = trained(servers, 4)

    kinds = Counter(each[:4] for _, each in found if each != "wait")
    assert kinds == {
        (name, size, "float32", 2): 2 if name == "allreduce" else 4
        for name in ("reduce", "allreduce", "broadcast")
        for size in (5, 21)
    }
    for mine, plain in zip(models[3].fc.parameters(), flat[0].fc.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-6)


def test_a_pull_leaves_averaged_parameters_as_they_are(servers: Servers) -> None:
    """The servers hold what was loaded of them, not what the trainers have stepped to."""
    model, role = Model(), RoleMaker(Role.TRAINER, 0, 1, tuple(servers(1).split(",")))
    job = Job(role, strategy_of())
    job.models.append(model)
    optimizer = job.join(torch.optim.SGD(model.parameters(), lr=0.1))
    first = [each.detach().clone() for each in model.fc.parameters()]
    model(torch.tensor([0, 7])).sum().backward()
    optimizer.step()
    stepped = [each.detach().clone() for each in model.fc.parameters()]

    optimizer.communicator.pull()

    assert all(torch.equal(a, b) for a, b in zip(stepped, model.fc.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, stepped, strict=True))
    job.finish()


def test_trainers_that_differ_are_told() -> None:
    """One with float16 and one without do not begin."""

    def play(rank: int) -> None:
        role = RoleMaker(Role.TRAINER, rank, 2, (server.endpoint,))
        job = Job(role, strategy_of(fp16_allreduce=bool(rank)))
        job.models.append(Model())
        job.join(torch.optim.SGD(job.models[0].parameters(), lr=0.1))

    with (
        Server(ServerConfig(keep_failed_seconds=0.0)) as server,
        pytest.raises(FingerprintMismatch, match="how gradients travel"),
    ):
        at_once(lambda: play(0), lambda: play(1))
