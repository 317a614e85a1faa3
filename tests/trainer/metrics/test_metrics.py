"""Metrics against scikit-learn on the same samples, alone and divided among trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.metric_trainers import AllSay, part, samples, three_trainers
from tests.support.table_trainers import Servers
from trainer import metrics
from trainer.job.synced_metrics import synced
from trainer.metrics import AUC, COPC, GroupedAUC, Metric

CLOSE = {"rel": 1e-12, "abs": 1e-12}


def sklearn_metrics() -> Any:
    return pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")


def roc(y: Any, p: Any, w: Any) -> float:
    return float(sklearn_metrics().roc_auc_score(y, p, sample_weight=w))


def thresholded(name: str) -> Callable[[Any, Any, Any], float]:
    return lambda y, p, w: float(getattr(sklearn_metrics(), name)(y, p > 0.5, sample_weight=w))


def grouped(y: Any, p: Any, w: Any) -> float:
    """The mean written out, of the groups that have both classes."""
    g = samples()["groups"].numpy()
    w = np.ones(len(y)) if w is None else w
    both = [k for k in set(g.tolist()) if len(set(y[g == k])) == 2]
    areas = [roc(y[g == k], p[g == k], w[g == k]) for k in both]
    return float(np.average(areas, weights=[w[g == k].sum() for k in both]))


REFERENCES: dict[str, tuple[Callable[[], Metric], Callable[[Any, Any, Any], float]]] = {
    # scores are multiples of 1/50, so that equal ones share a bin and others do not
    "auc": (AUC, roc),
    "auc of few bins": (lambda: AUC(bins=1000), roc),
    "auc exact": (lambda: AUC(exact=True), roc),
    "gauc": (GroupedAUC, grouped),
    "logloss": (
        metrics.LogLoss,
        lambda y, p, w: float(sklearn_metrics().log_loss(y, p, sample_weight=w)),
    ),
    "accuracy": (metrics.Accuracy, thresholded("accuracy_score")),
    "precision": (metrics.Precision, thresholded("precision_score")),
    "recall": (metrics.Recall, thresholded("recall_score")),
    "mae": (
        metrics.MAE,
        lambda y, p, w: float(sklearn_metrics().mean_absolute_error(y, p, sample_weight=w)),
    ),
    "rmse": (
        metrics.RMSE,
        lambda y, p, w: float(sklearn_metrics().root_mean_squared_error(y, p, sample_weight=w)),
    ),
    "copc": (COPC, lambda y, p, w: float(np.average(y, weights=w) / np.average(p, weights=w))),
}


def update(metric: Metric, data: dict[str, Tensor], weighted: bool, batch: int = 64) -> None:
    """Feeds samples batch by batch."""
    more = {"groups": data["groups"]} if isinstance(metric, GroupedAUC) else {}
    more |= {"weights": data["weights"]} if weighted else {}
    for at in range(0, len(data["preds"]), batch):
        cut = slice(at, at + batch)
        metric.update(  # type: ignore[attr-defined]
            data["preds"][cut],
            data["labels"][cut],
            **{name: values[cut] for name, values in more.items()},
        )


@pytest.fixture(scope="module")
def all_say(servers: Servers) -> Iterator[AllSay]:
    with three_trainers(servers) as say:
        yield say


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_metric_is_scikit_learns(all_say: AllSay, name: str, weighted: bool) -> None:
    """Alone, and over the samples of three trainers, one of which has none."""
    make, reference = REFERENCES[name]
    data = {**samples(), "preds": samples()["preds"].double()}
    y, p, w = (data[key].numpy() for key in ("labels", "preds", "weights"))
    expected = reference(y, p, w if weighted else None)
    alone = make()
    update(alone, data, weighted)

    assert alone.compute() == pytest.approx(expected, **CLOSE)

    def say(values: Any) -> float:
        own = make()
        update(own, {key: part(values.rank, each) for key, each in data.items()}, weighted)
        return synced(own, values).compute()

    found = all_say(say)
    assert len(set(found)) == 1 and found[0] == pytest.approx(expected, **CLOSE)


def test_functions_are_the_metrics() -> None:
    """In one call, over this process's samples where there is no job."""
    data = samples()
    y, p, w, g = (data[key] for key in ("labels", "preds", "weights", "groups"))

    for name in ("logloss", "accuracy", "precision", "recall", "mae", "rmse", "copc", "auc"):
        metric = REFERENCES[name][0]()
        update(metric, data, True)
        assert getattr(metrics, name)(p, y, w) == pytest.approx(metric.compute(), rel=1e-12)
    assert metrics.auc(p, y, exact=True) == metrics.auc(p, y)
    assert metrics.grouped_auc(p, y, g) == pytest.approx(grouped(y.numpy(), p.numpy(), None))
    assert metrics.mean([1.0, 2.0, 6.0], [1, 1, 2]) == 3.75


