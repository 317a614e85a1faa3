"""Functions over sequences of any length: each equals a loop over the sequences, in values and in
gradients, in eager code, over nested tensors and in programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import trainer.nn as field
import trainer.nn.functional as FF
from tests.support.step_programs import trains_alike

LENGTHS = (3, 0, 1, 4, 0)  # empty ones in the middle and at the end
Pair = tuple[Tensor, Tensor]


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths))], dtype=torch.int64)


def split(values: Tensor, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return list(values.split(list(lengths)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def pooled(how: str) -> Callable[[Tensor], Tensor]:
    """Of one sequence."""
    return {
        "sum": lambda part: part.sum(0),
        "average": lambda part: part.mean(0),
        "sqrt": lambda part: part.sum(0) / len(part) ** 0.5,
        "max": lambda part: part.amax(0),
        "last": lambda part: part[-1],
        "first": lambda part: part[0],
    }[how]


def neighbours(part: Tensor, size: int, start: int) -> Tensor:
    """[steps, size of a window, features] of one sequence."""
    zero = torch.zeros_like(part[:1].sum(0))
    rows = [
        torch.stack([part[k] if 0 <= k < len(part) else zero for k in range(i, i + size)])
        for i in range(start, start + len(part))
    ]
    return torch.stack(rows) if rows else part.new_zeros(0, size, *part.shape[1:])


WEIGHT = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OTHER = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
OTHER_LENGTHS = (1, 2, 0, 0, 3)

# name: what is called with (values, offsets), and a loop over the parts
CASES: dict[str, tuple[Callable[[Pair], Tensor], Callable[[list[Tensor]], Tensor]]] = {
    f"pool {how}": (
        lambda given, how=how: FF.sequence_pool(given, how, pad_value=7.0),
        lambda parts, how=how: torch.stack(
            [pooled(how)(p) if len(p) else torch.full((2,), 7.0).double() for p in parts]
        ),
    )
    for how in ("sum", "average", "sqrt", "max", "last", "first")
} | {
    "first step": (
        FF.sequence_first_step,
        lambda parts: torch.stack([p[0] if len(p) else p.sum(0) for p in parts]),
    ),
    "last step": (
        FF.sequence_last_step,
        lambda parts: torch.stack([p[-1] if len(p) else p.sum(0) for p in parts]),
    ),
    "softmax": (
        lambda given: FF.sequence_softmax(given)[0],
        lambda parts: joined([p.softmax(0) for p in parts]),
    ),
    "reverse": (
        lambda given: FF.sequence_reverse(given)[0],
        lambda parts: joined([p.flip(0) for p in parts]),
    ),
    "concat": (
        lambda given: FF.sequence_concat([given, (given[0] * 2, given[1])])[0],
        lambda parts: joined([torch.cat([p, p * 2]) for p in parts]),
    ),
    "pad": (
        lambda given: FF.sequence_pad(given, 5.0, maxlen=6)[0],
        lambda parts: torch.stack(
            [torch.cat([p, p.new_full((6 - len(p), 2), 5.0)]) for p in parts]
        ),
    ),
    "conv": (
        lambda given: FF.sequence_conv(given, WEIGHT, torch.ones(4).double())[0],
        lambda parts: joined([neighbours(p, 3, -1).flatten(1) @ WEIGHT + 1 for p in parts]),
    ),
    "conv from before": (
        lambda given: FF.sequence_conv(given, WEIGHT, padding_start=-3)[0],
        lambda parts: joined([neighbours(p, 3, -3).flatten(1) @ WEIGHT for p in parts]),
    ),
    "reshape": (
        lambda given: FF.sequence_reshape(given, 1)[0],
        lambda parts: joined([p.reshape(-1, 1) for p in parts]),
    ),
}
EAGER = {
    "expand": (
        lambda given: FF.sequence_expand(given, (OTHER, offsets_of(OTHER_LENGTHS)))[0],
        lambda parts: joined([p.repeat(n, 1) for p, n in zip(parts, OTHER_LENGTHS, strict=True)]),
    ),
    "slice": (
        lambda given: FF.sequence_slice(
            given, torch.tensor([1, 0, 0, 2, 0]), torch.tensor([[2], [0], [1], [1], [0]])
        )[0],
        lambda parts: joined([parts[0][1:3], parts[2], parts[3][2:3]]),
    ),
    "pad and unpad": (
        lambda given: FF.sequence_unpad(*FF.sequence_pad(given))[0],
        joined,
    ),
}
OTHERS = {
    "concat of other lengths": (
        lambda given: FF.sequence_concat([given, (OTHER, offsets_of(OTHER_LENGTHS)), given])[0],
        lambda parts: joined(
            [torch.cat([p, o, p]) for p, o in zip(parts, split(OTHER, OTHER_LENGTHS), strict=True)]
        ),
    ),
}
QUICK = ("pool max", "softmax", "concat", "pad")  # of which in programs all tests of a run have one


@pytest.mark.parametrize("name", [*CASES, *EAGER, *OTHERS])
def test_a_function_equals_a_loop_over_sequences(name: str) -> None:
    """Values and gradients, with empty sequences among them."""
    ours, reference = {**CASES, **EAGER, **OTHERS}[name]
    torch.manual_seed(0)
    values = torch.randn(sum(LENGTHS), 2, dtype=torch.float64, requires_grad=True)
    twin = values.detach().clone().requires_grad_()

    found, expected = ours((values, offsets_of(LENGTHS))), reference(split(twin))

    torch.testing.assert_close(found, expected)
    weights = torch.rand_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(values.grad, twin.grad)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in CASES]
)
def test_a_function_of_sequences_in_a_program(name: str) -> None:
    """A program trains as eager code does, with another number of values at each step."""
    ours, _ = CASES[name]
    torch.manual_seed(0)

    def batch(*lengths: int) -> Pair:
        return torch.randn(sum(lengths), 2).double(), offsets_of(lengths)

    def step(model: nn.Module, values: Tensor, offsets: Tensor) -> Tensor:
        return ours((model(values), offsets)).square().mean()

    others = (batch(*each) for each in ((4, 0, 1, 2, 0), (2, 3), (0, 5, 2, 1)))
    trains_alike(nn.Linear(2, 2).double(), step, batch(*LENGTHS), *others)


def test_functions_of_ids() -> None:
    """Enumerate, erase, mask, scatter and expand_as, against what is written out."""
    ids, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3, 3])
    made, kept = FF.sequence_enumerate((ids, offsets), 2, pad_value=9)
    assert made.tolist() == [[1, 2], [2, 3], [3, 9], [4, 5], [5, 9]] and torch.equal(kept, offsets)
    erased, offsets_then = FF.sequence_erase((ids, offsets), [2, 3, 5])
    assert erased.tolist() == [1, 4] and offsets_then.tolist() == [0, 1, 1]
    assert FF.sequence_mask(torch.tensor([2, 0, 3])).tolist() == [[1, 1, 0], [0] * 3, [1] * 3]
    assert FF.sequence_mask(torch.tensor([1]), 2, torch.bool).tolist() == [[True, False]]
    rows = torch.ones(3, 4, requires_grad=True)
    columns = torch.tensor([0, 0, 3, 1, 2])
    updates = torch.arange(1.0, 6.0, requires_grad=True)
    added = FF.sequence_scatter(rows, (columns, offsets), (updates, offsets))
    assert added.tolist() == [[4, 1, 1, 4], [1, 1, 1, 1], [1, 5, 6, 1]]
    (added * torch.arange(4.0)).sum().backward()
    assert updates.grad.tolist() == [0, 0, 3, 1, 2]
    expanded, _ = FF.sequence_expand_as(torch.tensor([[1.0], [2.0], [3.0]]), (ids, offsets))
    assert expanded.flatten().tolist() == [1, 1, 1, 3, 3]
    assert torch.equal(
        FF.sequence_expand(torch.arange(3), (ids, offsets))[0], torch.tensor([0, 0, 0, 2, 2])
    )


def test_nested_tensors_come_back_nested() -> None:
    """What is given as a nested tensor gives one, with the same gradients."""
    parts = [torch.randn(n, 2) for n in (2, 3, 1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    found = FF.sequence_softmax(nested)
    assert found.is_nested
    for mine, part in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(mine, part.softmax(0))
    pooled = field.SequencePool("max")(field.SequenceSoftmax()(nested))
    assert pooled.shape == (3, 2)
    pooled.sum().backward()
    assert nested.grad is not None
    conv = field.SequenceConv(2, 5)
    assert conv(FF.sequence_reverse(nested)).unbind()[1].shape == (3, 5)


def test_no_sequences_at_all() -> None:
    """A batch of none, and one of empty ones."""
    none = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 2), torch.zeros(3, dtype=torch.int64)
    for given, count in ((none, 0), (empty, 3)):
        for how in ("sum", "average", "sqrt", "max", "last", "first"):
            assert torch.equal(FF.sequence_pool(given, how), torch.zeros(count, 2))
        assert FF.sequence_softmax(given)[0].shape == (0, 2)
        assert FF.sequence_pad(given)[0].shape == (count, 0, 2)
        assert FF.sequence_concat([given, given])[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v, o: FF.sequence_pool(v, "sum"), r"\(values, offsets\) or a nested tensor, got a"),
        (lambda v, o: FF.sequence_pool((v, o), "mean"), "pool_type: expected one of 'sum'"),
        (lambda v, o: FF.sequence_reverse((v, o + 1)), "expected 0 as the first, got 1"),
        (lambda v, o: FF.sequence_reverse((v, o.flip(0) - 3)), "expected 0 as the first, got 0|up"),
        (lambda v, o: FF.sequence_reverse((v[:2], o)), "expected at most 2, .* got 3"),
        (lambda v, o: FF.sequence_pad((v, o), maxlen=2), "maxlen: expected 3 or more, got 2"),
        (lambda v, o: FF.sequence_slice((v, o), o, o), "offset: expected 0 to 1 at 1, got 3"),
        (lambda v, o: FF.sequence_expand_as(v, (v, o)), "expected 4 sequences, got 2"),
        (lambda v, o: FF.sequence_reshape((v, o), 4), "4 does not divide"),
        (lambda v, o: FF.sequence_conv((v, o), torch.ones(3, 1)), r"expected \[6, filters\]"),
    ],
)
def test_wrong_input_is_refused_with_what_was_expected(call, message: str) -> None:
    """One sentence: what was expected, and what was got."""
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.ones(4, 2), torch.tensor([0, 3]))


@pytest.mark.parametrize("name", EAGER)
def test_what_depends_on_values_is_refused_in_a_program(name: str) -> None:
    """The error says why, and what to do instead."""
    ours, _ = EAGER[name]
    step = lambda m, v, o: ours((m(v), o)).sum()  # noqa: E731
    given = torch.randn(sum(LENGTHS), 2).double(), offsets_of(LENGTHS)
    with pytest.raises(
        ValueError, match="depends on values|maxlen: expected a number in a program"
    ):
        trains_alike(nn.Linear(2, 2).double(), step, given)
