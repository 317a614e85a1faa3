"""A model cut into pipeline stages: by the names of the modules that begin one, or by
``device_guard`` in its forward.

::

    stages=["blocks.2", "head"]    # blocks.0, blocks.1 | blocks.2, blocks.3 | head

    class Net(nn.Module):
        def forward(self, x):
            with device_guard("stage:0"):
                x = self.embedding(x)
            with device_guard("stage:1"):
                return self.head(x)

The outermost forward is traced with torch.fx, its modules as they are, so that each stage runs the
model's own modules.  Values that a later stage needs travel through the stages between; inputs of
the model do not travel, every stage has the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

_guards: list[int] = []


@contextmanager
def device_guard(device: str | int) -> Iterator[None]:
    """Puts the ops that a traced forward computes inside into a pipeline stage; outside of a trace
    it has no effect.

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
        ValueError: no number.
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
        module: takes what the stage before gives, then its ``inputs`` of the model; has the names
            of the model's modules.
        inputs: the model's inputs that it needs, by name.
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
        """All modules but those that hold a beginning."""
        return not any(name.startswith(f"{module_qualified_name}.") for name in self.begins)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, marked with its stage."""
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
            model's forward says it.

    Raises:
        ValueError: the model cannot be traced, a module is not called or in another order, there
            are not ``count`` stages, or a tensor is used in two of them.
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
                    f"stages: {node.name} belongs to stage {here}, and comes after what belongs "
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
    """The values made up to stage ``boundary`` that a later one needs, in the order in which they
    were made.
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
