"""Captures a module, a training step, an optimizer and one batch as a single-node program.

In order::

    check_arguments        what the caller gave fits together         capture_arguments.py
    trace                  the step becomes an fx graph               trace.py
    smallest_batch         the graph computes what eager computes     smallest_batch.py
    emit                   the graph becomes variables and ops        emit.py
    single_node_programs   clipping and optimizer ops are added       single_node_programs.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.clip import GradClip
from transpiler.program import Program
from transpiler.tracing.capture_arguments import check_arguments, input_names, parameter_groups
from transpiler.tracing.default_programs import set_defaults
from transpiler.tracing.embedding_tables import find_tables
from transpiler.tracing.equivalence_check import eager, resized, unchanged
from transpiler.tracing.single_node_programs import single_node_programs

LOG = logging.getLogger(__name__)
Step = Callable[..., Any]
Scheduler = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau


def capture(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Tensor],
    *,
    grad_clip: GradClip | None = None,
    scheduler: Scheduler | None = None,
) -> tuple[Program, Program]:
    """Captures a training step: the single-node main program and its startup program.

    Running the main program trains the module as the eager step does, to the bit on the CPU: the
    module's own tensors are the program's storage.  Capturing itself changes nothing: not the
    module, its gradients, the optimizer or a random generator.  The two programs become the
    default programs.

    Args:
        model: the module that is trained.
        step: ``step(model, *batch)`` returns a scalar loss, or a dict of tensors with the key
            "loss".
        optimizer: a torch.optim.Optimizer over parameters of ``model``.
        example: one batch, a tuple of tensors.  Dimension 0 of every tensor stays free; all other
            sizes are fixed to the example's.
        grad_clip: how gradients are clipped before the optimizer ops; None: not at all.
        scheduler: a torch.optim.lr_scheduler of this optimizer.  The caller goes on calling
            ``scheduler.step()``, and each run of the program reads the hyper-parameters it left.

    Returns:
        The main program (forward, backward, clipping, optimizer ops), and the startup program,
        which gives the main program's variables the module's present values.

    Raises:
        TypeError: an argument has another type.
        ValueError: the arguments do not fit together, or the step cannot be captured faithfully:
            control flow or a size depends on data, the step branches on the batch size, a size in
            dimension 0 cannot stay free, or results differ from the eager step's.  The message
            names the line of the step.

    Example:
        >>> import torch
        >>> from transpiler import capture
        >>> model = torch.nn.Linear(3, 1)
        >>> def step(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> main, startup = capture(model, step, optimizer, (torch.ones(4, 3), torch.ones(4, 1)))
        >>> [op.type for op in startup.main.ops]
        ['init', 'init']
        >>> [op.type for op in main.main.ops][-2:]
        ['sgd', 'sgd']
    """
    batch = check_arguments(model, optimizer, example, grad_clip, scheduler)
    # Tracing loads torch's compiler front end, which a process that only runs programs or serves
    # does not need: so these three stay function-level imports.
    from transpiler.tracing.emit import emit
    from transpiler.tracing.smallest_batch import smallest_batch
    from transpiler.tracing.trace import trace

    names = input_names(step, batch)
    tables, own = find_tables(model, optimizer)
    groups = parameter_groups(model, optimizer)
    trained = [name for name, _ in model.named_parameters() if name in groups]
    with _without_onednn_lstm(model), unchanged(model) as restore:
        eager(
            model,
            step,
            trained,
            resized(batch, [len(tensor) if tensor.dim() else None for tensor in batch]),
        )
        restore()
        found = trace(
            model,
            step,
            trained,
            names,
            _at_least_two(batch),
            {table.name: table.modules for table in tables},
        )
        restore()
        minimum = smallest_batch(model, step, restore, found, names, trained, batch, tables)
    emitted = emit(found, model, names, set(groups), minimum, tables)
    program, startup = single_node_programs(
        model, optimizer, emitted, groups, grad_clip, tables, own
    )
    set_defaults(program, startup)
    return program, startup


@contextmanager
def _without_onednn_lstm(model: nn.Module) -> Iterator[None]:
    """Turns oneDNN off while a model with recurrent layers is captured.

    oneDNN's LSTM is one opaque kernel; without it torch runs, and tracing sees, ordinary ops.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if not recurrent or not torch.backends.mkldnn.enabled:
        yield
        return
    LOG.info(
        "capture: the model holds a recurrent layer, so it is captured with oneDNN off, and "
        "equals eager training run so"
    )
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _at_least_two(batch: Sequence[Tensor]) -> list[Tensor]:
    """The batch to trace with: an example of one row is doubled, because torch takes an extent of 1
    for a constant.
    """
    single = any(tensor.dim() and len(tensor) == 1 for tensor in batch)
    return resized(
        batch,
        [None if not tensor.dim() else len(tensor) * (2 if single else 1) for tensor in batch],
    )
