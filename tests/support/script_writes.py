"""Ways in which a script writes into a model's parameters between steps: the class that every mode
of training is tested with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

Write = Callable[[nn.Module, int], None]  # a model, and a number that varies what is written


def load_state_dict(model: nn.Module, number: int) -> None:
    """Another model's values, as of the best epoch."""
    generator = torch.Generator().manual_seed(number)
    state = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state)


def clamp(model: nn.Module, number: int) -> None:
    """As a Wasserstein critic's weights are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.02 * number, 0.02 * number)


def copy_under_no_grad(model: nn.Module, number: int) -> None:
    """One parameter, from a tensor."""
    with torch.no_grad():
        first = next(model.parameters())
        first.copy_(torch.full_like(first, 0.01 * number))


def index_under_no_grad(model: nn.Module, number: int) -> None:
    """One row."""
    with torch.no_grad():
        next(model.parameters())[number] = 0.25


def initialize(model: nn.Module, number: int) -> None:
    """A layer begins anew."""
    torch.manual_seed(number)
    last = list(model.parameters())[-1]
    nn.init.normal_(last)


def vector_to_parameters(model: nn.Module, number: int) -> None:
    """All parameters, from one vector, which rebinds their memory."""
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())


def data_multiply(model: nn.Module, number: int) -> None:
    """Which no counter tells of."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def data_one_element(model: nn.Module, number: int) -> None:
    """In the first steps, in which everything is compared."""
    next(model.parameters()).data[7 + number, 3] = 5.0


def numpy_view(model: nn.Module, number: int) -> None:
    """Numpy writes into the same memory."""
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.5


def rebind(model: nn.Module, number: int) -> None:
    """Another tensor's memory in the place of the parameter's."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def averaged(model: nn.Module, number: int) -> None:
    """The parameters of an average of models."""
    average = torch.optim.swa_utils.AveragedModel(nn.ModuleList([copy.deepcopy(model)]))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * number)
    average.update_parameters(nn.ModuleList([other]))
    average.update_parameters(nn.ModuleList([model]))
    for mine, theirs in zip(model.parameters(), average.parameters(), strict=True):
        mine.detach().copy_(theirs)


WRITES: dict[str, Write] = {
    write.__name__: write
    for write in (
        load_state_dict,
        clamp,
        copy_under_no_grad,
        index_under_no_grad,
        initialize,
        vector_to_parameters,
        data_multiply,
        data_one_element,
        numpy_view,
        rebind,
        averaged,
    )
}