def test_the_bins_are_near_the_exact_area() -> None:
    """Of scores as a model has them, in both dtypes, on the edges too."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.sigmoid(torch.randn(5000, generator=generator) * 3)
    scores[:2] = torch.tensor([0.0, 1.0])
    labels = torch.rand(5000, generator=generator) < scores

    assert abs(metrics.auc(scores, labels) - metrics.auc(scores, labels, exact=True)) < 1e-6


def test_groups_have_areas_of_their_own() -> None:
    """Any ids of 64 bits; one class only is nan."""
    metric = GroupedAUC()
    metric.update(
        [[0.1, 0.7, 0.2], [0.9, 0.5, 0.5]], [[0, 1, 1], [0, 1, 0]], [[7, 7, -(2**60)], [0, 1, 1]]
    )
    found = metric.groups()

    assert list(found) == [-(2**60), 0, 1, 7]
    assert math.isnan(found[-(2**60)]) and math.isnan(found[0])
    assert (found[1], found[7]) == (0.5, 1.0)
    assert metric.compute() == 0.75  # two samples each


@pytest.mark.parametrize("name", REFERENCES)
def test_no_sample_is_nan(name: str) -> None:
    """And so is what its samples do not define; an empty batch adds nothing."""
    metric = REFERENCES[name][0]()
    assert math.isnan(metric.compute())
    update(metric, samples(count=0), True)
    assert math.isnan(metric.compute())


def test_one_class_defines_no_area() -> None:
    """No recall without a positive, no precision without a positive prediction, no COPC without a
    prediction.
    """
    for label in (0, 1):
        assert math.isnan(metrics.auc([0.1, 0.9], [label, label]))
        assert math.isnan(metrics.auc([0.1, 0.9], [label, label], exact=True))
        assert math.isnan(metrics.grouped_auc([0.1, 0.9], [label, label], [3, 3]))
    assert math.isnan(metrics.recall([0.9], [0])) and metrics.precision([0.9], [0]) == 0.0
    assert math.isnan(metrics.precision([0.1], [1])) and metrics.recall([0.1], [1]) == 0.0
    assert math.isnan(metrics.copc([0.0], [1.0]))


def test_certain_predictions_have_a_finite_loss() -> None:
    """That of scikit-learn, by the dtype of the predictions."""
    for dtype in (np.float32, np.float64):
        p, y = np.array([0.0, 1.0, 1.0, 0.25], dtype=dtype), np.array([1, 0, 1, 0])
        expected = sklearn_metrics().log_loss(y, p)
        assert metrics.logloss(torch.from_numpy(p), y) == pytest.approx(expected, rel=1e-6)


def test_classes_are_predicted_in_three_ways() -> None:
    """By a score, by a class, by the highest of several scores; labels in any integers."""
    assert metrics.accuracy([0.2, 0.7, 0.5], [0, 1, 1]) == pytest.approx(2 / 3)
    assert metrics.accuracy([3, 1, 2], [3, 1, 1]) == pytest.approx(2 / 3)
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]])
    assert metrics.accuracy(scores, torch.tensor([1, 2])) == 0.5
    assert metrics.accuracy(scores, torch.tensor([[1], [2]])) == 0.5  # as Paddle's labels are
    assert metrics.accuracy(scores[:, :1], torch.tensor([[0], [0]]), threshold=0.3) == 0.5


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: metrics.auc([0.1, math.nan], [0, 1]), ValueError, "preds: .* nan at position 1"),
        (lambda: metrics.logloss([0.5, 1.5], [0, 1]), ValueError, "from 0 to 1, got 1.5"),
        (lambda: metrics.auc([-0.5], [0]), ValueError, "from 0 to 1, got -0.5: apply a sigmoid"),
        (lambda: metrics.auc([0.5], [2]), ValueError, "labels: expected 0 and 1, got 2"),
        (lambda: metrics.mae([0.5, 1], [1]), ValueError, r"shape of preds, \[2\], got \[1\]"),
        (lambda: metrics.mean([1.0], [-1.0]), ValueError, "numbers of 0 or more, got -1 to -1"),
        (lambda: metrics.rmse([math.nan], [1]), ValueError, "preds: expected numbers, got nan"),
        (lambda: metrics.accuracy([math.nan], [1]), ValueError, "preds: expected numbers, got nan"),
        (
            lambda: metrics.accuracy([[0.1, 0.9], [0.2, 0.8]], [1, 2]),
            ValueError,
            "labels: expected classes from 0 to 1, got 2",
        ),
        (
            lambda: metrics.accuracy([[0.1, 0.9], [0.2, 0.8]], [0.5, 0]),
            ValueError,
            "labels: expected classes from 0 to 1, got 0.5",
        ),
        (
            lambda: metrics.accuracy([[0.1, 0.9], [0.2, 0.8]], [1, 0, 1]),
            ValueError,
            r"preds: expected the shape of labels, \[3\], got \[2, 2\]",
        ),
        (lambda: metrics.recall([7], [1]), ValueError, "preds: expected classes 0 and 1, got 7"),
        (lambda: metrics.grouped_auc([0.5], [1], [0.5]), TypeError, "expected integers"),
        (lambda: metrics.mean(["a"]), TypeError, "values: expected a tensor of numbers"),
        (lambda: AUC(bins=1), ValueError, "bins: expected a number of 2 or more, got 1"),
    ],
)
def test_bad_input_is_said(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("name", ["auc", "auc exact", "gauc", "logloss"])
def test_a_metric_goes_on_from_its_state(name: str) -> None:
    """A checkpoint in the middle of an evaluation; reset begins anew."""
    whole, first, second = (REFERENCES[name][0]() for _ in range(3))
    for seed in (1, 2):
        update(whole, samples(seed), True)
    update(first, samples(1), True)
    second.load_state_dict(first.state_dict())
    update(second, samples(2), True)

    assert second.compute() == whole.compute()
    second.reset()
    assert math.isnan(second.compute())
    with pytest.raises(ValueError, match="expected sums.NAME and rows.NAME, got 'other'"):
        second.load_state_dict({"other": torch.zeros(1)})


def test_a_metric_of_all_takes_no_samples_of_one(all_say: AllSay) -> None:
    """They would be counted once for each trainer; and trainers whose metrics differ are told."""

    def say(values: Any) -> str:
        metric = AUC()
        with pytest.raises(ValueError, match=r"got AUC\(bins=1048576\), AUC\(exact=True\)"):
            AUC(exact=values.rank == 1).merge(values)
        metric.merge(values)
        with pytest.raises(RuntimeError, match="AUC.update: expected this trainer's samples"):
            metric.update([0.5], [1])
        with pytest.raises(RuntimeError, match="call reset"):
            synced(metric, values)
        metric.reset()
        metric.update([0.5], [1])
        return "said"

    assert all_say(say) == ["said"] * 3
