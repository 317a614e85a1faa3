"""Synced buffers between the script's thread and a lane's, without servers; in main memory and on
an emulated device.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.devices import on_a_device
from trainer.senders import parameters
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.live_trainers import LiveTrainers
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule


class Leads:
    """The live trainers, as a leader sees them, which both sends and receives with the mean."""

    is_leader = True


@pytest.fixture(params=["in main memory", "on a device"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the buffers are on a device."""
    if request.param == "on a device":
        on_a_device(monkeypatch)
    return bool(request.param == "on a device")


@pytest.fixture
def made() -> tuple[SyncedBuffers, dict[str, Tensor]]:
    """Buffers, of which one has two slices, and their tensors."""
    tensors = {"w": torch.zeros(4), "long": torch.zeros(40), "short": torch.zeros(3)}
    plan = plan_parameters(
        [
            (name, tuple(each.shape), "float32", None if name != "w" else 0)
            for name, each in tensors.items()
        ],
        [Rule("sgd", {"lr": 0.1})],
        trainers=2,
        servers=2,
        min_block_size=20,
    )
    placements = [each for each in plan.placements if each.group is None]
    buffers = SyncedBuffers(placements, tensors, "mean", cast(LiveTrainers, Leads()))
    buffers.start()
    return buffers, tensors


def taken(buffers: SyncedBuffers) -> dict[str, list[float]]:
    """The values of the next message, by slice."""
    return {name: each.values.tolist() for name, each in buffers.take_out().items()}


def received(buffers: SyncedBuffers, **values: float) -> None:
    """The answer to a message."""
    for name, value in values.items():
        for each in buffers._slices.slices_of([name]):
            buffers.destination(each).fill_(value)
    buffers.arrived()


Made = tuple[SyncedBuffers, dict[str, Tensor]]


def test_a_message_has_what_steps_since_the_last_one_have_changed(made: Made) -> None:
    """As it was after the last of them, whatever is written later."""
    buffers, tensors = made
    tensors["short"].fill_(1.0)
    buffers.capture([0])
    tensors["long"][:20].fill_(2.0)
    buffers.capture([0])
    tensors["short"].fill_(7.0)
    buffers.capture([1])  # another lane's

    found = taken(buffers)
    assert sorted(found.values()) == [[1.0] * 3, [2.0] * 20]
    assert taken(buffers) == {}
    buffers.capture([0])
    assert list(taken(buffers).values()) == [[7.0] * 3]


def test_a_message_under_way_keeps_its_values(made: Made) -> None:
    """The next step's leave in other memory, or after it."""
    buffers, tensors = made
    tensors["short"].fill_(1.0)
    buffers.capture([0])
    leaving = buffers.take_out()
    tensors["short"].fill_(2.0)
    buffers.capture([0])

    assert leaving["short"].values.tolist() == [1.0] * 3
    assert list(taken(buffers).values()) == [[2.0] * 3]


def test_values_land_where_the_script_has_not_written(made: Made) -> None:
    """Between steps: what was written stays until the next step.  A received value is no change of
    this trainer.
    """
    buffers, tensors = made
    received(buffers, long=3.0, short=4.0)
    tensors["long"][30] = 9.0
    buffers.land(between_steps=True)
    assert tensors["short"].tolist() == [4.0] * 3
    assert tensors["long"].tolist() == [9.0 if place == 30 else 0.0 for place in range(40)]
    received(buffers, long=5.0)
    buffers.land()
    assert tensors["long"].tolist() == [5.0] * 40
    buffers.capture([0])
    assert taken(buffers) == {}


def test_before_a_forward_nothing_lands_on_a_device(made: Made, device: bool) -> None:
    """The host would have to ask it; in main memory values land."""
    buffers, tensors = made
    received(buffers, short=4.0)
    buffers.land(between_steps=True, waits=False)
    assert tensors["short"].tolist() == [0.0 if device else 4.0] * 3
    buffers.land()
    assert tensors["short"].tolist() == [4.0] * 3


def test_a_devices_values_are_received_in_the_same_memory(
    made: Made, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory takes long to make: two for a slice, as one may be staged, and none later."""
    if not device:
        pytest.skip("in main memory it is new each time")
    buffers, _ = made
    count, pinned = 0, parameters.pinned

    def counted(*given: Any) -> Tensor:
        nonlocal count
        count += 1
        return pinned(*given)

    monkeypatch.setattr(parameters, "pinned", counted)
    for number in range(10):
        received(buffers, long=float(number), short=1.0)
        if number % 3:
            buffers.land()
    assert count == 2 * 3
