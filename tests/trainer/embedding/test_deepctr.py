"""DeepCTR-Torch's models with their embeddings on real servers in this process, in sync mode,
trained by the package's own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.tiers import RARE
from trainer import DistributedEmbedding, fleet
from transpiler import DistributedStrategy

deepctr = pytest.importorskip("tests.support.deepctr", exc_type=ImportError)

Servers = Callable[[int], str]
Make = Callable[[Any], torch.optim.Optimizer]
C = 1e-2  # the factor of the penalties: a thousand times the package's, so that it is seen

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
}
RULES = [RARE("sgd"), RARE("adagrad"), "adam"]


def fit(model: Any, optimizer: torch.optim.Optimizer, case: Any) -> list[float]:
    """Trains as the package's examples do; the mean loss of each epoch, penalties included."""
    model.compile(optimizer, "binary_crossentropy")
    inputs = {name: values.copy() for name, values in case.inputs.items()}
    history = model.fit(inputs, case.labels, batch_size=32, epochs=3, verbose=0, shuffle=False)
    losses: list[float] = history.history["loss"]
    return losses


def predicted(model: Any, case: Any) -> np.ndarray:
    found: np.ndarray = model.predict({name: v.copy() for name, v in case.inputs.items()}, 32)
    return found


def joined(endpoints: str, model: nn.Module) -> nn.Module:
    """The model with all of its embeddings on servers."""
    strategy = DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"embeddings": ["*"]}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    return fleet.distributed_model(model)


@pytest.fixture(params=list(deepctr.CASES))
def case(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield deepctr.CASES[request.param]()


@pytest.mark.observes("a_sync_configs.embeddings")
@pytest.mark.parametrize("name", RULES)
def test_third_party_models_equal_plain_training(servers: Servers, case: Any, name: str) -> None:
    """Without penalties on embeddings: every prediction, and the losses on the way."""
    plain, mine = case.make(0.0), joined(servers(2), case.make(0.0))
    optimizer = fleet.distributed_optimizer(OPTIMIZERS[name](mine.parameters()))
    losses = fit(mine, optimizer, case)
    expected = fit(plain, OPTIMIZERS[name](plain.parameters()), case)
    assert not any(isinstance(module, nn.Embedding) for module in mine.modules())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert np.abs(predicted(mine, case) - predicted(plain, case)).max() <= 1e-5


@pytest.mark.parametrize("l2", [None, C])
def test_their_penalties_on_moved_embeddings_raise(
    servers: Servers, case: Any, l2: float | None
) -> None:
    """As the package makes them by default, and with a larger factor: the first step says where the
    model keeps the weights and what to write.
    """
    mine = joined(servers(2), case.make(l2))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(mine.parameters()))
    place = r"embedding 'embedding_dict\.\w+': .*regularization_weight\[0\]\[0\]\[0\].*weight_decay"
    with pytest.raises(RuntimeError, match=place):
        fit(mine, optimizer, case)


@pytest.mark.parametrize("name", RULES)
def test_their_penalties_equal_the_weight_decay_that_the_message_names(
    servers: Servers, case: Any, name: str
) -> None:
    """What the message says to write trains as the package's penalties do: rows that no batch
    touches included.
    """
    plain, mine = case.make(C), joined(servers(2), case.make(0.0))
    penalized = [
        *(p for m in mine.modules() if isinstance(m, DistributedEmbedding) for p in m.parameters()),
        *(p for n, p in mine.linear_model.named_parameters() if n == "weight"),
    ]
    others = [p for p in mine.parameters() if not any(p is each for each in penalized)]
    groups = [{"params": penalized, "weight_decay": 2 * C}, {"params": others}]
    fit(mine, fleet.distributed_optimizer(OPTIMIZERS[name](groups)), case)
    fit(plain, OPTIMIZERS[name](plain.parameters()), case)
    assert np.abs(predicted(mine, case) - predicted(plain, case)).max() <= 1e-5
    for place, embedding in plain.named_modules():
        if isinstance(embedding, nn.Embedding):
            with torch.no_grad():
                rows = mine.get_submodule(place)(torch.arange(embedding.num_embeddings))
            torch.testing.assert_close(rows, embedding.weight, atol=1e-5, rtol=0)
