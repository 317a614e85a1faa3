"""The optimizer of a program that was loaded, as a checkpoint sees it: its groups are those of the
ops, its states are the storage's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from transpiler.ir.graph import Role, Storage
from transpiler.ir.updates import group_of, optimizer_ops, parameter_of, rules_of_ops
from transpiler.program import Program


class StoredStates(MutableMapping[Tensor, dict[str, Tensor]]):
    """The storage's states by parameter.

    Each dict is changed in place: what runs the program's ops goes on with the same one.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._names = {tensor: name for name, tensor in storage.tensors.items()}

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        return self._storage.states.setdefault(self._names[parameter], {})

    def __setitem__(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        held, given = self[parameter], dict(states)
        held.clear()
        held.update(given)

    def __delitem__(self, parameter: Tensor) -> None:
        self._storage.states.get(self._names[parameter], {}).clear()

    def __iter__(self) -> Iterator[Tensor]:
        return (self._storage.tensors[name] for name in self._storage.states)

    def __len__(self) -> int:
        return len(self._storage.states)


class OpsOptimizer:
    """Groups and states of a loaded single-node program.

    Args:
        program: with a storage that has no optimizer.

    Attributes:
        param_groups: as of torch's optimizers, with the hyper-parameters of the ops.
        state: the present states, by parameter.

    Raises:
        ValueError: the program updates nothing, or has tables, whose rows' states no file holds.
    """

    def __init__(self, program: Program) -> None:
        storage, ops = program.storage, optimizer_ops(program.main)
        assert storage is not None, "it is loaded"
        if program.deployment is not None or program.main.variables_of(Role.TABLE) or not ops:
            raise ValueError(
                "expected a program that was captured in this process, with its optimizer, or a "
                "loaded single-node one that trains without tables; others have Program.save and "
                "Program.load"
            )
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": [
                    storage.tensors[parameter_of(op)] for op in ops if group_of(op) == index
                ],
                **rule.hparams,
                **rule.flags,
            }
            for index, rule in enumerate(rules_of_ops(program.main, None))
        ]
        self.state = StoredStates(storage)

    def state_dict(self) -> dict[str, Any]:
        """Groups and states, as torch's optimizers give them."""
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        states = {index: dict(self.state[each]) for index, each in enumerate(members)}
        return {"state": states, "param_groups": self.param_groups}

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Whether the ops have the hyper-parameters of a checkpoint.

        Raises:
            ValueError: one differs: ops cannot take up another.
        """
        for index, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            for key in sorted(set(mine) & set(theirs) - {"params"}):
                found = theirs[key]
                value = tuple(found) if isinstance(found, list) else found
                if value is not None and value != mine[key]:
                    raise ValueError(
                        f"group {index}, {key}: the checkpoint has {value}, and the ops of a "
                        f"loaded program, which no schedule moves, have {mine[key]}: capture the "
                        "step instead"
                    )
