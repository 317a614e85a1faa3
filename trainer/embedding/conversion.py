"""Conversion of torch's own embeddings, marked by the script or named by a pattern of the strategy,
whose rows move to the servers.

A :class:`~trainer.embedding.embedding.DistributedEmbedding` takes the embedding's place in its
model: it reads, pools and trains as that did, and begins with its rows.  The optimizer is made
after that, of the model's parameters as they are then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

_marked: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

Embedding = nn.Embedding | nn.EmbeddingBag


def distribute_embedding(module: nn.Module, **options: Any) -> nn.Module:
    """Marks an nn.Embedding or nn.EmbeddingBag: ``fleet.distributed_model`` moves its rows to the
    servers.

    Example::

        words = fleet.distribute_embedding(nn.Embedding(1000, 16), name="words")

    Args:
        module: the embedding.
        options: further arguments of :class:`trainer.DistributedEmbedding`: ``optimizer``,
            ``entry``, ...

    Returns:
        The same module.

    Raises:
        TypeError: it is another module.
    """
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise TypeError(
            "distribute_embedding: expected an nn.Embedding or nn.EmbeddingBag, got "
            f"{type(module).__name__}"
        )
    _marked[module] = options
    return module


def moved(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The model, with its marked embeddings, and those whose names match a pattern, replaced; a
    bare one is itself replaced.

    Raises:
        ValueError: a pattern matches no embedding, or a weight that is to move is another module's
            as well.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Embedding, nn.EmbeddingBag)
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            known = ", ".join(found) or "none"
            raise ValueError(
                f"a_sync_configs['embeddings']: {pattern!r} matches no embedding of the model; it "
                f"has {known}"
            )
    chosen = {
        name: _marked.get(module, {})
        for name, module in found.items()
        if module in _marked or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    for name, options in chosen.items():
        model = _replaced(model, name, options)
    return model


def _replaced(model: nn.Module, name: str, options: Mapping[str, Any]) -> nn.Module:
    from trainer.embedding.embedding import DistributedEmbedding

    module = model.get_submodule(name)
    assert isinstance(module, Embedding), "found as one"
    places = list(_places(model, module))
    users = [
        other
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is module.weight
    ]
    own = {f"{place}.weight".lstrip(".") for place in places}
    others = sorted(set(users) - own)
    if others:
        raise ValueError(
            f"embedding {name!r}: its weight is also {others[0]}, which is dense: it cannot move"
        )
    made = DistributedEmbedding.from_module(module, **options)
    if not name:
        return made
    for place in places:
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    return model


def _places(model: nn.Module, module: nn.Module) -> Iterator[str]:
    """Every name under which a model has a module."""
    return (name for name, other in model.named_modules(remove_duplicate=False) if other is module)
