"""Conversion of torch's own embeddings, marked by the script or named by a pattern of the strategy,
whose rows move to the servers.

A :class:`~trainer.embedding.embedding.DistributedEmbedding` takes the embedding's place in its
model: it reads, pools and trains as that did, begins with its rows, and has its hooks.  The
optimizer is made after that, of the model's parameters as they are then.  What a model keeps of the
weight elsewhere is refused, or raises when it is used: see [Note: references to a moved weight].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainer.embedding.moved_weight import MovedWeight, check_unshared, empty_out
from transpiler.ir.plain_names import plain_name
from transpiler.ir.table_ops import refused_form

_marked: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
# torch's embedding -> the one that has its rows; in every model that has it
_moved: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()

# a module's hooks that see the same calls, arguments and results after the move
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)

Embedding = nn.Embedding | nn.EmbeddingBag
_TORCHS = (nn.Embedding, nn.EmbeddingBag)  # themselves: a subclass may do anything


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
    if type(module) not in _TORCHS:
        raise TypeError(
            "distribute_embedding: expected an nn.Embedding or nn.EmbeddingBag, got "
            f"{type(module).__name__}"
        )
    from trainer.embedding.state_dict import take_moved_rows

    if module not in _marked:  # its copies have the hook, too
        module.register_load_state_dict_pre_hook(take_moved_rows)  # type: ignore[no-untyped-call]
    _marked[module] = options
    return module


def moved(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The model, with its marked embeddings, those whose names match a pattern, and those that
    have moved from another model, replaced; a bare one is itself replaced.

    Raises:
        ValueError: a pattern matches no embedding; or an embedding that is to move does more than
            look rows up, or its weight is used elsewhere, too.
    """
    chosen = _chosen(model, patterns)
    made = {
        name: _made(model, name, module) for name, module in chosen.items() if module not in _moved
    }
    for name, embedding in made.items():  # all of them can move
        module = chosen[name]
        _moved[module] = embedding
        assert isinstance(module, Embedding), "otherwise it stays"
        empty_out(module.weight, name, model)
    for name, module in chosen.items():
        model = _replaced(model, name, module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, MovedWeight):
            raise ValueError(f"{name!r} is the weight of an embedding that another model has moved")
    return model


def _chosen(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that are to be replaced, by name."""
    plain = plain_name(model)
    names = [plain(name) for name, module in model.named_modules() if type(module) in _TORCHS]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(repr(name) for name in names) or "none"
            raise ValueError(
                f"a_sync_configs['embeddings']: {pattern!r} matches no embedding of the model; it "
                f"has {known}"
            )
    return {
        name: module
        for name, module in model.named_modules()
        if module in _marked
        or module in _moved
        or (
            type(module) in _TORCHS
            and any(fnmatchcase(plain(name), pattern) for pattern in patterns)
        )
    }


def _made(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The embedding that takes a module's place."""
    from trainer.embedding.embedding import DistributedEmbedding

    reason = _stays(module)
    if reason is not None:
        raise ValueError(f"embedding {name!r}: {reason}: it cannot move")
    assert isinstance(module, Embedding), "otherwise it stays"
    own = {f"{place}.weight".lstrip(".") for place in _places(model, module)}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is module.weight and other not in own:
            raise ValueError(
                f"embedding {name!r}: its weight is also {other!r}, which is dense: it cannot move"
            )
    check_unshared(module.weight, name, model)
    made = DistributedEmbedding.from_module(module, **_marked.get(module, {}))
    for hooks in _HOOKS:
        setattr(made, hooks, getattr(module, hooks))
    return made


def _stays(module: nn.Module) -> str | None:
    """Why a module is more than a weight in which rows are looked up, if it is."""
    if type(module) not in _TORCHS:
        return (
            "expected an nn.Embedding or nn.EmbeddingBag, as it was when it was marked, got "
            f"{type(module).__name__}"
        )
    from trainer.embedding.state_dict import take_moved_rows

    assert isinstance(module, Embedding), "one of these"
    if (refused := refused_form(module)) is not None:
        return refused
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return "its weight is no plain parameter, but one that is computed"
    for held, what in (
        ("forward" in vars(module), "a forward of its own"),
        (weight._backward_hooks, "a hook on its weight"),
        (weight._post_accumulate_grad_hooks, "a hook on its weight"),
        (module._state_dict_hooks, "a hook on its state_dict"),
        (module._state_dict_pre_hooks, "a hook on its state_dict"),
        (
            any(
                getattr(hook, "hook", hook) is not take_moved_rows
                for hook in module._load_state_dict_pre_hooks.values()
            ),
            "a hook on load_state_dict",
        ),
        (module._load_state_dict_post_hooks, "a hook on load_state_dict"),
    ):
        if held:
            return f"it has {what}, and no such place once its rows are on servers"
    return None


def _replaced(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return _moved[module]
    for place in list(_places(model, module)):
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, _moved[module])
    return model


def _places(model: nn.Module, module: nn.Module) -> Iterator[str]:
    """Every name under which a model has a module."""
    return (name for name, other in model.named_modules(remove_duplicate=False) if other is module)
