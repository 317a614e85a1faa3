"""The places in a model of the parameters that FSDP2 has divided.

FSDP2 puts its own tensors into the modules that it has seen, so a parameter that replaces another
would be overwritten, and a later tie of two would hold for one of them only.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import Tensor, nn


class Places:
    """The modules of a model's divided parameters, and the names there.

    Args:
        model: after it was divided.
        parameters: those that an optimizer steps.
    """

    def __init__(self, model: nn.Module, parameters: Container[nn.Parameter]) -> None:
        self._model = model
        self._places = [
            (path, module, name, parameter)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, parameter in dict.items(module._parameters)
            if hasattr(parameter, "placements") and parameter in parameters
        ]

    def taken(self) -> Iterator[str]:
        """The names of places that have another parameter now, which is not one of FSDP2's."""
        other = [place for place in self._places if self._now(place[1], place[2]) is not place[3]]
        whole = self._whole() if other else set()
        for path, module, name, _ in other:
            now = self._now(module, name)
            # a tensor that functional_call puts there is refused by the unit itself
            if now is None or (isinstance(now, nn.Parameter) and id(now) not in whole):
                yield f"{path}.{name}".lstrip(".")

    @staticmethod
    def _now(module: nn.Module, name: str) -> Tensor | None:
        return dict.get(module._parameters, name)  # not a read of the table, which may gather

    def _whole(self) -> set[int]:
        """The tensors that FSDP2 puts in the places of divided ones while their unit is whole."""
        found = set[int]()
        for module in self._model.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            one = getattr(state, "_fsdp_param_group", None)  # torch before 2.11
            for group in getattr(state, "_fsdp_param_groups", [one] if one else ()):
                for held in group.fsdp_params:
                    found.add(id(getattr(held, "_unsharded_param", None)))
        return found
