"""torchmetrics' metrics over the samples of three trainers, one of which has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.metric_trainers import AllSay, part, samples, three_trainers
from tests.support.table_trainers import Servers
from trainer import fleet
from trainer.job.synced_metrics import synced

tm = pytest.importorskip("torchmetrics", reason="needs torchmetrics")


class Extremes(tm.Metric):  # type: ignore[misc,name-defined]
    """A state of each other kind: the largest, the smallest, a mean, a tensor a trainer, a list of
    tensors of different shapes, and a reduction of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.add_state("most", torch.tensor(-torch.inf), "max")
        self.add_state("least", torch.tensor(torch.inf), "min")
        self.add_state("mean", torch.tensor(0.0), "mean")
        self.add_state("apart", torch.zeros(2), None)
        self.add_state("batches", [], None)
        self.add_state("own", torch.tensor(1.0), lambda stacked: stacked.prod(0))

    def update(self, preds: torch.Tensor, labels: torch.Tensor) -> None:
        self.most = torch.maximum(self.most, preds.max())
        self.least = torch.minimum(self.least, preds.min())
        self.mean += 3.0
        self.apart += len(preds)
        self.batches.append(preds)
        self.own += 1

    def compute(self) -> Any:
        lengths = [len(each) for each in self.batches]
        return [self.most, self.least, self.mean, self.apart, torch.tensor(lengths), self.own]


MAKES: dict[str, Callable[[], Any]] = {
    "sum": lambda: tm.classification.BinaryF1Score(),
    "cat": lambda: tm.classification.BinaryAUROC(),
    "weighted mean": lambda: tm.MeanMetric(),
    "error": lambda: tm.MeanSquaredError(squared=False),
    "collection": lambda: tm.MetricCollection(
        [tm.classification.BinaryPrecision(), tm.classification.BinaryRecall(),
         tm.classification.BinaryAUROC()]
    ),
    "composition": lambda: tm.classification.BinaryAUROC() + tm.classification.BinaryAccuracy(),
}  # fmt: skip


def update(name: str, metric: Any, rank: int | None, seed: int = 0) -> None:
    """One trainer's samples, or all; in batches."""
    data = samples(seed)
    preds, labels = data["preds"], data["labels"]
    if rank is not None:
        preds, labels = part(rank, preds), part(rank, labels)
    for p, y in zip(preds.split(50), labels.split(50), strict=True):
        if len(p):
            metric.update(p) if name == "weighted mean" else metric.update(p, y)


@pytest.fixture(scope="module")
def all_say(servers: Servers) -> Iterator[AllSay]:
    with three_trainers(servers) as say:
        yield say


@pytest.mark.parametrize("name", MAKES)
def test_a_synced_metric_is_that_of_all_samples(all_say: AllSay, name: str) -> None:
    """The same on all trainers; after a reset once more, and a second sync in between is an
    error.
    """
    wholes = []
    for seed in (0, 1):
        whole = MAKES[name]()
        update(name, whole, None, seed)
        wholes.append(whole.compute())

    def say(values: Any) -> list[Any]:
        metric, found = MAKES[name](), []
        for seed in (0, 1):
            update(name, metric, values.rank, seed)
            assert synced(metric, values) is metric
            found.append(metric.compute())
            with pytest.raises(RuntimeError, match="is synced already"):
                synced(metric, values)
            metric.reset()
        return found

    for found in all_say(say):
        torch.testing.assert_close(found, wholes)


def test_states_are_merged_as_declared(all_say: AllSay) -> None:
    """max, min, mean, none, lists that stay lists, and a function; unsync gives the own ones
    back.
    """

    def say(values: Any) -> list[list[Any]]:
        metric = Extremes()
        update("", metric, values.rank)
        before = metric.own.clone()
        merged = synced(metric, values).compute()
        metric.unsync()
        assert torch.equal(metric.own, before)
        return [each.tolist() for each in merged]

    preds = samples()["preds"]
    found = all_say(say)
    assert found[0] == found[1] == found[2]
    most, least, mean, apart, batches, own = found[0]
    assert (most, least) == (float(preds.max()), float(preds.min()))
    assert mean == pytest.approx((9 + 0 + 18) / 3) and own == 4 * 1 * 7
    assert apart == [[133, 133], [0, 0], [267, 267]]
    assert batches == [50, 50, 33] + [50] * 5 + [17]


def test_alone_a_metric_is_its_own() -> None:
    """And something else is refused."""
    fleet.init()
    metric = tm.MeanMetric()
    metric.update(2.0)
    assert fleet.sync(metric).compute() == 2.0
    with pytest.raises(TypeError, match="expected a metric of torchmetrics or trainer.metrics"):
        fleet.sync(nn.Linear(1, 1))
