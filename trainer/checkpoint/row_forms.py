"""The numbers in which an export writes rows of tables: as they are computed, or shorter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

INT8_MOST = 127
# what a user writes, and the dtype of the weight
FORMS: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16", "int8")
}
BLOCK = 1 << 16  # rows that are handled at a time

Made = Callable[[str, tuple[int, ...], str], Tensor]


def check_form(form: str | None) -> None:
    """Returns if rows can be written so.

    Raises:
        ValueError: they cannot.
    """
    if form is not None and form not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise ValueError(f"rows: expected None or one of {known}, got {form!r}")


def written_as(weight: Tensor, form: str | None, made: Made) -> dict[str, Tensor]:
    """Rows as a file has them.

    int8 rows are symmetric, with one scale a row: row i is ``weight[i] * scale[i]``, where scale[i]
    is the row's largest size by 127.

    Args:
        weight: [n, dim], as rows are computed.
        form: one of ``FORMS``; None: as they are.
        made: makes a tensor, by its name, shape and dtype.

    Returns:
        "weight", and with int8 "scale", float32 [n].
    """
    if form is None or FORMS[form] == weight.dtype:
        return {"weight": weight}
    found = {"weight": made("shorter", tuple(weight.shape), form)}
    if form == "int8":
        found["scale"] = made("scale", (len(weight),), "float32")
    for begin in range(0, len(weight), BLOCK):
        part = slice(begin, begin + BLOCK)
        if form == "int8":
            found["weight"][part], found["scale"][part] = _int8(weight[part])
        else:
            found["weight"][part] = weight[part].to(FORMS[form])
    return found


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax(1) / INT8_MOST).to(torch.float32)
    steps = rows / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    return steps.round().clamp(-INT8_MOST, INT8_MOST).to(torch.int8), scale
