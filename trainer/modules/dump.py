"""What an eager script computes, dumped at each step.

A name is a module's (its output), that of a tensor that ``transpiler.name`` has named, a
parameter's, or a parameter's with ``@GRAD``.  Hooks see what is computed with gradients, so that an
evaluation is not dumped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pserver.onlookers import onlooker
from trainer.modules.dump_file import DumpFiles
from transpiler.ir.close_names import close_names
from transpiler.plan.plan import DumpSettings
from transpiler.tracing.default_programs import Listener, listen

GRAD = "@GRAD"


class ModuleDump:
    """Dumps the steps of one optimizer.

    Args:
        settings: what is dumped.
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
        self._hooks: list[RemovableHandle | Listener] = [
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
        """Writes what was computed since the last step.

        Args:
            steps: that the optimizer has taken before this one.

        Raises:
            ValueError: something of a name that is asked for was not computed.
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
        """Dumps nothing any more."""
        while self._hooks:
            self._hooks.pop().remove()
