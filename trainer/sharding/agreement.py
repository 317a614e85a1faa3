"""Agreement of a group's ranks: a difference is said before a collective would block."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from pserver.errors import FingerprintMismatch
from trainer.collective.world import current_peers
from transpiler.files import bounded_json
from transpiler.plan.plan import differences

# agreements that were made, by group: each has a topic of its own
_made: Counter[str] = Counter()


def metadata_of(model: nn.Module) -> dict[str, str]:
    """A model's tensors, by name, as text."""

    def form(tensor: torch.Tensor) -> str:
        gradient = "" if tensor.requires_grad else " without gradient"
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{gradient}"

    return {
        name: form(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def agree(what: str, metadata: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compares metadata over a group; all its ranks call this.

    Args:
        what: is compared, for messages.

    Raises:
        FingerprintMismatch: a rank's differ from those of the group's first; the message says which
            and how.
        TimedOut: a rank does not call this.
    """
    ranks = dist.get_process_group_ranks(group)
    _made[group.group_name] += 1
    topic = f"{what} {_made[group.group_name]} of group {group.group_name}"
    said = current_peers().exchange(topic, json.dumps(dict(metadata)), ranks)
    first = bounded_json.loads(said[0])
    for rank, text in zip(ranks, said, strict=True):
        if text != said[0]:
            found = (
                differences(bounded_json.loads(text), first, f"trainer {ranks[0]}")
                or "the same in another order"
            )
            raise FingerprintMismatch(
                f"{what}: expected the same on all trainers, got on trainer {rank}: {found}"
            )
