"""One rank's stage of a pipelined model, on torch.distributed.pipelining.

A batch is cut into micro batches, which the stages compute at the same time: by the schedule "1F1B"
a forward and a backward in turn, by "F-then-B" all forwards and then all backwards, which keeps the
activations of all of them.  ``accumulate_steps`` is the number of micro batches,
``micro_batch_size`` the samples of each; if only the size is given, the number follows from the
batch.

(Narayanan et al.: PipeDream-2BW, memory-efficient pipeline-parallel DNN training, 2021.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from trainer.collective.world import naming_trainers

# ---- stages ----
#
# A model cut into pipeline stages: by the names of the modules that begin a stage, or by
# ``device_guard`` in its forward.
#
# ::
#
#   stages=["blocks.2", "head"]    # blocks.0, blocks.1 | blocks.2, blocks.3 | head
#
#   class Net(nn.Module):
#       def forward(self, x):
#           with device_guard("stage:0"):
#               x = self.embedding(x)
#           with device_guard("stage:1"):
#               return self.head(x)
#
# The outermost forward is traced with torch.fx; its modules are not traced, so each stage runs the
# model's own modules.  Values that a later stage needs travel through the stages between; inputs of
# the model do not travel, every stage has the batch.


_guards: list[int] = []


@contextmanager
def device_guard(device: str | int) -> Iterator[None]:
    """Puts the ops inside it, in a traced forward, into a pipeline stage; it has no effect outside
    of a trace.

    Example::

        class Net(nn.Sequential):
            def forward(self, x):
                with device_guard("stage:0"):
                    x = self[0](x)
                with device_guard("stage:1"):
                    return self[1](x)

    Args:
        device: the stage's number, alone or after a colon: 1, "stage:1", "gpu:1".

    Returns:
        A context.

    Raises:
        ValueError: there is no number in it.
    """
    found = re.fullmatch(r"(?:[a-z]+:)?(\d+)", str(device))
    if found is None:
        raise ValueError(
            f"device_guard: expected a stage's number, as in 1 or 'stage:1', got {device!r}"
        )
    _guards.append(int(found[1]))
    try:
        yield
    finally:
        _guards.pop()


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a model.

    Attributes:
        module: takes the outputs of the stage before, then its ``inputs`` of the model; it has the
            names of the model's modules.
        inputs: the names of the model's inputs that the stage needs.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]


class _Tracer(fx.Tracer):
    """Traces down to the modules that begin a stage, and marks each node with its stage."""

    def __init__(self, begins: Sequence[str]) -> None:
        super().__init__()
        self.begins = begins
        self.stage = 0
        self.reached: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is not traced: all modules except those that hold the beginning of a
        stage.
        """
        return not any(name.startswith(f"{module_qualified_name}.") for name in self.begins)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a node, marked with its stage."""
        if kind == "call_module" and target in self.begins and target not in self.reached:
            self.reached.append(target)
            self.stage += 1
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["stage"] = _guards[-1] if _guards else self.stage
        return node


def stages_of(model: nn.Module, begins: Sequence[str], count: int) -> list[Stage]:
    """Cuts a model into ``count`` stages.

    Args:
        begins: the names of the modules that begin stages 1, 2, ...; empty: ``device_guard`` in the
            model's forward marks the stages.

    Raises:
        ValueError: the model cannot be traced, a module is not called, or called in another order,
            there are not ``count`` stages, or a tensor is used in two of them.
    """
    graph = _traced(model, begins)
    place = _places(graph, count, begins)
    stages = [_stage(model, graph, place, index, count) for index in range(count)]
    _check_ties(model, stages)
    return stages


def _traced(model: nn.Module, begins: Sequence[str]) -> fx.Graph:
    names = dict(model.named_modules())
    for name in begins:
        if name not in names:
            raise ValueError(
                f"stages: the model has no module {name!r}; it has {', '.join(filter(None, names))}"
            )
    tracer = _Tracer(begins)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ValueError(
            f"stages: {type(model).__name__}'s forward cannot be traced with torch.fx, whose "
            "rules are: no branch on a tensor's "
            f"value or shape outside its submodules; it said: {error}"
        ) from error
    missing = [name for name in begins if name not in tracer.reached]
    if missing:
        raise ValueError(f"stages: forward does not call {missing[0]!r}")
    if tracer.reached != list(begins):
        raise ValueError(
            f"stages: forward calls them in the order {', '.join(tracer.reached)}, got "
            f"{', '.join(begins)}"
        )
    return graph


def _places(graph: fx.Graph, count: int, begins: Sequence[str]) -> dict[fx.Node, int]:
    """The stage of every node that computes."""
    place: dict[fx.Node, int] = {}
    last = 0
    for node in graph.nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            here = node.meta["stage"]
            if here < last:
                raise ValueError(
                    f"stages: {node.name} belongs to stage {here}, and follows an op that belongs "
                    f"to stage {last}"
                )
            place[node] = last = here
    found = sorted(set(place.values()))
    if found != list(range(count)):
        how = f"stages={list(begins)}" if begins else "device_guard"
        raise ValueError(
            f"pp_degree {count}: expected stages 0 to {count - 1}, got "
            f"{', '.join(map(str, found))} by {how}"
        )
    return place


def _crossing(place: dict[fx.Node, int], boundary: int) -> list[fx.Node]:
    """The values computed up to stage ``boundary`` that a later stage needs, in the order of
    computation.
    """
    return [
        node
        for node, stage in place.items()
        if stage <= boundary
        and any(user.op == "output" or place[user] > boundary for user in node.users)
    ]


def _stage(
    model: nn.Module, whole: fx.Graph, place: dict[fx.Node, int], index: int, count: int
) -> Stage:
    """The graph of one stage, over the model's own modules."""
    graph = fx.Graph()
    known = {
        node: graph.placeholder(node.name)
        for node in (_crossing(place, index - 1) if index else [])
    }
    mine = [node for node, stage in place.items() if stage == index]
    needed = {source for node in mine for source in node.all_input_nodes}
    output = next(node for node in whole.nodes if node.op == "output")
    if index == count - 1:
        needed |= set(output.all_input_nodes)
    inputs = [node for node in whole.nodes if node.op == "placeholder" and node in needed]
    known |= {node: graph.node_copy(node, known.__getitem__) for node in inputs}
    for node in whole.nodes:
        if node in mine or (node.op == "get_attr" and node in needed):
            known[node] = graph.node_copy(node, known.__getitem__)
    if index == count - 1:
        graph.output(fx.node.map_arg(output.args[0], known.__getitem__))
    else:
        out = [known[node] for node in _crossing(place, index)]
        graph.output(out[0] if len(out) == 1 else tuple(out))
    return Stage(fx.GraphModule(model, graph), tuple(str(node.target) for node in inputs))


