"""Conversion of a script's samples into the dict of tensors that a program takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.pieces import Slot
from transpiler.ir.graph import Role
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

OFFSETS = "_offsets"  # after a ragged input's name: where the values of each sample begin


@dataclass(frozen=True, slots=True)
class _Input:
    """An input, of which each sample has a value.

    Attributes:
        sizes: of a sample's value; a size that is no integer is free.  None: it is ragged.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Any, ...] | None


class DataFeeder:
    """Turns lists of samples into feeds of ``Executor.run``.

    A sample has a value for each input: a number, a list, an array or a tensor.  One of a fixed
    shape may be flat, as an image in a list.  Free sizes are those that the samples have.  A ragged
    input ``x`` becomes ``x``, the values of all samples, and ``x_offsets``, int64 [batch], where
    those of each sample begin.

    Args:
        feed_list: the inputs in the samples' order: ``transpiler.data(...)``, inputs of a program
            or their names, or ``fleet.Slot``.  Ragged are slots without a width, and inputs whose
            ``x_offsets`` are listed, too; samples have no value for these offsets.
        place: the device of the tensors; None: the CPU.
        program: whose inputs are named; None: the default main program.

    Raises:
        TypeError: something else is among the inputs.
        ValueError: the program has no input of a name, or two inputs have the same.

    Example::

        feeder = DataFeeder([fleet.Slot("x", "float32", 2), fleet.Slot("y")])
        feed = feeder.feed([([0.5, 1.5], 1), ([2.5, 3.5], 0)])  # x: [2, 2], y: [2]
    """

    def __init__(
        self,
        feed_list: Iterable[Any],
        place: torch.device | str | None = None,
        program: Program | None = None,
    ) -> None:
        if isinstance(feed_list, str):
            raise TypeError(f"DataFeeder: feed_list: expected a list, got {feed_list!r}")
        given = [_found(each, program) if isinstance(each, str) else each for each in feed_list]
        for each in given:
            if not isinstance(each, Slot) and not all(
                hasattr(each, part) for part in ("name", "shape", "dtype")
            ):
                raise TypeError(
                    "DataFeeder: feed_list: expected transpiler.data(...), inputs of a program, "
                    f"their names or fleet.Slot(...), got {type(each).__name__}"
                )
            if isinstance(each, Slot) and each.text:
                raise ValueError(
                    f"DataFeeder: feed_list: {each.name!r}: expected a slot of numbers, got one "
                    "of texts: string_ids(...) makes ids of them"
                )
        names = [each.name for each in given]
        if not names or not all(names) or len(set(names)) < len(names):
            raise ValueError(
                f"DataFeeder: feed_list: expected inputs with names of their own, got {names}"
            )
        offsets = {name + OFFSETS for name in names}
        self._inputs = [_input(each, names) for each in given if each.name not in offsets]
        self._place = torch.device("cpu" if place is None else place)

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Tensor]:
        """The tensors of a batch by input.

        Args:
            iterable: samples, each with a value for each input.

        Raises:
            TypeError: a value does not consist of numbers.
            ValueError: there is no sample, one has fewer or more values than there are inputs, or a
                value does not fit its input; the message names both.
        """
        samples, wanted = list(iterable), len(self._inputs)
        if not samples:
            raise ValueError("DataFeeder: expected a sample or more, got none")
        for number, sample in enumerate(samples):
            if isinstance(sample, str | bytes) or not hasattr(sample, "__len__"):
                kind = type(sample).__name__
                raise TypeError(f"DataFeeder: sample {number}: expected a tuple, got {kind}")
            if len(sample) != wanted:
                names = ", ".join(each.name for each in self._inputs)
                raise ValueError(
                    f"DataFeeder: sample {number}: expected {wanted} values ({names}), got "
                    f"{len(sample)}"
                )
        found = dict[str, Tensor]()
        for column, each in enumerate(self._inputs):
            values = [_value(each, sample[column], n) for n, sample in enumerate(samples)]
            if each.sizes is None:
                counts = torch.tensor([len(value) for value in values])
                found[each.name] = torch.cat(values)
                found[each.name + OFFSETS] = counts.cumsum(0) - counts
            else:
                found[each.name] = _stacked(each, values)
        return {name: tensor.to(self._place) for name, tensor in found.items()}


def _found(name: str, program: Program | None) -> Any:
    main = default_main_program() if program is None else program
    inputs = {variable.name: variable for variable in main.main.variables_of(Role.INPUT)}
    if name not in inputs:
        raise ValueError(
            f"DataFeeder: feed_list: expected inputs among {', '.join(inputs)}, got {name!r}"
        )
    return inputs[name]


def _input(given: Any, names: Sequence[str]) -> _Input:
    dtype = getattr(torch, given.dtype)
    if isinstance(given, Slot):
        ragged, sizes = given.width is None, (given.width,) if given.width else ()
    else:
        ragged, sizes = given.name + OFFSETS in names, tuple(given.shape[1:])
    return _Input(given.name, dtype, None if ragged else sizes)


def _value(each: _Input, given: Any, number: int) -> Tensor:
    """A sample's value in its shape and dtype."""
    what = f"DataFeeder: sample {number}, input {each.name!r}"
    try:
        value = given.detach() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    except (TypeError, ValueError):  # of texts, or of lists of different lengths
        kind = type(given).__name__
        raise TypeError(f"{what}: expected numbers, in lists of one length, got {kind}") from None
    sizes = (-1,) if each.sizes is None else each.sizes
    free = [size for size in sizes if not isinstance(size, int)]
    if free:
        fits = value.dim() == len(sizes) and all(
            size in free or size == came for size, came in zip(sizes, value.shape, strict=True)
        )
    else:
        fits = each.sizes is None or value.numel() == math.prod(sizes)
    whole = each.dtype.is_floating_point or not value.is_floating_point() or not value.numel()
    if not fits or not whole:
        wanted, got = (str(dtype).removeprefix("torch.") for dtype in (each.dtype, value.dtype))
        shape = ", ".join(str(size) if isinstance(size, int) else "free" for size in sizes)
        shape = "of any number" if each.sizes is None else f"[{shape}]"
        raise ValueError(f"{what}: expected {wanted} {shape}, got {got} {list(value.shape)}")
    return value.to(each.dtype) if free else value.to(each.dtype).reshape(sizes)


def _stacked(each: _Input, values: Sequence[Tensor]) -> Tensor:
    first = values[0].shape
    for number, value in enumerate(values):
        if value.shape != first:
            raise ValueError(
                f"DataFeeder: sample {number}, input {each.name!r}: expected {list(first)}, as "
                f"sample 0 has, got {list(value.shape)}"
            )
    return torch.stack(list(values))
