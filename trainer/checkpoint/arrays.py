"""Weights that another system trained, as arrays: their check against a job, before anything is
written.

Dense parameters come by name, from a dict, an npz or a safetensors file.  Rows of a table come in
chunks, with these arrays::

    "ids"          [n], of whole numbers, each once in all chunks of a table
    "values"       [n, dim]
    "state.NAME"   [n, width], of the table's update rule: all of its states, or none
    "show", "click"    [n], of a table with a ShowClickEntry: both, or none

Floating point converts to the dtype of the job's variable; anything else that differs is an error.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pserver.storage.single_file import file_to_read
from transpiler.files.files import shown

Path = str | os.PathLike[str]
Arrays = Mapping[str, Any]  # by name: of numpy or torch
Chunk = dict[str, np.ndarray]
SHOWN = 10  # of the problems of one call

# ---- arrays ----


def read_arrays(given: Path | Arrays) -> dict[str, Tensor]:
    """The arrays of a mapping, or of a file, by name, on the CPU.

    Args:
        given: a mapping; or the path or URL of a file, "NAME.npz" or "NAME.safetensors".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file of another kind, or a damaged one.
        TypeError: an array is none of numbers.
    """
    if isinstance(given, Mapping):
        return {str(name): _tensor(str(name), array) for name, array in given.items()}
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"expected a mapping of arrays, or the path of a file, got {type(given).__name__}"
        )
    with file_to_read(given) as file:
        try:
            if file.suffix == ".safetensors":
                return safetensors.torch.load_file(file)
            if file.suffix == ".npz":
                # numpy would leave a file open that is no zip file
                with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                    return {name: _tensor(name, arrays[name]) for name in arrays.files}
        except (SafetensorError, zipfile.BadZipFile, EOFError, ValueError) as error:
            raise ValueError(
                f"{shown(given)}: expected arrays, {file.suffix.removeprefix('.')}, got a file "
                f"that cannot be read: {error}"
            ) from error
    raise ValueError(f"{shown(given)}: expected NAME.npz or NAME.safetensors")


def _tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach().cpu()
    found = np.asarray(array)
    if found.dtype == np.uint64:  # such as ids, which torch's whole numbers have no room for
        if found.size and found.max() > np.iinfo(np.int64).max:
            raise ValueError(f"array {name!r}: expected numbers of int64, got {found.max()}")
        found = found.astype(np.int64)
    try:
        # a copy where numpy's is read-only, of another byte order, or has negative strides
        usual = found.astype(found.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(np.require(usual, requirements=["C", "W"]))
    except TypeError:
        raise TypeError(
            f"array {name!r}: expected numbers, got an array of {found.dtype}"
        ) from None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "truth values" if dtype is torch.bool else "whole numbers"


def _converted(array: Tensor, dtype: torch.dtype) -> Tensor:
    """The array in a variable's dtype.

    Raises:
        ValueError: it is of another kind of numbers, or some of them are not finite, or too large
            for the dtype; the message does not name the array.
    """
    if _kind(array.dtype) != _kind(dtype):
        raise ValueError(f"expected {dtype}, got {array.dtype}")
    converted = array.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        wrong = ~converted.isfinite()
    else:
        wrong = converted.to(array.dtype) != array
    if wrong.any():
        at = tuple(int(place) for place in wrong.nonzero()[0])
        where = f" at {list(at)}" if at else ""
        count = int(wrong.sum())
        kind = f"finite {dtype}" if dtype.is_floating_point else f"{dtype}"
        raise ValueError(f"expected {kind}, got {array[at].item()}{where}, {count} such in all")
    return converted


# ---- dense parameters ----


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a job that dense arrays may fill.

    Attributes:
        tensors: parameters and buffers, by name.
        needed: names without which a model is not whole: parameters, and saved buffers of floating
            point.
        modules: every module, by name.
    """

    tensors: Mapping[str, Tensor]
    needed: Collection[str]
    modules: Mapping[str, nn.Module]


