"""What torch's own embeddings say of the tables that take their place."""

from __future__ import annotations

from typing import Any

from torch import nn

# what torch's embeddings do and rows of a table cannot, and what to do instead
REFUSED = {
    "max_norm": "a lookup would write to rows that other trainers read at the same time; add a "
    "penalty on the norm of what the embedding gives to the loss",
    "scale_grad_by_freq": "a gradient would depend on how often an id is in one trainer's part of "
    "the batch; divide by the joint counts in the loss",
}


def options_of(module: nn.Embedding | nn.EmbeddingBag) -> dict[str, Any]:
    """The arguments of a DistributedEmbedding that reads, pools and trains as this module.

    Raises:
        TypeError: the module is another one.
        ValueError: it is one of ``max_norm``, of ``scale_grad_by_freq``, of mode "max".
    """
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise TypeError(
            f"from_module: expected an nn.Embedding or nn.EmbeddingBag, got {type(module).__name__}"
        )
    for key, why in REFUSED.items():
        if getattr(module, key):
            raise ValueError(f"from_module: {key}: {why}")
    pooling = module.mode if isinstance(module, nn.EmbeddingBag) else None
    if pooling == "max":
        raise ValueError(
            "from_module: mode 'max': a DistributedEmbedding pools by sum, mean or sqrtn"
        )
    return {
        "pooling": pooling,
        "padding_idx": module.padding_idx,
        "num_embeddings": module.num_embeddings,
        "dtype": module.weight.dtype,
    }
