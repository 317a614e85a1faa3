"""A click and a teacher's opinion of it in one label."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.nn.labels import check_same_shape


def teacher_student_sigmoid_loss(
    input: Tensor,
    label: Tensor,
    soft_max_up_bound: float = 15.0,
    soft_max_lower_bound: float = -15.0,
) -> Tensor:
    """Log loss of a click, plus that of a teacher's score where there is one.

    The label has both: -2 is no click and -1 a click, without a teacher; 0 + z is no click and
    1 + z a click, with the teacher's score z, at least 0 and below 1.  With a score x, the loss is
    softplus(x) - x * click, plus softplus(x) - x * z.

    After Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015, where soft
    targets stand beside hard ones.

    Args:
        input: logits, floats [n, 1] or of any shape.
        label: floats of that shape.
        soft_max_up_bound, soft_max_lower_bound: a logit that is not between them gives its loss,
            and no gradient.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("teacher_student_sigmoid_loss", input=input, label=label)
    inside = (input > soft_max_lower_bound) & (input < soft_max_up_bound)
    logit = torch.where(inside, input, input.detach())
    taught = label >= 0
    clicked = torch.where(taught, label >= 1, label >= -1).to(input.dtype)
    teacher = torch.where(taught, label - clicked, 0.0)
    softplus = F.softplus(logit)
    loss = softplus - logit * clicked
    return loss + torch.where(taught, softplus - logit * teacher, 0.0)


class TeacherStudentSigmoidLoss(nn.Module):
    """:func:`teacher_student_sigmoid_loss` as a module; the arguments are those of the function."""

    def __init__(
        self, soft_max_up_bound: float = 15.0, soft_max_lower_bound: float = -15.0
    ) -> None:
        super().__init__()
        self.bounds = soft_max_up_bound, soft_max_lower_bound

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Two tensors of one shape -> a tensor of this shape."""
        return teacher_student_sigmoid_loss(input, label, *self.bounds)
