"""What a script writes into parameters between steps takes effect, in every mode: with one trainer
training equals plain torch's to the bit.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import eager_jobs
from tests.support.eager_jobs import Servers, batches, train
from tests.support.eager_modes import OUTER_SGD, adam, assert_equal, joined, net
from tests.support.script_writes import WRITES
from trainer import fleet
from trainer.senders import writes

MODES: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "async": {},
    "split by its thread": {"runtime_split_send_recv": True},
    "one slot": {"send_queue_size": 1},
    "fetched by a thread": {"send_queue_size": 1, "independent_recv_thread": True},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "bounded staleness": {"staleness": 2},
    "delay-compensated": {"dc_asgd": 0.5, "send_queue_size": 1},
    "geo": {"k_steps": 3},
    "diloco": {"k_steps": 2, "outer_optimizer": OUTER_SGD},
    "sync and async": {"modes": {"0.*": "async", "*": "sync"}, "send_queue_size": 1},
}
# whose files are the servers', not the trainer's own
OWN_STEPS = ("geo", "diloco")
QUEUES = ("async", "split by its thread", "fetched by a thread")


def trained(optimizer: Any, mine: nn.Module, mode: str, data: Any) -> None:
    """Steps, each of which has landed; a queue's have to be waited for."""
    for batch in data:
        train(mine, optimizer, [batch])
        if mode in QUEUES:
            optimizer.flush()


def swapped(model: nn.Module, other: nn.Module) -> None:
    """The two models' values change places."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            before = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(before)


@pytest.mark.parametrize("mode", MODES)
def test_an_average_swapped_in_for_an_evaluation_stands_and_swapped_back_sends_nothing(
    servers: Servers, mode: str, tmp_path: Path
) -> None:
    """Files and ``state_dict()`` have the average; then training goes on as if nothing had been."""
    mine, reference, average = net(), net(), net()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.fill_(0.125)
    optimizer, plain = joined(servers(2), mine, adam(mine), **MODES[mode]), adam(reference)
    trained(optimizer, mine, mode, batches(5))
    train(reference, plain, batches(5))

    swapped(mine, average)
    optimizer.communicator.refresh()
    fleet.export(str(tmp_path / "average.pt"))
    state = {name: value.clone() for name, value in mine.state_dict().items()}
    exported = torch.load(tmp_path / "average.pt")
    assert all(torch.equal(value, torch.full_like(value, 0.125)) for value in state.values())
    if mode not in OWN_STEPS:
        assert all(torch.equal(value, state[name]) for name, value in exported.items())
    swapped(mine, average)
    assert_equal(mine, reference)
    before = assigned(optimizer)
    trained(optimizer, mine, mode, batches(5, seed=2))
    train(reference, plain, batches(5, seed=2))

    if mode in OWN_STEPS:  # the average went to the servers and back as changes, which are rounded
        for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    else:
        assert_equal(mine, reference)
    assert before == assigned(optimizer) == 0


def assigned(optimizer: Any) -> int:
    """Payload bytes of assignments that have left, by the names that only these have."""
    names = optimizer.communicator.variable_bytes()
    return sum(
        count["bytes_out"]
        for name, count in names.items()
        if name.endswith(("@elements", "@values"))
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in OWN_STEPS])
def test_what_was_written_is_saved_and_loaded(servers: Servers, mode: str, tmp_path: Path) -> None:
    """Between a write and the next step ``fleet.save`` writes what the script wrote."""
    mine = net()
    optimizer = joined(servers(1), mine, adam(mine), **MODES[mode])
    trained(optimizer, mine, mode, batches(5))
    WRITES["data_multiply"](mine, 1)
    written = {name: value.clone() for name, value in mine.state_dict().items()}
    fleet.save(str(tmp_path / "saved"))
    trained(optimizer, mine, mode, batches(3))
    fleet.load(str(tmp_path / "saved"))

    assert all(torch.equal(value, written[name]) for name, value in mine.state_dict().items())


@pytest.mark.parametrize("mode", ["sync", "async", "one slot", "half-async"])
def test_a_step_that_overflows_loses_no_write(servers: Servers, mode: str) -> None:
    """GradScaler skips the step, and the servers have what was written before it."""
    mine, reference = net(), net()
    optimizer, plain = joined(servers(2), mine, adam(mine), **MODES[mode]), adam(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, batch in enumerate(batches(8)):
        bad = number == 4
        if bad:
            WRITES["clamp"](mine, 1)
            WRITES["clamp"](reference, 1)
        else:
            train(reference, plain, [batch])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(mine(batch[0]), batch[1])
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.flush()

    assert_equal(mine, reference)


def test_gradients_that_leave_early_do_not_outrun_what_was_written(servers: Servers) -> None:
    """With ``overlap`` a write between backward and ``step()`` counts, too, and one that was undone
    does not.
    """
    mine, reference = net(), net()
    configs = {"modes": {"*": "sync"}, "overlap": True}
    optimizer, plain = joined(servers(2), mine, adam(mine), **configs), adam(reference)
    for number, (x, y) in enumerate(batches(8)):
        for model, each in ((mine, optimizer), (reference, plain)):
            each.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if number == 5:
                WRITES["clamp"](model, 1)
            if number == 6:
                other = copy.deepcopy(model)
                swapped(model, other)
                swapped(model, other)
            each.step()

    assert_equal(mine, reference)


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is compared in every tenth step, and not in the first ones."""
    monkeypatch.setattr(writes, "EARLY_STEPS", 0)
    monkeypatch.setattr(writes, "EVERY", 10)
    yield


@pytest.mark.parametrize("mode", ["sync", "async", "one slot", "half-async"])
def test_a_write_that_is_noticed_late_takes_effect_and_is_said(
    servers: Servers, rarely: None, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """One element through ``.data`` that is not among the sampled ones: noticed in step 10, with a
    warning of the steps before; from then on everything is compared.
    """
    mine, reference = net(), net()
    optimizer, plain = joined(servers(1), mine, adam(mine), **MODES[mode]), adam(reference)
    trained(optimizer, mine, mode, batches(9))
    train(reference, plain, batches(9))
    unsampled = first_unsampled(mine)
    with caplog.at_level(logging.WARNING):
        for number in (10, 11):
            for model in (mine, reference):
                next(model.parameters()).data.view(-1)[unsampled] = float(number)
            train(mine, optimizer, batches(1, seed=number))
            train(reference, plain, batches(1, seed=number))
            optimizer.flush()

    assert_equal(mine, reference)
    said = [record.getMessage() for record in caplog.records if "step 10" in record.getMessage()]
    assert len(said) == 1
    assert "0.weight" in said[0] and "steps 1 to 9 may be lost" in said[0]


def first_unsampled(model: nn.Module) -> int:
    """An element of the first parameter that is not read at every step."""
    from trainer.senders.writes import _positions

    parameter = next(model.parameters())
    sampled = set(_positions(parameter.numel(), 0).tolist())
    return next(n for n in range(parameter.numel()) if n not in sampled)


def test_a_parameter_keeps_its_shape(servers: Servers) -> None:
    """Other memory may take its place, another shape may not: said with the name."""
    mine = net()
    optimizer = eager_jobs.joined(servers(1), mine, adam(mine))
    train(mine, optimizer, batches(1))
    mine[2].bias.data = torch.zeros(3)
    mine[2].bias.grad = None

    with pytest.raises(ValueError, match=r"'2.bias': expected torch.float32 \[2\].*\[3\]"):
        optimizer.step()
