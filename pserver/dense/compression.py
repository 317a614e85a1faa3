"""Compressed gradients: trainers send fewer bits for a slice, and servers decode them.

============  =============================================  =======================
scheme        a slice of n elements travels as               bytes per element
============  =============================================  =======================
``""``        itself                                         its own
``bfloat16``  n bfloat16                                     2
``float16``   n float16                                      2
``int8``      n int8, and a float32 scale for each           1 + 4 / ``BLOCK``
              ``BLOCK`` of them
============  =============================================  =======================

[Note: error feedback]  A trainer keeps what rounding takes from a gradient, and adds it to the next
one (Seide et al.: 1-bit stochastic gradient descent, 2014; Karimireddy et al.: Error feedback fixes
SignSGD, 2019): in the long run nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from transpiler.plan.plan import COMPRESSIONS as COMPRESSIONS

BLOCK = 1024  # elements that share a scale
LARGEST = 127
SCALE = "@scale"  # after a slice's name: the name of its scales

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(
    name: str, value: torch.Tensor, scheme: str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a slice's gradient travels as.

    Args:
        name: of the slice.
        value: a tensor of its shape and dtype.
        scheme: of the table above.

    Returns:
        Name on the wire -> dtype and shape.
    """
    if scheme == "int8":
        blocks = -(-value.numel() // BLOCK)
        return {name: (torch.int8, tuple(value.shape)), name + SCALE: (torch.float32, (blocks,))}
    return {name: (_HALVES.get(scheme, value.dtype), tuple(value.shape))}


def encode(name: str, gradient: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """Encodes a gradient; values that are not finite stay so.

    Args:
        name: of the slice.
        gradient: float32, float64 or 16-bit floats, of any shape.
        scheme: of the table above, but not ``""``.

    Returns:
        Name on the wire -> tensor, as :func:`layout` says.
    """
    if scheme != "int8":
        return {name: gradient.to(_HALVES[scheme])}
    blocks = _blocks(gradient)
    scales = blocks.abs().amax(dim=1).div_(LARGEST)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    whole = (blocks / divisors).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return {name: whole.view(-1)[: gradient.numel()].view(gradient.shape), name + SCALE: scales}


def decode(
    name: str, parts: Mapping[str, torch.Tensor], scheme: str, out: torch.Tensor
) -> torch.Tensor:
    """Decodes a gradient.

    Args:
        name: of the slice.
        parts: what :func:`encode` returned.
        scheme: the same.
        out: of the slice's shape and dtype; written.

    Returns:
        ``out``, or a view of it.
    """
    if scheme != "int8":
        return out.copy_(parts[name])
    scales = parts[name + SCALE].repeat_interleave(BLOCK)[: out.numel()]
    return out.view(-1).copy_(parts[name].view(-1)).mul_(scales).view(out.shape)


def _blocks(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as float32 rows of ``BLOCK`` elements, the last one filled up with zeros."""
    flat = gradient.reshape(-1).float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


class Compressor:
    """A trainer's encoder, which keeps what rounding took.  See [Note: error feedback].

    One caller at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def encode(self, name: str, gradient: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
        """As :func:`encode`, after adding what rounding took before; ``""`` is allowed here.

        The gradient itself is not changed.
        """
        if not scheme:
            return {name: gradient}
        if name in self._kept:
            gradient = gradient + self._kept[name]
        parts = encode(name, gradient, scheme)
        lost = gradient - decode(name, parts, scheme, torch.empty_like(gradient))
        self._kept[name] = lost.nan_to_num_(0.0, 0.0, 0.0)  # an overflow is not a rounding error
        return parts
