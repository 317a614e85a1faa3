"""Tensor parallelism: linear layers and embeddings, cut over ranks by the names of modules.

A plan maps patterns of module names (as a shell's: ``*``, ``?``, ``[...]``; the first that matches
decides) to a style of ``torch.distributed.tensor.parallel``, or to a word for one:

=============  ====================================  ===========================================
word           cut: a Linear's (Embedding's) weight  takes and gives
=============  ====================================  ===========================================
"colwise"      output features (columns)             whole in, this rank's features out
"rowwise"      input features (rows)                 this rank's features in, whole out
"colwise_rep"  as colwise                            whole in, whole out (an output layer)
"rowwise_rep"  as rowwise                            whole in, whole out (an input embedding)
=============  ====================================  ===========================================

An attention's query, key and value are "colwise", its output "rowwise"; its forward has to take the
number of heads from its input's width (``view(batch, time, -1, head_size)``), because each rank has
a part of them.  (Shoeybi et al.: Megatron-LM, 2019.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.hybrid.mesh import divides
from transpiler.ir.plain_names import named_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORDS = ("colwise", "rowwise", "colwise_rep", "rowwise_rep")
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "heads")


def _style(word: Any, pattern: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    if isinstance(word, ParallelStyle):
        return word
    if word not in styles:
        raise ValueError(
            f"tensor_plan[{pattern!r}]: expected one of {', '.join(map(repr, WORDS))} or a "
            f"ParallelStyle, got {word!r}"
        )
    return styles[word]()


def _check_widths(name: str, module: nn.Module, word: Any, degree: int) -> None:
    if not isinstance(word, str):
        return
    columns = word.startswith("colwise")
    if isinstance(module, nn.Linear):
        width = "out_features" if columns else "in_features"
    elif isinstance(module, nn.Embedding):
        width = "embedding_dim" if columns else "num_embeddings"
    else:
        raise ValueError(
            f"{name}: {word!r} cuts a Linear or an Embedding, got {type(module).__name__}; give a "
            "ParallelStyle"
        )
    divides(width, getattr(module, width), degree, "mp", name)


def _check_heads(model: nn.Module, names: Mapping[str, Any], degree: int) -> None:
    """Checks the numbers of heads in modules that hold cut ones: each rank needs a whole number."""
    for name, module in named_modules(model):
        if any(cut.startswith(f"{name}." if name else "") for cut in names):
            for attribute in _HEADS:
                count = getattr(module, attribute, None)
                if isinstance(count, int) and not isinstance(count, bool):
                    divides(attribute, count, degree, "mp", name or type(model).__name__)


def planned(model: nn.Module, plan: Mapping[str, Any], degree: int) -> dict[str, Any]:
    """The style of each module that a plan names.

    Raises:
        ValueError: a pattern decides for no module, or a size does not divide evenly among
            ``degree`` ranks.
    """
    found: dict[str, Any] = {}
    used = set()
    for name, module in named_modules(model):
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            used.add(pattern)
            style = _style(plan[pattern], pattern)
            _check_widths(name, module, plan[pattern], degree)
            found[name] = style
    for pattern in plan:
        if pattern not in used:
            names = ", ".join(name for name, _ in named_modules(model) if name)
            raise ValueError(
                f"tensor_plan: {pattern!r} matches no module, or others before it do; there are "
                f"{names}"
            )
    _check_heads(model, found, degree)
    return found


def draw_again(model: nn.Module, names: Collection[str], seed: int) -> None:
    """Draws the initial values of modules anew, in the model's order, from a generator with this
    seed: the values are the same on every rank, and those that one process draws after
    ``torch.manual_seed``.

    Args:
        model: the whole model.
        names: of the modules that will be cut.
        seed: of the generator; this process's random numbers continue afterwards as if nothing was
            drawn.

    Raises:
        ValueError: a module cannot draw its values.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for name, module in named_modules(model):
            if name not in names:
                continue
            draw = getattr(module, "reset_parameters", None)
            if not callable(draw):
                raise ValueError(
                    f"strategy.tensor_parallel_configs.tensor_init_seed: {name!r}: expected a "
                    f"module with reset_parameters(), got {type(module).__name__}"
                )
            draw()


def cut_tensors(model: nn.Module, styles: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Cuts the named modules that ``model`` has, in place, over a mesh of one dimension."""
    from torch.distributed.tensor.parallel import parallelize_module

    present = dict(named_modules(model))
    for name, style in styles.items():
        if name in present:
            parallelize_module(present[name], mesh, style)
