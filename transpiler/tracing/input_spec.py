"""The inputs of a step: shapes with sizes that stay free, given by the user instead of guessed.

Without a specification dimension 0 of an input stays free and every other size is the example's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transpiler.ir.schema import DTYPES

Size = int | str | None
# extents of the free dimensions of an example that is made up: all different, none of them 1
_MADE = (4, 6, 9, 10, 14, 15, 21, 22)


@dataclass(frozen=True, init=False)
class InputSpec:
    """One input of a step: its sizes that are fixed and those that stay free.

    Attributes:
        shape: for each dimension a whole number, which is fixed; None (or -1), which stays free; or
            a name, ``"time"``, which stays free and has one value wherever the name stands.
        dtype: torch's name without the prefix.
        name: of the input in the program; "" is that of the step's parameter.

    Example:
        >>> from pserver import InputSpec
        >>> InputSpec([None, "time", 64], "float32", "x").shape
        (None, 'time', 64)
    """

    shape: tuple[Size, ...]
    dtype: str
    name: str

    def __init__(
        self, shape: Sequence[Size], dtype: str | torch.dtype = "float32", name: str | None = None
    ) -> None:
        """Checks the arguments.

        Raises:
            TypeError: the shape is not a list of whole numbers, names and None.
            ValueError: a size is below 0 (and not -1), a name is not valid, or there is no such
                dtype.
        """
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"InputSpec: shape: expected a list, got {type(shape).__name__}")
        word = str(dtype).removeprefix("torch.")
        if word not in DTYPES:
            raise ValueError(f"InputSpec: dtype: expected one of {', '.join(DTYPES)}, got {word!r}")
        if name is not None and (not isinstance(name, str) or not name or "@" in name):
            raise ValueError(f"InputSpec: name: expected a text without '@', got {name!r}")
        object.__setattr__(self, "shape", tuple(_size(size) for size in shape))
        object.__setattr__(self, "dtype", word)
        object.__setattr__(self, "name", name or "")

    def check(self, which: str, tensor: Tensor) -> None:
        """Checks that an example fits.

        Args:
            which: the input, for messages.

        Raises:
            ValueError: it has another dtype or shape.
        """
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        fits = len(shape) == len(self.shape) and all(
            wanted == came
            for wanted, came in zip(self.shape, shape, strict=False)
            if isinstance(wanted, int)
        )
        if dtype != self.dtype or not fits:
            wanted = ", ".join("free" if size is None else str(size) for size in self.shape)
            raise ValueError(
                f"capture: input {which}: expected an example of {self.dtype}[{wanted}], as its "
                f"InputSpec says, got {dtype}{list(shape)}"
            )


def _size(size: object) -> Size:
    if size is None or size == -1:
        return None
    if isinstance(size, str):
        if not re.fullmatch(r"[A-Za-z_]\w*", size):
            raise ValueError(
                f"InputSpec: shape: expected an identifier as a free size's name, got {size!r}"
            )
        return size
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(
            f"InputSpec: shape: expected whole numbers, names and None, got {type(size).__name__}"
        )
    if size < 0:
        raise ValueError(f"InputSpec: shape: expected sizes of 0 or more, or -1, got {size}")
    return size


def data(name: str, shape: Sequence[Size], dtype: str | torch.dtype = "float32") -> InputSpec:
    """An input of a step by its name: an :class:`InputSpec`, with the arguments in another order.

    Args:
        name: of the input in the program.
        shape, dtype: as in :class:`InputSpec`.

    Raises:
        TypeError, ValueError: as :class:`InputSpec`.

    Example:
        >>> from pserver import data
        >>> data("ids", [None, None], "int64")
        InputSpec(shape=(None, None), dtype='int64', name='ids')
    """
    return InputSpec(shape, dtype, name)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a captured step.

    Attributes:
        names: in the program.
        batch: an example of each.
        free: for each input and dimension the name of the free size; "" for one without a name of
            its own, None for a fixed size.
    """

    names: tuple[str, ...]
    batch: tuple[Tensor, ...]
    free: tuple[tuple[str | None, ...], ...]

    def extents(self, factor: int = 1) -> list[list[int | None]]:
        """The example's extents of the free dimensions, times a factor; None for fixed ones."""
        return [
            [
                None if name is None else size * factor
                for name, size in zip(free, tensor.shape, strict=True)
            ]
            for free, tensor in zip(self.free, self.batch, strict=True)
        ]


def made_inputs(
    names: Sequence[str], given: Sequence[Tensor | InputSpec], said: Sequence[InputSpec] | None
) -> Inputs:
    """The inputs, from examples and specifications.

    An example is made up where only a specification is given: zeros for whole numbers, small
    numbers otherwise.

    Args:
        names: those of the step's parameters.
        given: a tensor or a specification for each.
        said: a specification for each; None: there are no others.

    Raises:
        ValueError: there are more or fewer specifications than inputs, an example does not fit, or
            two inputs have one name.
    """
    if said is not None and len(said) != len(given):
        raise ValueError(
            f"capture: inputs: expected an InputSpec for each of {len(given)} inputs, got "
            f"{len(said)}"
        )
    specs = [
        each if isinstance(each, InputSpec) else (said[index] if said is not None else None)
        for index, each in enumerate(given)
    ]
    named = tuple(
        name if spec is None or not spec.name else spec.name
        for name, spec in zip(names, specs, strict=True)
    )
    if len(set(named)) != len(named):
        raise ValueError(
            f"capture: expected inputs with names of their own, got {', '.join(named)}"
        )
    extents: dict[str, int] = {}
    batch, free = [], []
    for name, spec, each in zip(named, specs, given, strict=True):
        if isinstance(each, Tensor):
            if spec is not None:
                spec.check(repr(name), each)
            shape: tuple[Size, ...] = (None, *each.shape[1:]) if each.dim() else ()
            shape = shape if spec is None else spec.shape
            batch.append(each)
        else:
            shape = each.shape
            batch.append(_example(each, extents))
        free.append(tuple(None if isinstance(size, int) else size or "" for size in shape))
    return Inputs(named, tuple(batch), tuple(free))


def _example(spec: InputSpec, extents: dict[str, int]) -> Tensor:
    """An example of an input; ``extents`` collects the sizes that were made up, by name."""
    shape = []
    for place, size in enumerate(spec.shape):
        if isinstance(size, int):
            shape.append(size)
        else:
            # sizes without a name are equal at each place: all inputs have as many rows
            key = size or f"{place}"
            shape.append(extents.setdefault(key, _MADE[len(extents) % len(_MADE)]))
    dtype = DTYPES[spec.dtype]
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) % 7 - 3) / 4).reshape(shape).to(dtype)
