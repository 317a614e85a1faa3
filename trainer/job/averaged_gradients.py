"""Whether a step's gradients were averaged over the trainers: a backward through a registered model
does so, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from trainer.collective.gradient_marks import GradientMarks

MOST_NAMED = 4  # parameters in a message


class AveragedGradients:
    """Looks, before each step, whether all gradients that it applies bear the mark of a mean.

    Args:
        marks: which the registered models set.
        names: of the parameters.
    """

    def __init__(self, marks: GradientMarks, names: Mapping[Tensor, str]) -> None:
        self._marks, self._names = marks, names

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Returns if no gradient is this trainer's alone.

        Args:
            parameters: of the step.

        Raises:
            RuntimeError: one is; the message names its parameter.
        """
        alone = list(self._marks.without(parameters))
        if not alone:
            return
        names = [
            repr(self._names[p]) if p in self._names else f"a parameter of shape {list(p.shape)}"
            for p in alone[:MOST_NAMED]
        ]
        more = f" and {len(alone) - MOST_NAMED} more" if len(alone) > MOST_NAMED else ""
        raise RuntimeError(
            "optimizer.step(): expected gradients that a backward through the registered model has "
            f"averaged over the trainers, got others, of {', '.join(names)}{more}: call the model "
            "itself, model(...), not its layers or another method, and make one backward of what "
            "it returns, of all losses together; where a loss does not depend on all parameters, "
            "set strategy.find_unused_parameters=True"
        )

    def note(self, parameters: Iterable[Tensor]) -> None:
        """A step has been taken with the gradients as they are."""
        self._marks.applied(parameters)
