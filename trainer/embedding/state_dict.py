"""Rows of this process in an embedding's ``state_dict`` and in its copies.

In a ``state_dict`` they are plain tensors, that any file format of tensors takes: ``table.ids``
(int64 [n]), ``table.values`` ([n, dim]), ``table.state.NAME`` of the update rule, and further
arrays that a table keeps for its rows; ``table.metadata``: steps, counters and rules, as JSON in
bytes.  Rows that servers hold are in none: ``fleet.save`` and ``fleet.export`` write them, and
``load_state_dict`` warns that it leaves them as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.embedding.local_rows import LocalRows

log = logging.getLogger(__name__)

PREFIX = "table."
NEEDED = ("ids", "values", "metadata")


class RowState(nn.Module):
    """A module whose rows are in its ``state_dict`` while they are in this process.

    Attributes:
        rows: :class:`~trainer.embedding.local_rows.LocalRows`, or a source on servers.
    """

    rows: Any

    def whose(self) -> str:
        """The table, in words."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.rows, LocalRows):
            arrays, metadata = self.rows.state()
            text = np.frombuffer(json.dumps(metadata).encode(), np.uint8).copy()
            for key, array in {**arrays, "metadata": text}.items():
                destination[f"{prefix}{PREFIX}{key}"] = torch.from_numpy(array)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        start = prefix + PREFIX
        given = {
            key.removeprefix(start): value
            for key, value in state_dict.items()
            if key.startswith(start)
        }
        others = {key: value for key, value in state_dict.items() if not key.startswith(start)}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not isinstance(self.rows, LocalRows):
            if given or f"{prefix}weight" in state_dict:
                error_msgs.append(
                    f"{self.whose()}: its rows are on servers: fleet.load puts rows there"
                )
            else:
                log.warning(
                    "%s: its rows are on servers and in no state_dict: load_state_dict leaves them "
                    "as they are; fleet.save and fleet.load bring rows back",
                    self.whose(),
                )
            return
        missing = [start + key for key in NEEDED if key not in given]
        if missing:
            missing_keys.extend(missing if strict else [])
            return
        try:
            _load(self.rows, given)
        except (ValueError, KeyError, TypeError) as error:
            error_msgs.append(f"{self.whose()}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self.rows, LocalRows):
            raise RuntimeError(
                f"{self.whose()}: its rows are on servers, a copy would have none: fleet.export "
                "writes them"
            )
        return self.__dict__.copy()


def _load(rows: LocalRows, given: Mapping[str, Tensor]) -> None:
    arrays = {key: np.ascontiguousarray(value.cpu().numpy()) for key, value in given.items()}
    try:
        metadata: dict[str, Any] = json.loads(arrays.pop("metadata").tobytes())
    except ValueError as error:
        raise ValueError(f"{PREFIX}metadata: expected JSON: {error}") from error
    rows.load(arrays, metadata)
