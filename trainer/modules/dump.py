"""The dump of an eager script's values, at each step.

A name is a module's (its output), that of a tensor that ``transpiler.name`` has named, a
parameter's, or a parameter's with ``@GRAD``.  Hooks record values that are computed with gradients,
so that an evaluation is not dumped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pserver.onlookers import onlooker
from pserver.storage.single_file import file_to_write, joined
from transpiler.ir.close_names import close_names
from transpiler.plan.plan import DumpSettings
from transpiler.tracing.default_programs import NameListener, listen

# ---- dump file ----
#
# The files of a dump: one for each trainer and step, of JSON lines.
#
# A file appears whole when its step is dumped, so it can be read during training::
#
#   PATH/trainer-0/step-00000001.jsonl
#   {"step": 1, "field": "fc", "sample": 0, "value": [0.5, -1.25]}
#   {"step": 1, "param": "fc.weight", "value": [[0.1], [0.2]]}
#   {"step": 1, "stat": "fc", "min": -1.25, "max": 0.5, "mean": -0.375, "abs_mean": 0.875, ...}


Values = Mapping[str, Sequence[Tensor]]  # the values of a step under each name, in order


class DumpFiles:
    """The dump files of one trainer.

    Args:
        settings: with a path.
        trainer_id: of the trainer.
        suffix: of the files' names, for a second optimizer.

    Raises:
        ValueError: the path names nothing.
    """

    def __init__(self, settings: DumpSettings, trainer_id: int, suffix: str = "") -> None:
        self._settings, self._suffix = settings, suffix
        self._folder = joined(settings.path, f"trainer-{trainer_id}")
        self._last = 0

    @onlooker("the dump of steps")
    def write(self, steps: int, values: Values, params: Mapping[str, Tensor]) -> None:
        """Writes one step.

        Args:
            steps: that were taken before; a step that is taken again has a number of its own.
            values: of the fields, and of the statistics.
            params: the dumped parameters.
        """
        self._last = step = max(self._last, steps) + 1
        name = f"step-{step:08d}{self._suffix}.jsonl"
        with (
            file_to_write(joined(self._folder, name)) as path,
            path.open("w", encoding="utf-8") as file,
        ):
            for line in self._lines(values, params):
                file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")

    def _lines(self, values: Values, params: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        for name in self._settings.fields:
            for number, sample in enumerate(_samples(values[name])):
                yield {"field": name, "sample": number, "value": plain(sample)}
        for name in self._settings.params:
            yield {"param": name, "value": plain(params[name])}
        for name in self._settings.stats:
            yield {"stat": name, **summary(values[name])}


def _samples(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The samples of a step: the rows of its tensors; a scalar is one."""
    for tensor in tensors:
        yield from tensor if tensor.dim() else [tensor]


def plain(tensor: Tensor) -> Any:
    """A tensor as lists of numbers; non-finite ones are "NaN", "Infinity" or "-Infinity"."""
    return _finite(tensor.detach().cpu().tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def summary(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The smallest, largest, mean and mean absolute value, the number of values, and the number of
    those that are not finite.

    Example:
        >>> summary([torch.tensor([1.0, -3.0])])["abs_mean"]
        2.0
    """
    flat = torch.cat([each.detach().reshape(-1).cpu().double() for each in tensors])
    numbers = {"min": None, "max": None, "mean": None, "abs_mean": None}
    if len(flat):
        found = flat.min(), flat.max(), flat.mean(), flat.abs().mean()
        numbers = dict(zip(numbers, map(plain, found), strict=True))
    return {
        **numbers,
        "count": len(flat),
        "nonfinite": len(flat) - int(torch.isfinite(flat).sum()),
    }


# ---- dump ----


GRAD = "@GRAD"


class ModuleDump:
    """Dumps the steps of one optimizer.

    Args:
        settings: the names to dump.
        modules: by name.
        parameters: those that the optimizer trains, by name.
        trainer_id: of this trainer; ``number``: of the optimizer.

    Raises:
        ValueError: a parameter does not exist.
    """

    def __init__(
        self,
        settings: DumpSettings,
        modules: Iterable[tuple[str, nn.Module]],
        parameters: Mapping[str, Tensor],
        trainer_id: int,
        number: int = 0,
    ) -> None:
        for name in settings.params:
            if name not in parameters:
                raise ValueError(
                    f"trainer_desc_configs: dump_param: no optimizer's parameter is {name!r}; "
                    f"close names: {close_names(name, parameters)}"
                )
        self._settings, self._parameters = settings, parameters
        self._wanted = {*settings.fields, *settings.stats}
        self._files = DumpFiles(settings, trainer_id, f".optimizer-{number}" if number else "")
        self._seen: dict[str, list[Tensor]] = {}
        named = {name: module for name, module in modules if name in self._wanted}
        self._known = [*named, *parameters]
        self._hooks: list[RemovableHandle | NameListener] = [
            module.register_forward_hook(partial(self._computed, name))
            for name, module in named.items()
        ]
        self._hooks.append(listen(self._named))

    @onlooker("the dump of steps", end=lambda dump: dump.close())
    def _computed(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
            self._seen.setdefault(name, []).extend(each.detach() for each in tensors)

    @onlooker("the dump of steps", end=lambda dump: dump.close())
    def _named(self, name: str, tensor: Tensor) -> None:
        if name in self._wanted and torch.is_grad_enabled():
            self._seen.setdefault(name, []).append(tensor.detach())

    def step(self, steps: int) -> None:
        """Writes the values since the last step.

        Args:
            steps: that the optimizer has taken before this one.

        Raises:
            ValueError: a name to dump has no value in this step.
        """
        if not self._hooks:
            return
        seen, self._seen = self._seen, {}
        for name in self._wanted - set(seen):
            seen[name] = [self._of_parameter(name)]
        self._files.write(steps, seen, self._parameters)

    def _of_parameter(self, name: str) -> Tensor:
        parameter = self._parameters.get(name.removesuffix(GRAD))
        if parameter is None:
            raise ValueError(
                f"trainer_desc_configs: nothing of the name {name!r} was computed in this step: "
                "expected a module, a tensor that transpiler.name has named, a parameter, or its "
                f"name with {GRAD}; close names: {close_names(name, self._known)}"
            )
        if not name.endswith(GRAD):
            return parameter
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def close(self) -> None:
        """Stops the dump."""
        while self._hooks:
            self._hooks.pop().remove()
