"""Features normalized by what all batches so far were like."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.nn.labels import check_matrix


def data_norm(
    input: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    epsilon: float = 1e-5,
    summary_decay_rate: float = 0.9999999,
    update: bool = True,
) -> Tensor:
    """Subtracts each feature's mean and divides by its deviation, of the batches before this one.

    The mean is batch_sum / batch_size, the variance batch_square_sum / batch_size.  Then the sums
    are multiplied by the decay, and this batch is added: its number of samples, its sum, and the
    squares of its distances from that mean, plus epsilon each.  The statistics are constants for
    the gradient.  A batch norm normalizes by the batch itself instead (Ioffe, Szegedy: Batch
    Normalization, ICML 2015); the name and the sums are of PaddlePaddle's layer.

    Args:
        input: floats [n, features].
        batch_size, batch_sum, batch_square_sum: the sums, floats [features], written in place.
        epsilon: keeps the variance above 0.
        summary_decay_rate: above 0, up to 1.
        update: whether this batch is added.

    Returns:
        [n, features].

    Raises:
        ValueError: shapes do not fit, or the decay is out of its range.
    """
    check_matrix("data_norm", "input", input)
    features = (input.shape[1],)
    for name, sums in (
        ("batch_size", batch_size),
        ("batch_sum", batch_sum),
        ("batch_square_sum", batch_square_sum),
    ):
        if tuple(sums.shape) != features:
            raise ValueError(
                f"data_norm: {name}: expected {list(features)}, got {list(sums.shape)}"
            )
    if not 0 < summary_decay_rate <= 1:
        raise ValueError(
            "data_norm: summary_decay_rate: expected a number above 0, up to 1, got "
            f"{summary_decay_rate}"
        )
    with torch.no_grad():
        mean = batch_sum / batch_size
        scale = (batch_size / batch_square_sum).sqrt()
        if update:
            given = input.detach().to(mean.dtype)
            squares = (given - mean).square() + epsilon
            for sums, added in (
                (batch_size, torch.ones_like(given)),
                (batch_sum, given),
                (batch_square_sum, squares),
            ):
                sums.mul_(summary_decay_rate).add_(added.sum(0))
    return (input - mean.to(input.dtype)) * scale.to(input.dtype)


class DataNorm(nn.Module):
    """:func:`data_norm` with sums of its own, to which each batch is added while it trains.

    The sums are buffers: part of ``state_dict()``, of checkpoints and of exports.  In a job with
    servers ``a_sync_configs["buffers"] = "mean"`` makes them the mean over trainers, on servers;
    "trainer0", if nothing else is said, trainer 0's.

    Args:
        num_features: of the input.
        epsilon, summary_decay_rate: as of the function.
        batch_size_default, batch_sum_default, batch_square_sum_default: what the sums begin with;
            the greater they are, the longer the first batches count little.

    Attributes:
        batch_size, batch_sum, batch_square_sum: float64 [num_features]; float32 would not see a
            decay that is so near to 1.
    """

    batch_size: Tensor
    batch_sum: Tensor
    batch_square_sum: Tensor

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        summary_decay_rate: float = 0.9999999,
        batch_size_default: float = 1e4,
        batch_sum_default: float = 0.0,
        batch_square_sum_default: float = 1e4,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.summary_decay_rate = summary_decay_rate
        for name, value in (
            ("batch_size", batch_size_default),
            ("batch_sum", batch_sum_default),
            ("batch_square_sum", batch_square_sum_default),
        ):
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        """[n, num_features] -> [n, num_features]."""
        return data_norm(
            input,
            self.batch_size,
            self.batch_sum,
            self.batch_square_sum,
            self.epsilon,
            self.summary_decay_rate,
            self.training,
        )
