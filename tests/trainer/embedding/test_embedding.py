"""DistributedEmbedding without servers: equal to torch's own embeddings and optimizers, step by
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from trainer import (
    Constant,
    CountFilterEntry,
    DistributedEmbedding,
    Normal,
    ShowClickEntry,
    row_optimizers,
)
from trainer.optimizer import DistributedOptimizer
from transpiler import ClipGradByGlobalNorm, Ftrl

ROWS, DIM = 30, 5

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """An embedding, and a layer on what it returns."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.layer = embedding, nn.Linear(DIM, 2)

    def forward(self, *inputs: Any) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(self.embedding(*inputs)))
        return hidden.square().sum() * 3


def pair(**options: Any) -> tuple[Net, Net]:
    """The same model with torch's embedding and with ours."""
    torch.manual_seed(3)
    embedding = nn.Embedding(ROWS, DIM, **options)
    return Net(embedding), Net(DistributedEmbedding.from_module(embedding))


def values(module: nn.Module) -> Tensor:
    """All rows, as a lookup reads them."""
    embedding = module.embedding if isinstance(module, Net) else module
    with torch.no_grad():
        if isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
            return embedding.weight.clone()
        if embedding.pooling is not None:
            return embedding(torch.arange(ROWS), torch.arange(ROWS))
        return embedding(torch.arange(ROWS))


def some_ids(step: int, *shape: int) -> Tensor:
    """Ids of which some repeat, others in every step."""
    return torch.randint(
        0, ROWS, shape or (3, 4), generator=torch.Generator().manual_seed(step)
    ) % (ROWS - step)


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


@pytest.mark.slow
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


# ---- what scripts do to gradients ----


def trained(
    net: Net, make: Optimizer, script: Callable[[Net, torch.optim.Optimizer], None]
) -> Tensor:
    script(net, make(net.parameters()))
    return values(net)