@dataclass(slots=True)
class DenseArrays:
    """Arrays that fit a job's variables.

    Attributes:
        values: by the variable's name, in its shape and dtype.
        missing: needed variables without an array.
        unused: arrays without a variable.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def fitted(
    arrays: Mapping[str, Tensor],
    variables: Variables,
    names: Mapping[str, str | None],
    transpose: Sequence[str | type[nn.Module]],
    strict: bool,
) -> DenseArrays:
    """Finds the variable of each array, and checks that it fits.

    Args:
        names: the variable's name by the array's; None: the array is left out.  Other arrays have
            the names of their variables.
        transpose: patterns of variables' names whose arrays are transposed; or classes of modules,
            whose ``weight`` is.
        strict: whether missing variables and unused arrays are errors.

    Raises:
        ValueError: they do not fit; the message has every problem, up to ``SHOWN``.
    """
    found = DenseArrays()
    problems = [
        f"names: expected an array {name!r}, got none{_close(name, arrays)}"
        for name in names
        if name not in arrays
    ]
    turned, unmatched = _transposed(variables, transpose)
    problems += unmatched
    source: dict[str, str] = {}
    for name, array in arrays.items():
        target = names.get(name, name)
        if target is None:
            continue
        if target not in variables.tensors:
            if name in names:
                problems.append(
                    f"names: expected a variable of the model for {name!r}, got "
                    f"{target!r}{_close(target, variables.tensors)}"
                )
            else:
                found.unused.append(name)
        elif target in source:
            problems.append(f"{target!r}: expected one array, got {source[target]!r} and {name!r}")
        else:
            source[target] = name
            try:
                found.values[target] = _shaped(
                    array, variables.tensors[target], target, target in turned
                )
            except ValueError as error:
                problems.append(f"{target!r}, array {name!r}: {error}")
    found.missing = [name for name in variables.tensors if name in variables.needed - source.keys()]
    if strict:
        problems += [
            f"array {name!r}: expected a variable of this name, got none"
            f"{_close(name, variables.tensors)}; give its name in names"
            for name in found.unused
        ]
        problems += [f"{name!r}: expected an array, got none" for name in found.missing]
        if found.unused or found.missing:
            problems.append("strict=False leaves out arrays and variables without the other")
    raise_together(problems)
    return found


def raise_together(problems: Sequence[str]) -> None:
    """Raises one ValueError with all problems, up to ``SHOWN``; does nothing without any."""
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("\n  ".join(["the arrays do not fit:", *problems[:SHOWN], *more]))


def _close(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _transposed(
    variables: Variables, given: Sequence[str | type[nn.Module]]
) -> tuple[set[str], list[str]]:
    """The variables whose arrays are transposed, and problems with ``given``."""
    found, problems = set[str](), []
    for each in given:
        if isinstance(each, str):
            chosen = {name for name in variables.tensors if fnmatchcase(name, each)}
            what = f"a pattern of variables' names, got {each!r}"
        elif isinstance(each, type) and issubclass(each, nn.Module):
            named = (
                f"{path}.weight" if path else "weight"
                for path, module in variables.modules.items()
                if isinstance(module, each)
            )
            chosen = {name for name in named if name in variables.tensors}
            what = f"a class of the model's modules with a weight, got {each.__name__}"
        else:
            raise TypeError(f"transpose: expected names or classes of modules, got {each!r}")
        if not chosen:
            problems.append(f"transpose: expected {what}, which matches none")
        found |= chosen
    return found, problems


def _shaped(array: Tensor, variable: Tensor, name: str, turned: bool) -> Tensor:
    """An array in the shape and dtype of its variable.

    Raises:
        ValueError: it does not fit.
    """
    mine, theirs = list(variable.shape), list(array.shape)
    if turned and array.dim() != 2:
        raise ValueError(f"expected 2 dimensions to transpose, got shape {theirs}")
    if (theirs[::-1] if turned else theirs) != mine:
        hint = ""
        if turned and theirs == mine:
            hint = "; it fits as it is: leave it out of transpose"
        elif not turned and array.dim() == 2 and theirs[::-1] == mine:
            hint = (
                f"; its transpose fits: add {name!r} to transpose, or nn.Linear for all linear "
                "layers of Paddle, whose weights are [in, out]"
            )
        raise ValueError(
            f"expected shape {mine}, got {theirs}{' to transpose' if turned else ''}{hint}"
        )
    return _converted(array.T if turned else array, variable.dtype)


# ---- rows ----

Source = Path | Arrays | Iterable[Path | Arrays]


@dataclass(frozen=True, slots=True)
class RowForm:
    """The form of a table's rows.

    Attributes:
        name: of the table.
        dim: of a row.
        rows: ids are 0 to this, exclusive; None: any int64.
        dtype: in which rows are computed.
        states: width of each state of the update rule, by name.
        counts: whether rows have shows and clicks.
        rule: the types of the table's rules, for messages.
        stepped: whether a step of the rules depends on the number of steps before it.
    """

    name: str
    dim: int
    rows: int | None
    dtype: torch.dtype
    states: Mapping[str, int]
    counts: bool
    rule: str
    stepped: bool


class TableRows:
    """The chunks of a table's rows, checked against its form.

    Args:
        given: one chunk, or an iterable of them: mappings, or paths of files.  A generator is read
            once; anything else is read twice, and checked whole before a row is written.

    Attributes:
        count: the rows that were read in the last pass.
        stated: whether the chunks have states; None: there are no chunks, or they are not known
            yet.

    Raises:
        TypeError: it is none of these.
    """

    def __init__(self, form: RowForm, given: Source) -> None:
        self.form = form
        whole = isinstance(given, Mapping | str | os.PathLike)
        if not whole and not isinstance(given, Iterable):
            raise TypeError(
                f"table {form.name!r}: expected chunks, or paths of files, got "
                f"{type(given).__name__}"
            )
        self._given: Iterable[Path | Arrays] = [given] if whole else given  # type: ignore[list-item,assignment]  # by whole
        self.once = isinstance(self._given, Iterator)
        self.count = 0
        self.stated: bool | None = None

    def chunks(self, twice: Callable[[np.ndarray], int | None]) -> Iterator[Chunk]:
        """The chunks, in the table's dtype, with contiguous arrays.

        Args:
            twice: called with the ids of each chunk, int64 [n]; returns one that has come before,
                or None.

        Raises:
            ValueError: a chunk does not fit.
        """
        self.count = 0
        for number, given in enumerate(self._given):
            where = f"table {self.form.name!r}, chunk {number}"
            if isinstance(given, str | os.PathLike):
                where += f" ({shown(given)})"
            try:
                chunk = self._checked(read_arrays(given))
                again = twice(chunk["ids"])
                if again is not None:
                    raise ValueError(f"ids: expected each id once, got {again} again")
            except (TypeError, ValueError) as error:
                written = f"; {self.count} rows of earlier chunks are loaded" if self.once else ""
                raise type(error)(f"{where}: {error}{written}") from error
            self.count += len(chunk["ids"])
            yield chunk

    def _checked(self, given: Mapping[str, Tensor]) -> Chunk:
        form = self.form
        states = {f"state.{name}" for name in form.states}
        counts = {"show", "click"} if form.counts else set[str]()
        wanted = {"ids", "values"} | states | counts
        needed = {"ids", "values"}
        for together in (states, counts):
            needed |= together if together & given.keys() else set()
        if given.keys() != needed:
            missing, odd = sorted(needed - given.keys()), sorted(given.keys() - wanted)
            raise ValueError(
                f"expected {_listed(['ids', 'values'])}{_all_or_none(form.rule, states)}"
                f"{_all_or_none('the entry', counts)}, got "
                f"{_listed([*(f'no {name}' for name in missing), *odd])}"
            )
        stated = bool(states & given.keys())
        if self.stated is None:
            self.stated = stated
        elif self.stated != stated:
            raise ValueError("expected states in all chunks of a table or in none")
        ids = given["ids"]
        if ids.dim() != 1 or _kind(ids.dtype) != "whole numbers":
            raise ValueError(f"ids: expected int64 [n], got {ids.dtype} {list(ids.shape)}")
        ids = ids.to(torch.int64)
        if form.rows is not None and len(ids) and not 0 <= ids.min() <= ids.max() < form.rows:
            at = int(((ids < 0) | (ids >= form.rows)).nonzero()[0])
            raise ValueError(
                f"ids: expected 0 to {form.rows - 1}, got {int(ids[at])} at position {at}"
            )
        chunk = {"ids": np.ascontiguousarray(ids.numpy())}
        for name in sorted(needed - {"ids"}):
            array, shape, dtype = given[name], [len(ids), form.dim], form.dtype
            if name in counts:
                shape, dtype = [len(ids)], torch.float64
            elif name in states:
                shape = [len(ids), form.states[name.removeprefix("state.")]]
                if shape[1] == 1 and array.dim() == 1:
                    array = array[:, None]
            if list(array.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {list(array.shape)}")
            try:
                chunk[name] = np.ascontiguousarray(_converted(array, dtype).numpy())
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return chunk


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _all_or_none(whose: str, names: Collection[str]) -> str:
    return f", all or none of {whose}'s {_listed(sorted(names))}" if names else ""
