"""The losses of the field: each equals what is written out here, in values and in gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainer.nn as field
import trainer.nn.functional as FF
from tests.support.step_programs import trains_alike


def check(ours: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values, and gradients of each input that has one, under a random weighting of the losses."""
    leaves = [
        [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs] for _ in range(2)
    ]
    values = [function(*given) for function, given in zip((ours, reference), leaves, strict=True)]
    torch.testing.assert_close(values[0], values[1])
    weights = torch.rand_like(values[0])
    for value in values:
        (value * weights).sum().backward()
    for mine, theirs in zip(*leaves, strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad)


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_bpr_loss_is_the_mean_over_pairs() -> None:
    """Each other item against the chosen one."""
    label = torch.tensor([1, 0, 4])

    def reference(x: Tensor) -> Tensor:
        rows = []
        for row, i in zip(x, label.tolist(), strict=True):
            pairs = [-F.logsigmoid(row[i] - row[j]) for j in range(5) if j != i]
            rows.append(torch.stack(pairs).mean())
        return torch.stack(rows).unsqueeze(1)

    check(lambda x: FF.bpr_loss(x, label), reference, scores(3, 5))
    check(lambda x: field.BPRLoss()(x, label.unsqueeze(1)), reference, scores(3, 5))
    with pytest.raises(ValueError, match="label: expected 0 to 4, got 5"):
        FF.bpr_loss(scores(1, 5), torch.tensor([5]))
    with pytest.raises(ValueError, match=r"label: expected \[3\] or \[3, 1\], got \[2\]"):
        FF.bpr_loss(scores(3, 5), torch.tensor([0, 1]))


def test_losses_of_pairs() -> None:
    """RankNet's cross entropy of sigmoid(left - right), and the hinge."""
    soft, hard = torch.rand(4, 1).double(), torch.tensor([[1.0], [-1], [1], [-1]]).double()
    check(
        lambda x, y: FF.rank_loss(soft, x, y),
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(x - y), soft, reduction="none"),
        scores(4, 1),
        scores(4, 1),
    )
    check(
        lambda x, y: field.MarginRankLoss(0.3)(hard, x, y),
        lambda x, y: F.margin_ranking_loss(x, y, hard, margin=0.3, reduction="none"),
        scores(4, 1),
        scores(4, 1),
    )
    with pytest.raises(ValueError, match=r"one shape, got label \[4, 1\], left \[4\]"):
        field.RankLoss()(soft, scores(4), scores(4))


def test_a_teacher_and_a_click_in_one_label() -> None:
    """The four kinds of labels; a logit beyond the bounds has a loss and no gradient."""
    label = torch.tensor([-2.0, -1.0, 0.3, 1.6, 0.0, 1.0], dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        def log_loss(logit: Tensor, target: float) -> Tensor:
            return -target * F.logsigmoid(logit) - (1 - target) * F.logsigmoid(-logit)

        known = {-2.0: (0, None), -1.0: (1, None), 0.3: (0, 0.3), 1.6: (1, 0.6)}
        known |= {0.0: (0, 0.0), 1.0: (1, 0.0)}
        rows = []
        for logit, each in zip(x, label.tolist(), strict=True):
            click, teacher = known[each]
            loss = log_loss(logit, click)
            rows.append(loss if teacher is None else loss + log_loss(logit, teacher))
        return torch.stack(rows)

    check(lambda x: field.TeacherStudentSigmoidLoss()(x, label), reference, scores(6))
    far = torch.tensor([16.0, -16.0], requires_grad=True)
    loss = FF.teacher_student_sigmoid_loss(far, torch.tensor([-2.0, -1.0]))
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx(16, abs=1e-5)] * 2 and far.grad.tolist() == [0, 0]


def test_centers_move_towards_their_samples() -> None:
    """The loss is that of the centers before; evaluation moves none."""
    module = field.CenterLoss(3, 2, alpha=0.5)
    module.centers.copy_(torch.tensor([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0]]))
    x, label = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])
    before = module.centers.clone()
    expected = before.clone()
    for center, m in ((0, 2), (1, 1)):
        change = sum(before[center] - x[i] for i in range(3) if int(label[i]) == center)
        expected[center] -= 0.5 * change / (1 + m)

    loss = module(x, label)

    assert torch.equal(loss, (x - before[label]).square().sum(1, keepdim=True) / 2)
    torch.testing.assert_close(module.centers, expected)
    module.eval()(x, label)
    torch.testing.assert_close(module.centers, expected)
    assert not list(module.parameters())