def clipped(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        net(some_ids(step)).backward()
        assert clip_grad_norm_(net.parameters(), 0.3) > 0.3
        optimizer.step()


def accumulated(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            net(some_ids(step + 4 * part)).backward()
            if part == 1:
                clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def zeroed_in_between(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step, to_none in enumerate([True, False, True, False]):
        net(some_ids(step + 7)).backward()
        optimizer.zero_grad(set_to_none=to_none)
        net(some_ids(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not to_none)


def never_zeroed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        net(some_ids(step)).backward()
        optimizer.step()
        optimizer.step()


def stepped_on_zeros(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net(some_ids(1)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # a momentum goes on
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient


def looked_up_twice(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        (net(some_ids(step)) + 2 * net(some_ids(step + 1)) + net(some_ids(step))).backward()
        optimizer.step()


def with_closures(net: Net, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(some_ids(3))
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is not None
        assert optimizer.step(closure=closure) is not None


def retained(net: Net, optimizer: torch.optim.Optimizer) -> None:
    loss = net(some_ids(1))
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)  # no gradient of theirs
    loss.backward()
    optimizer.step()


def checkpointed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for reentrant in (False, True):
        optimizer.zero_grad()
        start = torch.ones((), requires_grad=True)
        one = checkpoint(lambda x: x * net(some_ids(1)), start, use_reentrant=reentrant)
        other = checkpoint(lambda x: x * net(some_ids(2)), start, use_reentrant=reentrant)
        (one + other + net(some_ids(3))).backward()
        optimizer.step()


SCRIPTS = [
    clipped,
    accumulated,
    zeroed_in_between,
    never_zeroed,
    stepped_on_zeros,
    looked_up_twice,
    with_closures,
    retained,
]


@pytest.mark.parametrize("script", [*SCRIPTS, checkpointed])
def test_gradients_are_handled_as_a_parameters(
    script: Callable[[Net, torch.optim.Optimizer], None],
) -> None:
    """Clipping, accumulating, zeroing, retaining, recomputing: a table's rows come out as an
    nn.Embedding's.
    """
    theirs, mine = pair(padding_idx=3)
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    assert torch.allclose(trained(mine, make, script), trained(theirs, make, script), atol=2e-6)


def test_proxy_gradients_are_norms() -> None:
    """After each backward proxy.grad is the norm of nn.Embedding's gradient, and the rows that
    wait are its rows.
    """
    theirs, mine = pair()
    for step in range(3):
        for net in (theirs, mine):
            net(some_ids(step)).backward()
        gradient = mine.embedding.gradient()

        assert torch.allclose(mine.embedding.proxy.grad, theirs.embedding.weight.grad.norm())
        assert torch.equal(gradient.rows, theirs.embedding.weight.grad[gradient.ids])
        gradient.mul_(0.0)
        assert torch.equal(
            mine.embedding.gradient().rows, theirs.embedding.weight.grad[gradient.ids]
        )
        assert (
            len(gradient.ids)
            == int((theirs.embedding.weight.grad != 0).any(1).sum())
            == len(gradient.ids.unique())
        )
    mine.zero_grad(set_to_none=False)
    assert len(mine.embedding.gradient().ids) == 0
    mine.embedding.discard()
    assert mine.embedding.gradient() is None and mine.embedding.proxy.grad is None


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_grad_scaler_unscales_rows_and_skips_what_overflows(options: dict[str, Any]) -> None:
    """GradScaler's scale is taken out of rows, also where the optimizer does that itself; an
    overflow leaves them as they are.
    """
    found = []
    for net in pair():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(4):
            optimizer.zero_grad()
            loss = net(some_ids(step)) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if not options and step == 1:
                scaler.unscale_(optimizer)
                clip_grad_norm_(net.parameters(), 0.4)
            before = values(net)
            scaler.step(optimizer)
            scaler.update()
            assert (step == 2) == torch.equal(before, values(net))
        found.append((values(net), scaler.get_scale()))

    assert (
        torch.allclose(found[0][0], found[1][0], atol=1e-6) and found[0][1] == found[1][1] == 512.0
    )


def test_a_distributed_optimizer_alone_trains_tables() -> None:
    """Where fleet's optimizer has no servers its inner one steps the rows, once, clipped as it
    says.
    """
    found = []
    for net in pair():
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        if net.embedding.__class__ is nn.Embedding:
            optimizer: torch.optim.Optimizer = inner
        else:
            names = {parameter: name for name, parameter in net.named_parameters()}
            optimizer = DistributedOptimizer(
                inner, names, lambda _: None, ClipGradByGlobalNorm(0.5)
            )
        for step in range(3):
            optimizer.zero_grad()
            net(some_ids(step)).backward()
            if optimizer is inner:
                clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        found.append(values(net))

    assert torch.allclose(*found, atol=1e-6)


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


# ---- ids ----


def test_ids_have_any_value_and_shape() -> None:
    """A table without a range takes every int64, in any shape, and reads the same row for the same
    id, whenever it is asked.
    """
    embedding = DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=4)
    ids = torch.tensor([[0, -1, 2**63 - 1], [-(2**63), 12345678901, 0]])

    rows = embedding(ids)

    assert rows.shape == (2, 3, DIM) and torch.equal(rows[0, 0], rows[1, 2])
    assert torch.equal(embedding(ids.flip(0)), rows.flip(0)) and torch.equal(
        embedding(ids[0, 1]), rows[0, 1]
    )
    assert torch.equal(DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=4)(ids), rows)
    assert not torch.equal(DistributedEmbedding(DIM, init=Normal(0.0, 0.5), seed=5)(ids), rows)
    assert torch.equal(embedding(ids.to(torch.int32)[:1, :2]), rows[:1, :2])
    assert DistributedEmbedding(1, init=Constant(3.0))(ids).eq(3).all()


def test_a_padding_id_reads_its_row_and_is_never_trained() -> None:
    """A padding_idx reads zeros (what it read before, in a module made of torch's), whatever else
    is in the batch.
    """
    embedding = DistributedEmbedding(DIM, padding_idx=-7)
    ids = torch.tensor([[-7, 3], [4, -7]])
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0, weight_decay=0.1)
    before = embedding(ids)
    before.sum().backward()
    assert embedding.gradient().ids.tolist() == [3, 4]
    optimizer.step()

    assert not embedding(ids)[0, 0].any() and not torch.equal(embedding(ids)[0, 1], before[0, 1])
    assert not embedding(torch.full((2,), -7)).any()
    pretrained = nn.Embedding.from_pretrained(torch.ones(ROWS, DIM), padding_idx=2)
    assert torch.equal(
        DistributedEmbedding.from_module(pretrained)(ids.abs() % 5), pretrained(ids.abs() % 5)
    )


def test_batches_without_ids_work() -> None:
    """No ids give no rows, empty bags zeros, and a backward and a step through them are those of a
    zero gradient.
    """
    for embedding, given, shape in (
        (DistributedEmbedding(DIM), (torch.empty(0, 3, dtype=torch.int64),), (0, 3, DIM)),
        (
            DistributedEmbedding(DIM, pooling="mean"),
            (torch.empty(2, 0, dtype=torch.int64),),
            (2, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sum"),
            (torch.empty(0, dtype=torch.int64), torch.zeros(3).long()),
            (3, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sqrtn", padding_idx=1),
            (torch.ones(2, 2).long(),),
            (2, DIM),
        ),
        (
            DistributedEmbedding(DIM, pooling="sum"),
            (torch.empty(0, dtype=torch.int64), torch.empty(0).long()),
            (0, DIM),
        ),
    ):
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        out = embedding(*given)
        out.sum().backward()

        assert out.shape == shape and not out.any()
        assert len(embedding.gradient().ids) == 0
        optimizer.step()


@pytest.mark.slow
def test_ten_million_ids_in_one_batch() -> None:
    """A batch may be as large as memory: forward, backward and step of ten million ids."""
    embedding = DistributedEmbedding(1, init=Constant(0.0))
    ids = torch.arange(10_000_000).remainder_(1000).mul_(10**15)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(ids).sum().backward()
    optimizer.step()

    assert embedding(ids[:1000]).eq(-10_000).all()


WHOLE, BAGGED = (
    DistributedEmbedding(DIM, num_embeddings=ROWS, name="words"),
    DistributedEmbedding(DIM, pooling="sum", name="words"),
)
FIVE = torch.arange(5)


@pytest.mark.parametrize(
    ("embedding", "given", "error", "message"),
    [
        (
            WHOLE,
            (torch.ones(3),),
            TypeError,
            "table 'words': ids: expected a tensor of int64, got torch.float32",
        ),
        (WHOLE, ([1, 2],), TypeError, "ids: expected a tensor of int64, got list"),
        (WHOLE, (torch.tensor([True]),), TypeError, "got torch.bool"),
        (
            WHOLE,
            (torch.tensor([[1, 2], [ROWS, -1]]),),
            ValueError,
            f"expected 0 to {ROWS - 1}, got {ROWS} at position 2",
        ),
        (WHOLE, (torch.tensor([3, -4]),), ValueError, "got -4 at position 1"),
        (
            WHOLE,
            (FIVE, FIVE),
            ValueError,
            "offsets and per_sample_weights are for a table with pooling",
        ),
        (
            BAGGED,
            (FIVE,),
            ValueError,
            "expected ids .bags, size., or .n. with offsets; got shape .5.",
        ),
        (BAGGED, (FIVE.view(1, 5), FIVE), ValueError, "expected ids .n. and offsets"),
        (
            BAGGED,
            (FIVE, torch.tensor([0, 3, 2])),
            ValueError,
            "expected them to go up, got 2 after 3 at 2",
        ),
        (BAGGED, (FIVE, torch.tensor([1, 3])), ValueError, "expected 0 as the first, got 1"),
        (BAGGED, (FIVE, torch.tensor([0, 6])), ValueError, "expected at most 5 as the last, got 6"),
        (
            BAGGED,
            (FIVE, torch.tensor([], dtype=torch.int64)),
            ValueError,
            "expected at least one for 5 ids",
        ),
        (BAGGED, (FIVE, torch.zeros(1)), TypeError, "offsets: expected int64, got torch.float32"),
        (
            BAGGED,
            (FIVE, torch.tensor([0]), FIVE),
            TypeError,
            "per_sample_weights: expected floats, got torch.int64",
        ),
        (BAGGED, (FIVE, torch.tensor([0]), torch.ones(4)), ValueError, "expected the ids' shape"),
    ],
)
def test_bad_input_is_named(
    embedding: nn.Module, given: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """What a table cannot look up is refused in words, with the first id that is wrong."""
    with pytest.raises(error, match=message):
        embedding(*given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embedding_dim": 0}, ValueError, "embedding_dim: expected 1 to"),
        ({"embedding_dim": 2.5}, TypeError, "embedding_dim: expected a whole number"),
        ({"num_embeddings": 0}, ValueError, "num_embeddings: expected 1 or more"),
        ({"pooling": "max"}, ValueError, "pooling: expected None, sum, mean, sqrtn, got 'max'"),
        ({"dtype": torch.float16}, ValueError, "dtype: expected torch.float32 or torch.float64"),
        ({"init": 0.5}, TypeError, "init: expected Normal"),
        ({"entry": 3}, TypeError, "entry: expected CountFilterEntry"),
        ({"ttl": 0}, ValueError, "ttl: expected a number above 0"),
        ({"eviction": "fifo"}, ValueError, "eviction: expected one of lru, lfu"),
        (
            {"num_embeddings": 4, "padding_idx": 4},
            ValueError,
            "padding_idx: expected -4 to 3, got 4",
        ),
        ({"cache_staleness": 2}, ValueError, "cache_staleness: expected cache_rows with it"),
        ({"cache_rows": -1}, ValueError, "cache_rows: expected 0 or more"),
        ({"optimizer": 0.1}, TypeError, "optimizer: expected one of trainer.row_optimizers"),
        (
            {"optimizer": row_optimizers.Segments([(1, torch.optim.Adagrad)])},
            ValueError,
            "parts of 5 columns together, got 1",
        ),
    ],
)
def test_bad_settings_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A setting that makes no sense is refused when the module is made."""
    with pytest.raises(error, match=message):
        DistributedEmbedding(**{"embedding_dim": DIM, **options})


@pytest.mark.parametrize("given", [(1000, 16), (1000, 16, 0)])
def test_arguments_in_torchs_order_are_refused(given: tuple[Any, ...]) -> None:
    """nn.Embedding has num_embeddings first: the message says how to write it here."""
    with pytest.raises(
        TypeError,
        match=f"only argument by position, got {len(given)}: write "
        r"DistributedEmbedding\(16, num_embeddings=1000\)$",
    ):
        DistributedEmbedding(*given)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Embedding(3, 2, max_norm=1.0), ValueError, "max_norm"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), ValueError, "scale_grad_by_freq"),
        (nn.EmbeddingBag(3, 2, mode="max"), ValueError, "mode 'max'"),
        (nn.Embedding(3, 2).half(), ValueError, "dtype: expected torch.float32"),
        (nn.Linear(3, 2), TypeError, "expected an nn.Embedding or nn.EmbeddingBag, got Linear"),
    ],
)
def test_what_an_embedding_cannot_be_made_of_is_named(
    module: Any, error: type[Exception], message: str
) -> None:
    """Forms of torch's embeddings that a table has no equal of are refused."""
    with pytest.raises(error, match=message):
        DistributedEmbedding.from_module(module)


def test_shows_and_clicks_are_summed_by_id() -> None:
    """The two keyword arguments that a ShowClickEntry names travel with the gradient, summed by id;
    others are refused.
    """
    embedding = DistributedEmbedding(DIM, entry=ShowClickEntry("seen", "bought"), padding_idx=0)
    ids = torch.tensor([[5, 5, 0], [7, 5, 7]])
    embedding(ids, bought=torch.tensor([[1.0], [0.5]])).sum().backward()
    embedding(ids[0], seen=torch.tensor([2, 3, 4])).sum().backward()

    gradient = embedding.gradient()

    assert dict(zip(gradient.ids.tolist(), gradient.statistics.tolist(), strict=True)) == {
        5: [8.0, 2.5],
        7: [2.0, 1.0],
    }
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'show': its entry names seen and bought"
    ):
        embedding(ids, show=ids)
    with pytest.raises(TypeError, match="it has no ShowClickEntry"):
        DistributedEmbedding(DIM)(ids, show=ids)
    with pytest.raises(
        ValueError, match="seen: expected a shape that broadcasts to .2, 3., got .2."
    ):
        embedding(ids, seen=torch.ones(2))


# ---- the module as a module ----


def steps_of(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(some_ids(step)).backward()
        optimizer.step()


def test_a_state_dict_resumes_to_the_bit(tmp_path: Any) -> None:
    """Rows and their states are in the state_dict, which torch loads with weights only; training
    goes on as if never stopped.
    """
    mine, make = pair()[1], partial(torch.optim.Adagrad, lr=0.1)
    optimizer = make(mine.parameters())
    steps_of(mine, optimizer, range(3))
    torch.save(
        {"model": mine.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt"
    )
    steps_of(mine, optimizer, range(3, 6))

    resumed, saved = (
        Net(DistributedEmbedding(DIM, num_embeddings=ROWS)),
        torch.load(tmp_path / "saved.pt", weights_only=True),
    )
    resumed.load_state_dict(saved["model"])
    optimizer = make(resumed.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    steps_of(resumed, optimizer, range(3, 6))

    assert torch.equal(values(resumed), values(mine))


def test_ids_wait_for_admission_here_too() -> None:
    """With a count of 3 the third step of an id is the first that is applied, also where the state
    was saved before it.
    """
    runs = []
    for stop in (False, True):
        embedding = DistributedEmbedding(
            DIM, entry=CountFilterEntry(3), optimizer=row_optimizers.Adagrad(lr=1.0)
        )
        reads = []
        for step in range(5):
            if stop and step == 2:
                state, embedding = (
                    embedding.state_dict(),
                    DistributedEmbedding(DIM, entry=CountFilterEntry(3)),
                )
                embedding.load_state_dict(state)
                embedding.optimizer = row_optimizers.Adagrad(lr=1.0)
            optimizer = torch.optim.SGD(embedding.parameters())
            optimizer.zero_grad()
            embedding(FIVE).sum().backward()
            optimizer.step()
            reads.append(values(embedding)[:5])
        runs.append(torch.stack(reads))

        assert torch.equal(reads[0], reads[1]) and not torch.equal(reads[1], reads[2])
    assert torch.equal(*runs)


def test_a_state_dict_of_other_rows_is_refused() -> None:
    """Another dim or dtype, and missing or torn rows, are named, and what was there stays."""
    embedding = DistributedEmbedding(DIM, name="words")
    state, before = embedding.state_dict(), values(embedding)
    for other, message in (
        (
            DistributedEmbedding(DIM + 1).state_dict(),
            "table 'words': expected rows of 5 numbers, got an array of shape .0, 6.",
        ),
        (
            DistributedEmbedding(DIM, dtype=torch.float64).state_dict(),
            "expected rows of float32, got float64",
        ),
        (
            {key: value for key, value in state.items() if key != "table.values"},
            "Missing key.*table.values",
        ),
        ({**state, "table.metadata": state["table.metadata"][:5]}, "metadata: expected JSON"),
    ):
        with pytest.raises(RuntimeError, match=message):
            embedding.load_state_dict(other)
        assert torch.equal(values(embedding), before)


def test_copies_are_whole_and_apart(tmp_path: Any) -> None:
    """deepcopy and torch.save take rows and states along; training one leaves the other."""
    mine = pair()[1]
    steps_of(mine, torch.optim.Adagrad(mine.parameters(), lr=0.1), range(2))
    torch.save(mine, tmp_path / "whole.pt")
    for copied in (copy.deepcopy(mine), torch.load(tmp_path / "whole.pt", weights_only=False)):
        before = values(mine)
        assert torch.equal(values(copied), before)
        steps_of(copied, torch.optim.Adagrad(copied.parameters(), lr=0.1), range(2, 4))

        assert torch.equal(values(mine), before) and not torch.equal(values(copied), before)


def test_lower_precision_is_that_of_the_output() -> None:
    """half() and the like change what forward returns, as for nn.Embedding; rows and what they
    learn stay as they are.
    """
    theirs, mine = (net.embedding for net in pair())

    assert (
        torch.equal(mine.bfloat16()(FIVE), theirs.bfloat16()(FIVE))
        and mine.proxy.dtype == torch.float32
    )
    mine(FIVE).float().sum().backward()
    assert mine.gradient().rows.dtype == torch.float32
    assert (
        mine.double()(FIVE).dtype == torch.float64 and values(mine.float()).dtype == torch.float32
    )


def test_a_frozen_table_stays() -> None:
    """A module whose parameters need no gradient gives none, and one made of a frozen nn.Embedding
    is frozen.
    """
    frozen = DistributedEmbedding.from_module(nn.Embedding.from_pretrained(torch.ones(ROWS, DIM)))
    assert not frozen(FIVE).requires_grad
    frozen.requires_grad_(True)
    frozen(FIVE).sum().backward()

    assert frozen.proxy.grad is not None and frozen.gradient().ids.tolist() == FIVE.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pooling", [None, "mean", "sqrtn"])
def test_ids_on_a_gpu_are_looked_up_there(pooling: str | None) -> None:
    """What is returned is on the ids' device, and a step with ids there is one with ids here,
    within rounding.
    """
    found = []
    for device in ("cpu", "cuda:0"):
        net = Net(DistributedEmbedding(DIM, pooling=pooling, padding_idx=3)).to(device)
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(some_ids(step).to(device)).backward()
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        found.append(net.embedding(some_ids(4).to(device)))

    assert found[1].device.type == "cuda" and torch.allclose(found[0], found[1].cpu(), atol=1e-5)


class Served:
    """Rows that something else holds: those of ids, plus what is told."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.more = 0.0

    def pull(self, ids: Tensor) -> Tensor:
        self.asked.append(ids.tolist())
        return ids[:, None].float().expand(-1, DIM) + self.more


def test_connected_rows_are_anothers() -> None:
    """Once connected, a module pulls each id once, holds no rows, saves none, and no optimizer here
    steps them.
    """
    net = pair()[1]
    embedding, start, source = net.embedding, values(pair()[1]), Served()
    ids, rows = embedding.initial_rows
    assert torch.equal(rows, start[ids])

    embedding.connect(source)

    assert torch.equal(embedding.initial_rows[1], rows) and list(embedding.state_dict()) == [
        "proxy"
    ]
    out = embedding(torch.tensor([[4, 4], [9, 2]]))
    assert torch.equal(out[..., 0], torch.tensor([[4.0, 4], [9, 2]])) and source.asked == [
        [4, 9, 2]
    ]
    out.sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    gradient = embedding.gradient()
    assert gradient.ids.tolist() == [4, 9, 2] and gradient.rows[:, 0].tolist() == [2.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="its rows are on servers"):
        copy.deepcopy(embedding)
    with pytest.raises(RuntimeError, match="fleet.load puts rows there"):
        embedding.load_state_dict(pair()[1].embedding.state_dict())


def test_cached_rows_are_pulled_again_after_the_bound() -> None:
    """With a cache, training pulls a row again after cache_staleness steps, not before; evaluation
    always does.
    """
    embedding, source = DistributedEmbedding(DIM, cache_rows=100, cache_staleness=1), Served()
    embedding.connect(source)
    for step in range(4):
        source.more = 10.0 * step
        out = embedding(torch.tensor([1, 2]))
        out.sum().backward()
        embedding.gradient()

        assert out[0, 0] == 1 + 10.0 * (step - step % 2)
    assert source.asked == [[1, 2], [1, 2]]
    embedding(torch.tensor([5]))
    source.more = 40.0
    assert (
        embedding(torch.tensor([5]))[0, 0] == 5 + 30.0 and embedding.cache.counters()["hits"] == 5
    )
    assert embedding.eval()(torch.tensor([5]))[0, 0] == 5 + 40.0


def test_a_table_is_a_plans() -> None:
    """What a plan needs of a table stands in one place, and two modules say in words why they are
    not one table.
    """
    segments = row_optimizers.Segments([(2, row_optimizers.SGD()), (3, row_optimizers.SGD())])
    embedding = DistributedEmbedding(
        DIM, num_embeddings=ROWS, optimizer=segments, name="words", seed=9, ttl=60.0
    )

    table = embedding.table(segments=[(0, 2, 4), (2, 5, 6)], lane=1)

    assert (table.name, table.rows, table.seed, table.ttl, table.lane) == (
        "words",
        ROWS,
        9,
        60.0,
        1,
    )
    assert [segment.group for segment in table.segments] == [4, 6]
    assert embedding.differs(copy.deepcopy(embedding)) is None
    assert (
        embedding.differs(
            DistributedEmbedding(DIM, num_embeddings=ROWS, optimizer=segments, seed=9)
        )
        == "ttl 60.0 and None"
    )
    assert "optimizer" in str(
        DistributedEmbedding(DIM).differs(DistributedEmbedding(DIM, optimizer=row_optimizers.SGD()))
    )
    assert "30 -> 5, name='words'" in repr(embedding) and "rows in this process" in repr(embedding)
