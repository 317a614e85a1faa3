"""Bags of any size, by offsets, in captured programs: embeddings of torch's and of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.table_programs import transpiled
from trainer import DistributedEmbedding, Executor
from transpiler import capture

Servers = Callable[[int], str]


def bags(*sizes: int, ends: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, offsets and weights of bags of these sizes."""
    begins = [sum(sizes[:index]) for index in range(len(sizes) + int(ends))]
    count = sum(sizes)
    return torch.randint(0, 12, (count,)), torch.tensor(begins), torch.rand(count)


class Bagged(nn.Module):
    def __init__(self, bag: nn.Module, weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.bag, self.weighted = bag, weighted
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        pooled = self.bag(ids, offsets, weights if self.weighted else None)
        out: Tensor = self.out(torch.tanh(pooled))
        return out


def step(model: nn.Module, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    loss: Tensor = model(ids, offsets, weights).square().mean()
    return loss


def torchs(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.EmbeddingBag(12, 4, **options)


def ours(**options: Any) -> nn.Module:
    return DistributedEmbedding(4, num_embeddings=12, seed=3, **options)


BAGS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "torch's sum, weighted": (lambda: torchs(mode="sum"), True),
    "torch's mean, padded": (lambda: torchs(mode="mean", padding_idx=2), False),
    "torch's, sparse": (lambda: torchs(mode="sum", sparse=True), True),
    "torch's, sparse and padded": (lambda: torchs(sparse=True, padding_idx=2), False),
    "ours, sum": (lambda: ours(pooling="sum"), False),
    "ours, mean": (lambda: ours(pooling="mean"), False),
    "ours, weighted mean, padded": (lambda: ours(pooling="mean", padding_idx=2), True),
    "ours, sqrtn": (lambda: ours(pooling="sqrtn"), True),
}


@pytest.mark.parametrize("name", BAGS)
def test_ragged_bags_train_as_eager_code_does(name: str) -> None:
    """An empty bag among them, other numbers of ids and bags at every step: a dense weight to the
    bit, rows within 1e-6.
    """
    make, weighted = BAGS[name]
    model = Bagged(make(), weighted)
    twin = Bagged(make(), weighted)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, twin))
    program, _ = capture(model, step, optimizer, bags(3, 2, 4))
    exact = name.startswith("torch's") and "sparse" not in name
    with Executor() as executor:
        for sizes in ((2, 0, 3), (1, 5, 2, 4), (7,), (1,)):
            fed = bags(*sizes)
            (loss,) = executor.run(program, fed, ["loss"])
            other.zero_grad()
            expected = step(twin, *fed)
            expected.backward()
            other.step()
            assert torch.allclose(loss, expected, rtol=0 if exact else 1e-6, atol=0), sizes
    for key, value in twin.out.state_dict().items():
        tolerance = 0 if exact else 1e-6
        assert torch.allclose(model.out.state_dict()[key], value, rtol=tolerance, atol=tolerance)


def test_the_last_offset_may_be_an_end() -> None:
    """``include_last_offset``: one offset more than bags."""
    model = Bagged(torchs(mode="sum", include_last_offset=True), True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program, _ = capture(model, step, optimizer, bags(3, 2, 4, ends=True))
    fed = bags(2, 0, 3, 1, ends=True)
    twin = copy.deepcopy(model)
    with Executor() as executor:
        (loss,) = executor.run(program, fed, ["loss"])
    assert torch.equal(loss, step(twin, *fed).detach())
    with Executor() as executor, pytest.raises(ValueError, match="holds for 2 rows or more"):
        executor.run(program, (torch.tensor([1, 2]), torch.tensor([0]), torch.rand(2)))


def test_ragged_bags_train_on_servers(servers: Servers) -> None:
    """The rows of ragged bags are pulled from two servers, and trained there."""
    model, twin = (Bagged(ours(pooling="mean"), True) for _ in range(2))
    optimizer, other = (torch.optim.Adagrad(each.parameters(), lr=0.2) for each in (model, twin))
    main, startup = capture(model, step, optimizer, bags(3, 2, 4))
    transpiler = transpiled(main, startup, servers(2))
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for sizes in ((2, 0, 3), (1, 5, 2, 4), (7,), (4, 4)):
            fed = bags(*sizes)
            (loss,) = executor.run(transpiler.get_trainer_program(), fed, ["loss"])
            other.zero_grad()
            expected = step(twin, *fed)
            expected.backward()
            other.step()
            assert torch.allclose(loss, expected, rtol=1e-5, atol=0), sizes
