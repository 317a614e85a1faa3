"""What torch's own embeddings say of the tables that take their place."""

from __future__ import annotations

from typing import Any

from torch import nn

from transpiler.ir.table_ops import refused_form


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
    if (reason := refused_form(module)) is not None:
        raise ValueError(f"from_module: {reason}")
    return {
        "pooling": module.mode if isinstance(module, nn.EmbeddingBag) else None,
        "padding_idx": module.padding_idx,
        "num_embeddings": module.num_embeddings,
        "dtype": module.weight.dtype,
    }