@pytest.mark.parametrize("use_cvm", [True, False])
def test_shows_and_clicks_are_features(use_cvm: bool) -> None:
    """Their columns become logarithms, or go; their gradient is the counts, whatever the loss."""
    x = torch.rand(4, 5, requires_grad=True)
    cvm = torch.tensor([[1.0, 0.0], [1, 1], [2, 1], [1, 0]])

    made = field.ContinuousValueModel(use_cvm)(x, cvm)

    show, click = (x[:, 0] + 1).log(), (x[:, 1] + 1).log()
    columns = torch.stack([show, click - show], 1)
    torch.testing.assert_close(made, torch.cat([columns, x[:, 2:]], 1) if use_cvm else x[:, 2:])
    (made * 3).sum().backward()
    assert torch.equal(x.grad, torch.cat([cvm, torch.full((4, 3), 3.0)], 1))


def test_the_complete_tree_is_a_distribution() -> None:
    """Of any number of classes the probabilities of the leaves add up to 1."""
    for classes in (2, 5, 8):
        weight, bias = torch.randn(classes - 1, 3).double(), torch.randn(classes - 1, 1).double()
        x = torch.randn(1, 3).double().expand(classes, 3)
        loss = FF.hsigmoid_loss(x, torch.arange(classes), classes, weight, bias)
        assert (-loss).exp().sum().item() == pytest.approx(1)


@pytest.mark.parametrize("custom", [False, True])
def test_a_way_through_the_tree(custom: bool) -> None:
    """Walked node by node: the complete tree, and one of our own; sparse gradients are equal."""
    paths = {0: [(0, 0)], 1: [(0, 1), (1, 0)], 2: [(0, 1), (1, 1), (3, 0)]}
    nodes, label = 4, torch.tensor([2, 0, 1])
    classes = nodes if custom else nodes + 1
    table, code = (torch.full((3, 3), -1) for _ in range(2))
    for row, c in enumerate(label.tolist()):
        for at, (node, decision) in enumerate(paths[c]):
            table[row, at], code[row, at] = node, decision

    def way(c: int) -> list[tuple[int, int]]:
        node, found = c + classes, []
        while node > 1:
            found.append((node // 2 - 1, node % 2))
            node //= 2
        return paths[c] if custom else found

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = []
        for row, c in zip(x, label.tolist(), strict=True):
            each = [(row @ weight[n] + bias[n]) * (2 * bit - 1) for n, bit in way(c)]
            rows.append(-sum(F.logsigmoid(score) for score in each))
        return torch.stack(rows)

    given = (table, code) if custom else ()

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return FF.hsigmoid_loss(x, label, classes, weight, bias, *given)

    check(ours, reference, scores(3, 6), scores(nodes, 6), scores(nodes, 1))
    dense, sparse = (field.HSigmoidLoss(6, classes, True, custom, how) for how in (False, True))
    sparse.load_state_dict(dense.state_dict())
    x = torch.randn(3, 6)
    for each in (dense, sparse):
        each(x, label, *given).sum().backward()
    assert torch.equal(sparse.weight.grad.to_dense(), dense.weight.grad)
    assert torch.equal(sparse.bias.grad.to_dense(), dense.bias.grad)


STEPS = {
    "bpr": lambda m, x, y: field.BPRLoss()(m(x), y).mean(),
    "pairs": lambda m, x, y: (
        FF.rank_loss(torch.sigmoid(x[:, 0]), m(x)[:, 0], m(x)[:, 1])
        + FF.margin_rank_loss(x[:, 0].sign(), m(x)[:, 0], m(x)[:, 1])
    ).sum(),
    "teacher": lambda m, x, y: FF.teacher_student_sigmoid_loss(m(x), x).mean(),
    "counts": lambda m, x, y: FF.continuous_value_model(m(x).exp(), x[:, :2]).square().mean(),
    "hash": lambda m, x, y: m(F.one_hot(FF.hash(y, 4)[:, 0, 0], 4).float()).square().mean(),
    "shard": lambda m, x, y: (m(x) * (FF.shard_index(y, 4, 2, 1) >= 0).unsqueeze(1)).sum(),
}


@pytest.mark.parametrize("name", STEPS)
def test_losses_in_programs(name: str) -> None:
    """A program trains as eager code does, at batch sizes other than the example's."""
    torch.manual_seed(3)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.rand(size, 4), torch.randint(4, (size,))

    trains_alike(nn.Linear(4, 4), STEPS[name], batch(4), batch(4), batch(7))


class _Both(nn.Module):
    """A layer, and a loss with tensors of its own."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.loss(self.layer(x), y).mean()
        return found


@pytest.mark.parametrize("loss", [lambda: field.CenterLoss(4, 4), lambda: field.HSigmoidLoss(4, 4)])
def test_losses_with_tensors_in_programs(loss: Callable[[], nn.Module]) -> None:
    """Centers move and weights train in a program as in eager code."""
    torch.manual_seed(3)
    trains_alike(
        _Both(loss()),
        lambda m, x, y: m(x, y),
        (torch.randn(3, 4), torch.tensor([1, 0, 1])),
        (torch.randn(5, 4), torch.tensor([1, 0, 1, 3, 2])),
    )
