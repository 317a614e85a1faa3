"""Compressed gradients: trainers send fewer bits for a slice, and servers decode them.

============  =============================================  =======================
scheme        a slice of n elements travels as               bytes per element
============  =============================================  =======================
``""``        itself                                         its own
``bfloat16``  n bfloat16                                     2
``float16``   n float16                                      2
``int8``      n int8, and a float32 scale for each           1 + 4 / ``BLOCK``
              ``BLOCK`` of them
``sparse``    the m elements that are not 0, and m int32:    m / n (4 + its own)
              their positions; or itself, if that is less
============  =============================================  =======================

``sparse`` loses nothing.  Positions count from the slice's first element and ascend strictly.

[Note: error feedback]  A trainer keeps what rounding takes from a gradient, and adds it to the next
one (Seide et al.: 1-bit stochastic gradient descent, 2014; Karimireddy et al.: Error feedback fixes
SignSGD, 2019): in the long run nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pserver.errors import CorruptFrame
from pserver.transport.arrays import l2_norm
from transpiler.plan.plan import COMPRESSIONS as COMPRESSIONS

BLOCK = 1024  # elements that share a scale
LARGEST = 127
SCALE = "@scale"  # after a slice's name: the name of its scales
INDICES, VALUES = "@indices", "@values"  # likewise, of its elements that are not 0
INDEX_BYTES = 4

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(
    name: str, value: torch.Tensor, scheme: str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a slice's gradient travels as, those of a fixed size.

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


def selected_layout(
    name: str, value: torch.Tensor, scheme: str
) -> dict[str, tuple[torch.dtype, int]]:
    """The tensors of one dimension that travel in the place of :func:`layout`'s where few elements
    are not 0; empty for a scheme without such.

    Args:
        name: of the slice.
        value: a tensor of its shape and dtype.
        scheme: of the table above.

    Returns:
        Name on the wire -> dtype and the largest number of elements: with one more of them the
        slice itself takes no more bytes.
    """
    most = (value.nbytes - 1) // (INDEX_BYTES + value.itemsize)
    if scheme != "sparse" or most < 0 or value.numel() > 2**31:
        return {}
    return {name + INDICES: (torch.int32, most), name + VALUES: (value.dtype, most)}


def encode(name: str, gradient: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """Encodes a gradient; values that are not finite stay so.

    Args:
        name: of the slice.
        gradient: float32, float64 or 16-bit floats, of any shape.
        scheme: of the table above, but not ``""``.

    Returns:
        Name on the wire -> tensor, as :func:`layout` or :func:`selected_layout` says.
    """
    if scheme == "sparse":
        return _select(name, gradient)
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

    Raises:
        CorruptFrame: positions are not inside the slice, or do not ascend.
    """
    if name + INDICES in parts:
        return _scatter(name, parts[name + INDICES], parts[name + VALUES], out)
    if scheme != "int8":
        return out.copy_(parts[name])
    scales = parts[name + SCALE].repeat_interleave(BLOCK)[: out.numel()]
    return out.view(-1).copy_(parts[name].view(-1)).mul_(scales).view(out.shape)


def encoded_norm(name: str, parts: Mapping[str, torch.Tensor], scheme: str) -> float:
    """The L2 norm of a gradient as it is when it has been decoded; nothing is decoded.

    Args:
        name: of the slice.
        parts: what :func:`encode` returned; for ``""`` the gradient itself under its name.
        scheme: of the table above.

    Example:
        >>> encoded_norm("w", encode("w", torch.tensor([0.0, 3.0, 4.0]), "sparse"), "sparse")
        5.0
    """
    if scheme != "int8":
        return l2_norm(parts[name + VALUES] if name + VALUES in parts else parts[name])
    return l2_norm(_blocks(parts[name]).norm(dim=1).mul_(parts[name + SCALE]))


def _select(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = gradient.reshape(-1)
    positions = flat.nonzero().view(-1)
    for _, most in selected_layout(name, gradient, "sparse").values():
        if len(positions) <= most:
            return {name + INDICES: positions.int(), name + VALUES: flat[positions]}
    return {name: gradient}


def _scatter(
    name: str, indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """A slice with these elements and zeros.  What a trainer sends is checked before it is used as
    an address; strictly ascending positions name no element twice.
    """
    if len(indices) != len(values):
        raise CorruptFrame(
            f"gradient of {name!r}: expected as many values as positions, got {len(values)} and "
            f"{len(indices)}"
        )
    positions = indices.long()
    if len(positions) and not (
        0 <= int(positions[0])
        and int(positions[-1]) < out.numel()
        and bool((positions[1:] > positions[:-1]).all())
    ):
        raise CorruptFrame(
            f"gradient of {name!r}: expected positions from 0 to {out.numel() - 1}, strictly "
            f"ascending, got others between {int(positions.min())} and {int(positions.max())}"
        )
    out.view(-1).zero_()[positions] = values
    return out


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
        self._next: dict[str, torch.Tensor] = {}  # after the step under way

    def encode(self, name: str, gradient: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
        """As :func:`encode`, after adding what rounding took before; ``""`` is allowed here.

        The gradient itself is not changed.  :meth:`end` follows.
        """
        if not scheme:
            return {name: gradient}
        if scheme == "sparse":
            return encode(name, gradient, scheme)
        if name in self._kept:
            gradient = gradient + self._kept[name]
        parts = encode(name, gradient, scheme)
        lost = gradient - decode(name, parts, scheme, torch.empty_like(gradient))
        self._next[name] = lost.nan_to_num_(0.0, 0.0, 0.0)  # an overflow is not a rounding error
        return parts

    def end(self, sent: bool) -> None:
        """Ends the step.

        Args:
            sent: False: it was withdrawn, and rounding has taken nothing.
        """
        if sent:
            self._kept.update(self._next)
        self._next = {}