def _check_ties(model: nn.Module, stages: Sequence[Stage]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for parameter in stage.module.parameters():
            if used.setdefault(id(parameter), index) != index:
                name = names[id(parameter)]
                raise ValueError(
                    f"stages: {name!r} is used in stages {used[id(parameter)]} and {index}; a "
                    "tensor can be in one only"
                )
    unused = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if unused:
        raise ValueError(f"stages: no stage uses {', '.join(unused[:5])}")


# ---- pipeline ----


Loss = Callable[[Any, Tensor], Tensor]


class Pipeline(nn.Module):
    """This rank's stage of a model.  Its parameters are those of the stage, with their names in the
    model.

    ::

        # in the place of loss = loss_fn(model(x), y); loss.backward()
        loss = pipeline.forward_backward(x, target=y)
        optimizer.step()

    All ranks of the pipeline give the same batch.  The gradient is that of the mean over micro
    batches, which equals ``loss_fn``'s own if that is a mean over samples.

    Args:
        model: the whole model, for the names of its inputs.
        stage: this rank's stage.
        group: the ranks of the pipeline, in the order of the stages.
        micro_batches: the number of equal parts of a batch, along dimension 0; None: as many as
            ``micro_size`` makes, or one without it.
        micro_size: the samples of each part; None: the batch divided by ``micro_batches``.
        loss_fn: (the model's output, target) -> a mean over samples, a scalar.
        schedule: "1F1B" or "F-then-B".

    Raises:
        ValueError: fewer micro batches than stages, with "1F1B".
    """

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        group: dist.ProcessGroup,
        micro_batches: int | None,
        micro_size: int | None,
        loss_fn: Loss,
        schedule: str = "1F1B",
    ) -> None:
        super().__init__()
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        index, count = dist.get_rank(group), dist.get_world_size(group)
        self._least = count if schedule == "1F1B" else 1  # micro batches
        if micro_batches is None and micro_size is None:
            micro_batches = 1
        if micro_batches is not None:
            self._check_enough(micro_batches)
        self.stage, self._inputs, self._group = stage.module, stage.inputs, group
        self._names = batch_names(model)
        self._micro_batches, self._micro_size = micro_batches, micro_size
        self._first, self._last = index == 0, index == count - 1
        self._device = next(
            (parameter.device for parameter in model.parameters()), torch.device("cpu")
        )
        order = Schedule1F1B if schedule == "1F1B" else ScheduleGPipe
        self._make: Callable[[int], Any] = lambda parts: order(
            PipelineStage(self.stage, index, count, self._device, group=group),
            parts,
            loss_fn=loss_fn,
        )
        # by the shapes of the batch: a stage's buffers have fixed shapes
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def forward_backward(self, *args: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """Runs a batch forward and backward; gradients add to ``p.grad``.

        Args:
            args, kwargs: the model's inputs, the same on all ranks of the pipeline.
            target: for ``loss_fn``, cut like the batch.

        Returns:
            The mean loss of the micro batches, a 0-dim tensor, on every rank of the pipeline.

        Raises:
            ValueError: the batch cannot be cut into equal parts.
        """
        return self._run(args, kwargs, target, "step")

    @torch.no_grad()
    def evaluate(self, *args: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """The mean loss of the micro batches, without gradients."""
        return self._run(args, kwargs, target, "eval")

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Raises an error: one rank has one stage only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this rank has one stage of the model: call forward_backward(*inputs, target=...) or "
            "evaluate"
        )

    def _run(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], target: Tensor, what: str
    ) -> Tensor:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        count = self._parts(target.shape[0])
        for name, tensor in (*given.items(), ("target", target)):
            samples = tensor.shape[0]
            if samples % count:
                raise ValueError(
                    f"{name}: expected a batch that {count} micro batches divide evenly, got "
                    f"{samples} samples"
                )
            if self._micro_size is not None and samples != count * self._micro_size:
                raise ValueError(
                    f"{name}: expected {count} micro batches of {self._micro_size} samples, got "
                    f"{samples} samples"
                )
        missing = [name for name in self._inputs if name not in given]
        if missing:
            raise TypeError(
                f"forward_backward: this rank's stage needs the model's input {missing[0]!r}"
            )
        mine = {name: given[name] for name in self._inputs}
        losses: list[Tensor] = []
        wanted: dict[str, Any] = {"target": target, "losses": losses} if self._last else {}
        run = getattr(self._schedule(what, count, (*given.items(), ("target", target))), what)
        with naming_trainers():
            if self._first:
                run(*mine.values(), **wanted)
            else:
                run(**mine, **wanted)
            loss = (
                torch.stack(losses).detach().mean()
                if self._last
                else torch.zeros((), device=self._device)
            )
            dist.broadcast(loss, group=self._group, group_src=dist.get_world_size(self._group) - 1)
        return loss

    def _parts(self, samples: int) -> int:
        """The number of micro batches of a batch.

        Raises:
            ValueError: the size of micro batches does not divide it, or gives too few of them.
        """
        if self._micro_batches is not None:
            return self._micro_batches
        assert self._micro_size is not None
        if samples % self._micro_size:
            raise ValueError(
                f"target: expected a batch of micro batches of {self._micro_size} samples, got "
                f"{samples} samples"
            )
        self._check_enough(samples // self._micro_size)
        return samples // self._micro_size

    def _check_enough(self, parts: int) -> None:
        if parts < self._least:
            raise ValueError(
                "pipeline_configs: expected accumulate_steps (micro batches) of at least "
                f"pp_degree {self._least}, got {parts}"
            )

    def _schedule(self, what: str, count: int, batch: tuple[tuple[str, Tensor], ...]) -> Any:
        shapes = (what, *((name, tensor.shape, tensor.dtype) for name, tensor in batch))
        if shapes not in self._schedules:
            self._schedules[shapes] = self._make(count)
        return self._schedules[shapes]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's state_dict, by the names in the model."""
        return self.stage.state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's parameters, by the names in the model."""
        return self.stage.named_parameters(*args, **kwargs)


def batch_names(model: nn.Module) -> list[str]:
    """The names of a model's inputs."""
    import inspect

    return list(inspect.signature(model.forward).parameters)
