"""What has a size that depends on data is refused at its line, with what to write; that is
captured.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from trainer import Executor
from transpiler import capture

LENGTHS = torch.tensor([6, 2, 5, 1])


class Reader(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.LSTM(3, 5, batch_first=True)

    def packed(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The last state of each sequence, by a packed batch."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state: torch.Tensor = self.layer(packed)[1][0][-1]
        return state

    def padded(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The same, as the refusal says."""
        outputs, _ = self.layer(x)
        found: torch.Tensor = outputs[torch.arange(lengths.shape[0]), lengths - 1]
        return found


def test_one_hot_without_a_number_of_classes() -> None:
    """The largest id of a batch is no size of a program."""
    model = nn.Linear(4, 2)

    def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(F.one_hot(ids).float()).sum()
        return result

    with pytest.raises(
        ValueError, match=r"test_sizes_of_data.py:\d+: .*one_hot\(ids, num_classes=...\)"
    ):
        capture(model, step, example=(torch.arange(4),))


def test_a_packed_sequence() -> None:
    """Refused, and what the refusal says to write computes the same."""
    model, x = Reader(), torch.randn(4, 6, 3)

    with pytest.raises(ValueError, match=r"test_sizes_of_data.py:\d+: .*give the layer the padded"):
        capture(model, lambda m, x, n: m.packed(x, n), example=(x, LENGTHS))
    program, _ = capture(model, lambda m, x, n: {"last": m.padded(x, n)}, example=(x, LENGTHS))
    with Executor() as executor:
        (last,) = executor.run(program, (x, LENGTHS), ["last"])
    torch.testing.assert_close(last, model.packed(x, LENGTHS).detach())
