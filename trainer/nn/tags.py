"""Samples chosen by their tags."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.nn.ragged import (
    Ragged,
    Sequences,
    begins,
    gathered,
    like,
    refuse_tracing,
    sequences_of,
)


def filter_by_instag(
    ins: Ragged, ins_tag: Ragged, filter_tag: Tensor, out_val_if_empty: float = 0
) -> tuple[Ragged, Tensor]:
    """The samples that have one of some tags.

    Where no sample is left, one row of ``out_val_if_empty`` takes their place, with the weight 0:
    so a step that has nothing to learn still runs.  A multi-task model learns a task so from its
    own samples alone: see Ma et al.: Modeling Task Relationships in Multi-task Learning with
    Multi-gate Mixture-of-Experts, KDD 2018.  How many are left depends on values, so a program
    cannot hold it: multiply losses by a mask there.

    Args:
        ins: samples, [n, ...]; or sequences, one for each sample, as (values, offsets) or nested.
        ins_tag: whole numbers: [n], [n, tags], or sequences of tags, one for each sample.
        filter_tag: the tags that are wanted, whole numbers [k].
        out_val_if_empty: see above.

    Returns:
        The samples that are left, in their order and in the form in which they were given, and a
        weight for each row of their values, [rows, 1], float32: 1, or 0 for the row that stands for
        none.

    Raises:
        TypeError: sequences of another form.
        ValueError: numbers of samples differ, or ``capture`` is tracing.
    """
    whose = "filter_by_instag"
    tags, owners, count = _tags(whose, ins_tag)
    refuse_tracing(whose, tags)
    wanted = torch.isin(tags, filter_tag.to(tags))
    stays = torch.zeros(count, dtype=torch.bool, device=tags.device)
    stays[owners[wanted]] = True
    if isinstance(ins, Tensor) and not ins.is_nested:
        _check_count(whose, len(ins), count)
        kept = ins[stays.to(ins.device)]
        return _or_one_row(kept, ins, out_val_if_empty)
    given = sequences_of(whose, ins)
    sizes = given.sizes()
    _check_count(whose, len(sizes), count)
    stays = stays.to(sizes.device)
    chosen = gathered(given, begins(sizes)[stays], sizes[stays])
    values, weight = _or_one_row(chosen.values, given.values, out_val_if_empty)
    offsets = chosen.offsets if len(chosen.offsets) else sizes.new_zeros(1)
    return like(ins, Sequences(values, offsets)), weight


def _tags(whose: str, given: Ragged) -> tuple[Tensor, Tensor, int]:
    """All tags, the sample of each, and the number of samples."""
    if isinstance(given, Tensor) and not given.is_nested:
        rows = given.reshape(len(given), -1)
        owners = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        return rows.reshape(-1), owners, len(rows)
    tags = sequences_of(whose, given)
    return tags.values.reshape(-1), tags.owners(), len(tags.offsets)


def _check_count(whose: str, samples: int, tagged: int) -> None:
    if samples != tagged:
        raise ValueError(f"{whose}: ins_tag: expected {samples} samples, got {tagged}")


def _or_one_row(kept: Tensor, given: Tensor, value: float) -> tuple[Tensor, Tensor]:
    if len(kept):
        return kept, torch.ones(len(kept), 1, device=given.device)
    return given.new_full((1, *given.shape[1:]), value), torch.zeros(1, 1, device=given.device)
