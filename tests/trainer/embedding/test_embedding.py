"""DistributedEmbedding without servers: equal to torch's own embeddings and optimizers, step by
step.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.embeddings import DIM, ROWS, Net, Optimizer, pair, some_ids, values
from trainer import DistributedEmbedding, row_optimizers
from transpiler import Ftrl

RULES: dict[str, tuple[Optimizer, bool]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.1), False),
    "decayed_sgd": (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), False),
    "momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False),
    "nesterov": (
        partial(
            torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True
        ),
        False,
    ),
    "adagrad": (
        partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.01),
        False,
    ),
    "adam": (partial(torch.optim.Adam, lr=0.1), False),
    "decayed_adam": (
        partial(torch.optim.Adam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
        False,
    ),
    "adamw": (partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1), False),
    "sparse_adam": (partial(torch.optim.SparseAdam, lr=0.1), True),
    "ftrl": (partial(Ftrl, lr=0.5, l1=0.01, l2=0.1, beta=1.0), False),
}


@pytest.mark.parametrize("rule", RULES)
def test_rows_train_as_torchs_embedding_does(rule: str) -> None:
    """Under each optimizer that has a rule for rows, with its schedule, rows are those of
    nn.Embedding after every step.
    """
    make, sparse = RULES[rule]
    theirs, mine = pair(sparse=sparse)
    steps = []
    for net in (theirs, mine):
        optimizer = make(net.embedding.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        dense = torch.optim.SGD(net.layer.parameters(), lr=0.1)
        steps.append((net, optimizer, schedule, dense))
    for step in range(6):
        for net, optimizer, schedule, dense in steps:
            optimizer.zero_grad()
            dense.zero_grad()
            net(some_ids(step)).backward()
            optimizer.step()
            dense.step()
            schedule.step()

        assert torch.allclose(values(mine), values(theirs), atol=1e-6, rtol=1e-5)
        if step == 3:
            ids, rows = mine.embedding.initial_rows  # what a server would begin with
            assert torch.equal(rows, values(mine)[ids]) and len(ids) == ROWS
    assert not mine.embedding.proxy.any() and not torch.equal(values(mine), values(pair()[1]))


BAGS: dict[str, tuple[Any, ...]] = {
    "matrix": (some_ids(1, 4, 3),),
    "ragged": (some_ids(2, 9), torch.tensor([0, 0, 4, 5, 9])),
    "short": (some_ids(3, 4), torch.tensor([0, 2])),
    "one": (some_ids(4, 3), torch.tensor([0])),
}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2, -ROWS])
@pytest.mark.parametrize("bags", BAGS)
def test_bags_are_torchs_bags(mode: str, padding: int | None, bags: str) -> None:
    """Sums and means of bags, empty and padded ones too, and what a step makes of their rows, are
    nn.EmbeddingBag's.
    """
    torch.manual_seed(3)
    embedding = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding)
    theirs, mine = Net(embedding), Net(DistributedEmbedding.from_module(embedding))
    given = (BAGS[bags][0] % 4, *BAGS[bags][1:])

    assert torch.equal(mine.embedding(*given), theirs.embedding(*given))
    for net in (theirs, mine):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(*given).backward()
        optimizer.step()
    expected = values(theirs)
    if padding is not None:
        expected[padding] = 0  # a bag of padding alone
    assert torch.allclose(values(mine), expected, atol=1e-7)


def test_an_offset_at_the_end_may_be_included() -> None:
    """A module made of nn.EmbeddingBag(include_last_offset=True) takes its offsets."""
    embedding = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
    mine = DistributedEmbedding.from_module(embedding)
    ids, offsets = some_ids(1, 5), torch.tensor([0, 2, 2, 5])

    assert torch.equal(mine(ids, offsets), embedding(ids, offsets))
    with pytest.raises(ValueError, match="expected 5, where the ids end, as the last, got 4"):
        mine(ids, torch.tensor([0, 4]))


def test_weights_of_samples_are_torchs_and_get_gradients() -> None:
    """Weighted sums, the gradients of the weights and those of the rows are nn.EmbeddingBag's."""
    torch.manual_seed(3)
    embedding = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=1)
    theirs, mine = Net(embedding), Net(DistributedEmbedding.from_module(embedding))
    ids, offsets, found = some_ids(2, 9) % 5, torch.tensor([0, 0, 4, 5]), []
    for net in (theirs, mine):
        weights = torch.linspace(-1, 2, 9, requires_grad=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(ids, offsets, weights).backward()
        optimizer.step()
        found.append(weights.grad)

    assert torch.allclose(found[0], found[1], atol=1e-6)
    expected = values(theirs)
    expected[1] = 0
    assert torch.allclose(values(mine), expected, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_means_are_what_they_say(pooling: str, weighted: bool) -> None:
    """mean divides by the sum of the weights, sqrtn by the root of the sum of their squares, and
    gradients flow through both.
    """
    embedding = DistributedEmbedding(DIM, pooling=pooling, dtype=torch.float64)
    ids, offsets = torch.tensor([5, 6, 5, 9, 9, 2]), torch.tensor([0, 3, 3, 4])
    weights = torch.tensor([1.0, 2, 3, 0.5, 4, 5], dtype=torch.float64, requires_grad=True)
    rows = embedding(ids, torch.arange(6)).detach()

    got = embedding(ids, offsets, weights if weighted else None)

    used = weights if weighted else torch.ones(6, dtype=torch.float64)
    expected = []
    for begin, end in ((0, 3), (3, 3), (3, 4), (4, 6)):
        own = used[begin:end]
        below = own.sum() if pooling == "mean" else own.square().sum().sqrt()
        expected.append(
            (own[:, None] * rows[begin:end]).sum(0) / below if end > begin else rows.new_zeros(DIM)
        )
    assert torch.allclose(got, torch.stack(expected))
    if weighted:
        (mine,) = torch.autograd.grad(got.square().sum(), weights)
        (theirs,) = torch.autograd.grad(torch.stack(expected).square().sum(), weights)
        assert torch.allclose(mine, theirs)
        zeros = embedding(ids, offsets, torch.zeros(6, dtype=torch.float64, requires_grad=True))
        (gradient,) = torch.autograd.grad(zeros.sum(), embedding.proxy)
        assert not zeros.any() and torch.isfinite(gradient).all()


# ---- tables and optimizers ----


def test_several_tables_each_by_its_own_optimizer() -> None:
    """A table with an optimizer of its own is trained by that one, whatever steps the others; its
    numbers may be set.
    """
    first, second = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
    own = DistributedEmbedding.from_module(first, optimizer=row_optimizers.Adagrad(lr=0.5))
    other = DistributedEmbedding.from_module(second)
    theirs = [
        torch.optim.Adagrad(first.parameters(), lr=0.5),
        torch.optim.SGD(second.parameters(), lr=0.1),
    ]
    mine = [torch.optim.SGD([*own.parameters(), *other.parameters()], lr=0.1)]
    for step in range(4):
        if step == 2:
            own.optimizer.lr = theirs[0].param_groups[0]["lr"] = 0.05
        for one, two, optimizers in ((first, second, theirs), (own, other, mine)):
            (one(some_ids(step)) * two(some_ids(step + 1))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert torch.allclose(values(own), values(first), atol=1e-6) and torch.allclose(
        values(other), values(second), atol=1e-6
    )


def test_segments_of_columns_have_rules_of_their_own() -> None:
    """With Segments the first column follows Ftrl and the others Adagrad, as two tensors would."""
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    segments = row_optimizers.Segments(
        [(1, row_optimizers.Ftrl(lr=0.3)), (DIM - 1, {"type": "adagrad", "lr": 0.2})]
    )
    whole = DistributedEmbedding.from_module(
        nn.Embedding.from_pretrained(start.clone(), freeze=False), optimizer=segments
    )
    parts = [nn.Parameter(start[:, :1].clone()), nn.Parameter(start[:, 1:].clone())]
    theirs = [Ftrl(parts[:1], lr=0.3), torch.optim.Adagrad(parts[1:], lr=0.2)]
    mine = torch.optim.SGD(whole.parameters(), lr=123.0)
    for step in range(4):
        for module, optimizers in (
            (lambda ids: F.embedding(ids, torch.cat(parts, 1)), theirs),
            (whole, [mine]),
        ):
            torch.tanh(module(some_ids(step))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert torch.allclose(values(whole), torch.cat(parts, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(torch.optim.RMSprop, lr=0.1),
            "rows are updated by one of .* got 'rmsprop': give the table an optimizer",
        ),
        (partial(torch.optim.Adam, amsgrad=True), "amsgrad=True: rows have no such form"),
        (partial(torch.optim.Adafactor), "give the table an optimizer of its own"),
        (partial(torch.optim.LBFGS), "LBFGS"),
    ],
)
def test_a_rule_that_rows_do_not_have_is_refused_at_the_step(make: Optimizer, message: str) -> None:
    """The error names the table, and nothing has moved, the dense parameters neither."""
    net = Net(DistributedEmbedding(DIM, name="words"))
    before = copy.deepcopy(net.layer.state_dict())
    optimizer = make(net.parameters())
    net(some_ids(1)).backward()

    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: net(some_ids(1)))
    assert all(torch.equal(value, before[name]) for name, value in net.layer.state_dict().items())
