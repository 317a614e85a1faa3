"""The arguments of an embedding's forward, checked: its ids, and how often they were shown and
clicked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pserver.table.string_ids import string_ids
from transpiler.ir.tables import ShowClickEntry, TableEntry


def hashed(
    whose: str, ids: Any, name: str | None, num_embeddings: int | None, traced: bool
) -> Tensor:
    """The ids, where they are a tensor; those of strings.

    Args:
        name: of the table's hash; None: it has none.
        traced: whether ``capture`` is tracing.

    Raises:
        TypeError: they are something else, or the table has no hash.
        ValueError: lists of several lengths, or ``capture`` is tracing.
    """
    if isinstance(ids, Tensor) or name is None:
        given: Tensor = ids
        return given  # what is no tensor is refused with all else that is no whole numbers
    if traced:
        raise ValueError(
            f"{whose}: a program takes tensors alone; expected ids: call string_ids(...) of "
            "trainer.nn.functional before the step"
        )
    return string_ids(ids, num_embeddings)


def whole_numbers(whose: str, ids: Tensor) -> Tensor:
    """The ids as int64, without a gradient.

    Args:
        whose: the table, for the message of an error; also below.

    Raises:
        TypeError: they are no tensor of whole numbers.
    """
    if (
        not isinstance(ids, Tensor)
        or ids.is_floating_point()
        or ids.is_complex()
        or ids.dtype == torch.bool
    ):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{whose}: ids: expected a tensor of int64, got {kind}")
    return ids.detach().to(torch.int64)


def fits_range(ids: Tensor, num_embeddings: int | None) -> bool:
    """Whether ids, int64 of any shape, are 0 to ``num_embeddings`` - 1; None: any id is right."""
    if num_embeddings is None or not ids.numel():
        return True
    low, high = (int(bound) for bound in torch.aminmax(ids))
    return low >= 0 and high < num_embeddings


def check_range(whose: str, ids: Tensor, num_embeddings: int | None) -> None:
    """Checks that ids, int64 of any shape, are 0 to ``num_embeddings`` - 1; None: any id is right.

    Raises:
        ValueError: one is not; the message has the first and its position.
    """
    if not fits_range(ids, num_embeddings):
        assert num_embeddings is not None, "without a range every id fits"
        flat = ids.reshape(-1)
        at = int(((flat < 0) | (flat >= num_embeddings)).nonzero()[0])
        raise ValueError(
            f"{whose}: ids: expected 0 to {num_embeddings - 1}, got {int(flat[at])} at position "
            f"{at}"
        )


def shows_and_clicks(
    whose: str, entry: TableEntry | None, ids: Tensor, given: Mapping[str, Tensor]
) -> Tensor | None:
    """How often each id was shown and clicked, float32 [n, 2] on the CPU; None where the table
    does not count.

    Args:
        entry: the table's; a ShowClickEntry names the two keyword arguments.
        ids: int64 of any shape, n together.
        given: forward's further keyword arguments.

    Raises:
        TypeError: one has another name.
        ValueError: one has a shape that does not broadcast to the ids'.
    """
    names = (entry.show, entry.click) if isinstance(entry, ShowClickEntry) else ()
    for name in given:
        if name not in names:
            known = (
                f"its entry names {names[0]} and {names[1]}"
                if names
                else "it has no ShowClickEntry"
            )
            raise TypeError(
                f"{whose}: forward got an unexpected keyword argument {name!r}: {known}"
            )
    if not names:
        return None
    columns = []
    for name, usual in zip(names, (1.0, 0.0), strict=True):
        counts = torch.as_tensor(given.get(name, usual)).detach().to("cpu", torch.float32)
        try:
            columns.append(counts.expand(ids.shape).reshape(-1))
        except RuntimeError:
            raise ValueError(
                f"{whose}: {name}: expected a shape that broadcasts to {list(ids.shape)}, got "
                f"{list(counts.shape)}"
            ) from None
    return torch.stack(columns, 1)
