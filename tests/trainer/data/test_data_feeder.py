"""Promises about feeds that are made of a script's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer import DataFeeder, Executor, cpu_places, fleet
from transpiler import InputSpec, capture, data

IMAGE, LABEL = data("image", [None, 2, 2]), data("label", [None], "int64")


def test_samples_become_tensors() -> None:
    """Flat lists, nested ones, arrays and tensors become inputs of a shape; numbers of any kind
    those of the input's dtype.
    """
    feeder = DataFeeder([IMAGE, LABEL], cpu_places()[0])
    samples = [
        ([1, 2, 3, 4], 1),
        ([[1, 2], [3, 4.5]], [0]),
        (np.ones((2, 2), np.float64), np.int32(2)),
        (torch.zeros(4), torch.tensor(3)),
    ]

    found = feeder.feed(iter(samples))

    assert found["image"].dtype == torch.float32 and found["image"].shape == (4, 2, 2)
    assert found["image"][:2].flatten().tolist() == [1, 2, 3, 4, 1, 2, 3, 4.5]
    assert found["label"].dtype == torch.int64 and found["label"].tolist() == [1, 0, 2, 3]


def test_free_sizes_are_the_samples() -> None:
    """All samples of a batch have the same ones."""
    feeder = DataFeeder([data("x", [None, "time", 2])])

    assert feeder.feed([([[1, 2], [3, 4], [5, 6]],)])["x"].shape == (1, 3, 2)
    with pytest.raises(ValueError, match=r"sample 1, .*'x': expected \[1, 2\], as sample 0 has"):
        feeder.feed([([[1, 2]],), ([[1, 2], [3, 4]],)])
    with pytest.raises(ValueError, match=r"expected float32 \[free, 2\], got int64 \[2\]"):
        feeder.feed([([1, 2],)])


@pytest.mark.parametrize(
    "feed_list",
    [
        [fleet.Slot("ids", width=None), fleet.Slot("y", "float32")],
        [data("ids", [None], "int64"), data("ids_offsets", [None], "int64"), data("y", [None])],
    ],
    ids=["slot", "offsets"],
)
def test_ragged_inputs_are_values_and_offsets(feed_list: list[Any]) -> None:
    """As an embedding with pooling takes them; a sample may have no value."""
    found = DataFeeder(feed_list).feed([([7, 8], 1.5), ([], 0), (9, 2)])

    assert found["ids"].tolist() == [7, 8, 9] and found["ids"].dtype == torch.int64
    assert found["ids_offsets"].tolist() == [0, 2, 2]
    assert found["y"].tolist() == [1.5, 0, 2]
    bags = torch.nn.EmbeddingBag(10, 2)(found["ids"], found["ids_offsets"])
    assert bags.shape == (3, 2) and not bags[1].any()


def test_a_program_takes_what_it_gives() -> None:
    """By the names of its inputs, and by these themselves."""
    model = torch.nn.Linear(2, 1)
    main, startup = capture(
        model,
        lambda model, x, y: (model(x).squeeze(1) - y).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.ones(3, 2), torch.ones(3)),
    )
    samples = [([1, 2], 3), ([4, 5], 6)]
    feed = DataFeeder(["x", "y"], program=main).feed(samples)
    with Executor() as executor:
        executor.run(startup)
        (loss,) = executor.run(main, feed, ["loss"])

    assert loss.isfinite()
    with pytest.raises(ValueError, match="expected inputs among x, y, got 'z'"):
        DataFeeder(["z"], program=main)


@pytest.mark.parametrize(
    ("samples", "kind", "said"),
    [
        ([], ValueError, "expected a sample or more, got none"),
        ([([1, 2, 3, 4], 1), ([1, 2, 3, 4],)], ValueError, "sample 1: expected 2 values .image"),
        ([([1, 2, 3], 1)], ValueError, r"'image': expected float32 \[2, 2\], got int64 \[3\]"),
        ([([1, 2, 3, 4], 1.5)], ValueError, r"'label': expected int64 \[\], got float64 \[\]"),
        ([([1, 2, 3, 4], "a")], TypeError, "sample 0, input 'label': .* numbers, .* got str$"),
        ([([[1, 2], [3]], 1)], TypeError, "input 'image': expected numbers"),
        ([5], TypeError, "sample 0: expected a tuple, got int"),
    ],
)
def test_wrong_samples_are_named(samples: Any, kind: type[Exception], said: str) -> None:
    """Which sample and which input, what was expected and what was got."""
    with pytest.raises(kind, match=said):
        DataFeeder([IMAGE, LABEL]).feed(samples)


def test_wrong_inputs_are_named() -> None:
    """What is no input, and two of one name."""
    with pytest.raises(TypeError, match="or fleet.Slot.*, got int"):
        DataFeeder([3])
    with pytest.raises(TypeError, match="expected a list, got 'x'"):
        DataFeeder("x")
    for wrong in ([], [LABEL, LABEL], [InputSpec([None])]):
        with pytest.raises(ValueError, match="names of their own"):
            DataFeeder(wrong)
    with pytest.raises(ValueError, match="'word': expected a slot of numbers, .* string_ids"):
        DataFeeder([fleet.Slot("word", "string")])
