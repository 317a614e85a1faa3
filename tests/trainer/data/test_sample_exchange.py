"""Promises about samples that change trainers: none is lost, none comes twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore

from pserver.errors import PServerError
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import Peers
from trainer.data import datasets
from trainer.data.batches import Column, Ragged, hashed, numbers_of, shuffled
from trainer.data.datasets import NUMBER, SampleExchange

TRAINERS = 3


def together(each: Callable[[int, SampleExchange], Any]) -> list[Any]:
    """Three trainers as threads; what each gives, or its error."""
    store = HashStore()

    def run(rank: int) -> Any:
        peers = Peers(rank, ("",) * TRAINERS, store, id="one job")
        try:
            return each(rank, SampleExchange(ProcessGroups(peers)))
        except (RuntimeError, PServerError) as error:
            return error

    with ThreadPoolExecutor(TRAINERS) as pool:
        return list(pool.map(run, range(TRAINERS)))


def samples(rank: int) -> dict[str, Column]:
    """Trainer 0 has 50 samples, trainer 1 none, trainer 2 100."""
    numbers = numbers_of(rank, (50, 0, 100)[rank])
    counts = numbers % 4
    return {
        "wide": np.stack([numbers, -numbers], 1).astype(np.float32),
        "bag": Ragged.of(np.repeat(numbers, counts), counts),
        NUMBER: numbers,
    }


def destinations(numbers: Any) -> Any:
    """By a hash."""
    return (hashed(numbers, 7) % np.uint64(TRAINERS)).astype(np.int64)


@pytest.mark.parametrize("most", [7, 1000])
def test_every_sample_arrives_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its hash says, with all its slots, in one round or in many."""
    monkeypatch.setattr(datasets, "ROUND_SAMPLES", most)

    def each(rank: int, swap: SampleExchange) -> dict[str, Column]:
        own = samples(rank)
        return swap.exchange(own, destinations(own[NUMBER]))

    found = together(each)

    arrived = np.concatenate([columns[NUMBER] for columns in found])
    expected = np.concatenate([samples(rank)[NUMBER] for rank in range(TRAINERS)])
    assert np.sort(arrived).tolist() == expected.tolist()
    for rank, columns in enumerate(found):
        numbers, bag = columns[NUMBER], columns["bag"]
        assert len(numbers) and (destinations(numbers) == rank).all()
        assert (columns["wide"] == np.stack([numbers, -numbers], 1).astype(np.float32)).all()
        assert bag.counts.tolist() == (numbers % 4).tolist()
        assert bag.values.tolist() == np.repeat(numbers, numbers % 4).tolist()


@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_a_sample_that_does_not_arrive_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trainers raise, and say how many were expected."""
    whole, threads = SampleExchange._round, threading.active_count()

    def broken(self: SampleExchange, columns: Any, to: Any) -> Any:
        found = whole(self, columns, to)
        if self._rank != 2:
            return found
        places = np.arange(len(found[NUMBER]))
        places = places[1:] if fault == "lost" else np.append(places[1:], places[1])
        return datasets.samples_at(found, places)

    monkeypatch.setattr(SampleExchange, "_round", broken)
    found = together(lambda rank, swap: swap.exchange(samples(rank), samples(rank)[NUMBER] % 3))

    got = "got 149" if fault == "lost" else "got 150, others"
    assert len(found) == TRAINERS
    for error in found:
        assert isinstance(error, RuntimeError)
        assert "expected 150 samples to arrive" in str(error) and got in str(error)
    assert threading.active_count() < threads + TRAINERS  # others of this process may run, too


def test_orders_are_hashes_of_numbers() -> None:
    """An order holds wherever the samples are, and looks random."""
    numbers = numbers_of(3, 10_000)
    order = shuffled(numbers, 1, 2)
    mixed = numbers[np.random.default_rng(0).permutation(len(numbers))]

    assert (numbers[order] == mixed[shuffled(mixed, 1, 2)]).all()
    assert (order != shuffled(numbers, 1, 3)).any()
    shares = np.bincount((hashed(numbers, 5) % np.uint64(8)).astype(np.int64)) / len(numbers)
    assert abs(shares - 1 / 8).max() < 0.015
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
