"""Conversion of torch's own embeddings, marked by the script or named by a pattern of the strategy,
whose rows move to the servers.

A :class:`~trainer.embedding.embedding.DistributedEmbedding` takes the embedding's place in its
model: it reads, pools and trains as that did, begins with its rows, and has its hooks.  The
optimizer is created after that, with the model's new parameters.  Other references of a model to
the weight are refused, or raise on use: see [Note: references to a moved weight].

[Note: references to a moved weight]  A model may keep ``embedding.weight`` elsewhere: in a list of
weights for a penalty, in a closure, in an optimizer that was created before.  After the move such a
reference would hold old values, and its gradient would reach no row.  So the parameter itself
changes its class, as torch's lazily initialized parameters do: any read or write of its values, or
of its gradient, raises; the message has the places in the model, and what to write instead.  Its
shape, dtype and device are as before; its memory is freed.  A view of the memory, which is another
tensor, is found before anything moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from transpiler.ir.plain_names import plain_name
from transpiler.ir.table_ops import refused_form

# ---- moved weight ----
#
# The weight of a torch embedding whose rows have moved.


_ATTRIBUTES = (
    *("device", "dtype", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
    *("is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized"),
    *("is_sparse", "is_sparse_csr", "is_xpu", "retains_grad"),
)
_METHODS = (
    *("dim", "element_size", "get_device", "is_complex", "is_floating_point", "is_shared"),
    *("ndimension", "nelement", "numel", "requires_grad_", "size", "__len__"),
)
# calls that reveal nothing of the values, nor of the gradient
_HARMLESS: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # a descriptor
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    ]
)
_SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[union-attr]  # a descriptor


class MovedWeight(nn.Parameter):
    """A parameter without values: any use except of its shape, dtype and device raises.

    See [Note: references to a moved weight].
    """

    _embedding: str  # the embedding's name in its model
    _model: weakref.ref[nn.Module] | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS or (func == _SET_GRAD and args[1] is None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        weight = next(each for each in _tensors((args, kwargs)) if isinstance(each, MovedWeight))
        weight._refuse(f"{name.removesuffix('.__get__').removesuffix('.__set__')} was called on")

    def _refuse(self, what: str) -> NoReturn:
        model = None if self._model is None else self._model()
        kept = [] if model is None else list(_places_where(model, lambda each: each is self))
        where = f", which the model keeps in {', '.join(kept)}" if kept else ""
        raise RuntimeError(
            f"embedding {self._embedding!r}: its rows have moved, and {what} the weight that it "
            f"had{where}.  For a penalty c * weight.square().sum() give the embedding's parameters "
            "weight_decay=2 * c in the optimizer, and drop the penalty; to read rows call the "
            "embedding; make optimizers after fleet.distributed_model.  For any other use leave "
            "the embedding where it was"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"MovedWeight of embedding {self._embedding!r}, {list(self.shape)}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> MovedWeight:
        return _copy(*self._parts())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _copy, self._parts()

    def _parts(self) -> tuple[str, torch.Size, torch.dtype, bool]:
        return self._embedding, self.shape, self.dtype, self.requires_grad


def empty_out(weight: Tensor, embedding: str, model: nn.Module | None) -> None:
    """Makes a parameter a :class:`MovedWeight`, and frees its memory.

    Args:
        weight: of an embedding whose rows have been copied.
        embedding: the embedding's name, for messages; also below.
        model: searched for references to the weight, for a message.
    """
    weight.grad = None
    nothing = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
    weight.data = nothing.expand(weight.shape)
    weight.__class__ = MovedWeight
    assert isinstance(weight, MovedWeight), "the line before"
    weight._embedding, weight._model = embedding, None if model is None else weakref.ref(model)
    if weight.requires_grad:  # of a forward before the move
        with torch._C.DisableTorchFunctionSubclass():
            weight.register_hook(lambda gradient: weight._refuse("a gradient arrived at"))  # type: ignore[no-untyped-call]  # torch's own


def check_unshared(weight: Tensor, embedding: str, model: nn.Module) -> None:
    """Checks that no other tensor of the model is a view of the weight's memory.

    Raises:
        ValueError: one is; it would keep the old values.
    """
    begin, end = _memory(weight)

    def overlaps(other: Tensor) -> bool:
        if other is weight or isinstance(other, MovedWeight) or other.device != weight.device:
            return False
        first, last = _memory(other)
        return first < end and begin < last

    for place in _places_where(model, overlaps):
        raise ValueError(
            f"embedding {embedding!r}: {place} is a view of its weight, and would not see the rows "
            "that move: it cannot move"
        )


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The addresses [begin, end) of a tensor's elements; nothing where they have none."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _copy(embedding: str, shape: torch.Size, dtype: torch.dtype, trains: bool) -> MovedWeight:
    made = nn.Parameter(torch.empty(0, dtype=dtype).new_empty(()).expand(shape), trains)
    empty_out(made, embedding, None)
    assert isinstance(made, MovedWeight), "emptied out"
    return made


# ---- references ----


def _places_where(model: nn.Module, wanted: Callable[[Tensor], bool]) -> Iterator[str]:
    """The places of such tensors in a model's modules, in attributes and in containers there:
    "head.weight", "penalties[0][3]".
    """
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers"):
                found = [
                    key for key, each in value.items() if torch.is_tensor(each) and wanted(each)
                ]
            elif attribute == "_modules":
                continue
            else:
                found = [attribute + place for place, each in _entries(value) if wanted(each)]
            yield from (f"{name}.{place}".lstrip(".") for place in found)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in _entries(value))


def _entries(value: Any, place: str = "", above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """The tensors in nested containers and in modules there, each with its place."""
    if isinstance(value, Tensor):
        yield place, value
        return
    if id(value) in above:
        return  # a container that contains itself
    above |= {id(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(each, f"{place}[{key!r}]", above)
    elif isinstance(value, list | tuple | Set):
        for index, each in enumerate(value):
            yield from _entries(each, f"{place}[{index}]", above)
    elif isinstance(value, nn.Module):
        for name, each in value.named_parameters():
            yield from _entries(each, f"{place}.{name}", above)


# ---- conversion ----


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
    """Replaces a model's marked embeddings, those whose names match a pattern, and those that
    another model has moved.  Returns the model; for a bare embedding its replacement.

    Raises:
        ValueError: a pattern matches no embedding; or an embedding that should move does more than
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
    """The reason why a module cannot move: it does more than look rows up; None: it can."""
    if type(module) not in _TORCHS:
        return (
            "expected an nn.Embedding or nn.EmbeddingBag, as when it was marked, got "
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
            return f"it has {what}, which would be lost once its rows are on servers"
    return None


def _replaced(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return _moved[module]
    for place in list(_places(model, module)):
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, _moved[module])
    return model


def _places(model: nn.Module, module: nn.Module) -> Iterator[str]:
    """All names of a module in a model."""
    return (name for name, other in model.named_modules(remove_duplicate=False) if other is module)
