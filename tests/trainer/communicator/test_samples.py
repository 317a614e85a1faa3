"""The sampled elements of tensors: any layout and dtype, and memory that is exchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.transport.arrays import Assignment
from trainer.senders.pipeline import PendingAssignments
from trainer.senders.writes import SAMPLED, Samples, _positions

TENSORS = {
    "large": lambda: torch.randn(4000, 6),
    "transposed": lambda: torch.randn(40, 60).t(),
    "channels last": lambda: torch.randn(64, 64, 8, 8).to(memory_format=torch.channels_last),
    "a part of another": lambda: torch.randn(100, 100)[:, 3:90],
    "few": lambda: torch.randn(7),
    "a number": lambda: torch.randn(()),
    "complex128": lambda: torch.randn(3000, dtype=torch.complex128),
    "bfloat16": lambda: torch.randn(3000).bfloat16(),
    "not a number": lambda: torch.full((3000,), float("nan")),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_written_whole_is_noticed_and_no_other(name: str) -> None:
    """Through ``.data``; one whose bits stay is not, and neither is its neighbour."""
    tensor, other = TENSORS[name](), torch.randn(5000)
    samples = Samples([other, tensor])
    samples.note([0, 1])
    assert samples.changed([0, 1]) == []

    tensor.data.copy_(torch.ones_like(tensor) * 3)
    assert samples.changed([0, 1]) == [1]
    samples.note([0, 1])
    assert samples.changed([0, 1]) == []


def test_exchanged_memory_is_noticed_until_it_is_noted() -> None:
    """Equal values in another place: the caller compares."""
    tensor = torch.nn.Parameter(torch.randn(3000))
    samples = Samples([tensor, torch.empty(0)])
    samples.note([0, 1])
    tensor.data = tensor.data.clone()

    assert samples.changed([0, 1]) == [0]
    samples.note([0])
    assert samples.changed([0, 1]) == []
    tensor.data[:] = 0.0
    assert samples.changed([0, 1]) == [0]


NUMBERS = st.sets(st.integers(0, 4))


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "exchange", "note", "look"]), NUMBERS), max_size=12
    )
)
def test_small_tensors_are_looked_at_together_as_alone(acts: list[tuple[str, set[int]]]) -> None:
    """Whichever are noted, written or get other memory between two looks."""
    tensors = [
        *(torch.nn.Parameter(torch.zeros(size)) for size in (3, 0, 5)),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(3, 4).t(),
    ]
    samples, every = Samples(tensors), set(range(len(tensors)))
    noted = dict[int, tuple[int, bytes]]()

    def now(number: int) -> tuple[int, bytes]:
        return tensors[number].data_ptr(), tensors[number].detach().numpy().tobytes()

    for count, (act, numbers) in enumerate([("note", every), *acts, ("look", every)], 1):
        if act == "note":
            samples.note(sorted(numbers))
            noted.update({number: now(number) for number in numbers})
        elif act == "look":
            expected = [number for number in sorted(numbers) if now(number) != noted[number]]
            assert samples.changed(sorted(numbers)) == expected
        for number in numbers if act in ("write", "exchange") else ():
            if act == "exchange":
                tensors[number].data = tensors[number].data.clone()
            tensors[number].data += count * (act == "write")


@pytest.mark.parametrize("count", [1, 1024, 1025, 1500, 4096, 10**6])
def test_positions_are_distinct_in_range_and_stay(count: int) -> None:
    """All elements of a small tensor, 1,024 of a larger one, over the whole of it."""
    positions = _positions(count, 3)

    assert len(set(positions.tolist())) == min(count, SAMPLED)
    assert positions[0] >= 0 and positions[-1] < count
    assert np.array_equal(positions, _positions(count, 3))
    assert positions[-1] >= count * 0.99 - 8 and positions[0] <= count * 0.01 + 8


def test_a_reply_to_an_earlier_message_gets_what_was_written_since() -> None:
    """Until the message that carries it has been answered."""
    pending, values = PendingAssignments(), {"w": torch.zeros(3), "v": torch.zeros(3)}
    departure = pending.add({"w": Assignment(torch.tensor([5.0]), torch.tensor([1]))})
    pending.write(values, 3)
    pending.left(departure, 4)
    pending.write(values, 3)
    assert values["w"].tolist() == [0.0, 5.0, 0.0] and not values["v"].any()

    fresh = {"w": torch.zeros(3)}
    pending.write(fresh, 4)
    assert not fresh["w"].any()


def test_two_assignments_of_one_slice_are_one() -> None:
    """Where they meet the later one counts."""
    some = Assignment(torch.tensor([1.0, 2.0]), torch.tensor([0, 2]))
    later = Assignment(torch.tensor([7.0, 8.0]), torch.tensor([2, 3]))
    whole = Assignment(torch.zeros(4))
    before = torch.full((4,), -1.0)

    assert some.followed_by(later).applied_to(before).tolist() == [1, -1, 7, 8]
    assert whole.followed_by(later).applied_to(before).tolist() == [0, 0, 7, 8]
    assert some.followed_by(whole).applied_to(before).tolist() == [0, 0, 0, 0]
