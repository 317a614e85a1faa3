"""What every update mode of the eager path computes, against real servers in this process."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.eager_jobs import Servers, batches, train
from tests.support.eager_modes import OUTER_SGD, assert_equal, joined, net
from trainer import fleet
from trainer.senders.parameters import ParameterSlices


@pytest.mark.observes("a_sync_configs.runtime_split_send_recv")
@pytest.mark.parametrize("configs", [{}, {"half_async": True}], ids=str)
def test_runtime_split_send_recv_cuts_gradients_where_they_are_sent(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any]
) -> None:
    """On the lane's sending thread instead of in ``step()``; what is trained is the same to the
    bit.
    """
    cut, where = ParameterSlices.cut, []

    def seen(self: ParameterSlices, tensors: Any) -> Any:
        if set(tensors) - set(slices := cut(self, tensors)):  # a variable of several slices
            where.append(threading.current_thread().name)
        return slices

    monkeypatch.setattr(ParameterSlices, "cut", seen)
    trained = {}
    for late in (False, True):
        trained[late] = net()
        sgd = torch.optim.SGD(trained[late].parameters(), lr=0.1)
        optimizer = joined(
            servers(2),
            trained[late],
            sgd,
            runtime_split_send_recv=late,
            max_merge_var_num=2,
            **configs,
        )
        for batch in batches(6):
            train(trained[late], optimizer, [batch])
            if not configs:
                optimizer.flush()  # so that no step sees older parameters than in the other run
        fleet.finish()
        assert set(where) == {"lane _send_queued" if late else threading.main_thread().name}
        where.clear()

    assert_equal(trained[True], trained[False])


def test_async_with_a_queue_applies_every_step(servers: Servers) -> None:
    """With more slots the trainer runs ahead; after the last step all of them have been applied."""
    mine = net()
    optimizer = joined(servers(2), mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    before = copy.deepcopy(mine.state_dict())
    train(mine, optimizer, batches(20))
    optimizer.flush()

    assert optimizer.communicator.metrics()["steps_merged"] == 20
    assert any(not torch.equal(before[name], value) for name, value in mine.state_dict().items())


@pytest.mark.observes("a_sync_configs.half_async")
def test_half_async_averages_its_own_steps(servers: Servers) -> None:
    """``max_merge_var_num`` steps' gradients at the same parameters become one step with their
    mean.
    """
    mine, reference = net(), net()
    optimizer = joined(
        servers(2),
        mine,
        torch.optim.SGD(mine.parameters(), lr=0.1),
        half_async=True,
        max_merge_var_num=4,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    train(mine, optimizer, batches(8))
    fleet.finish()
    for first in (0, 4):
        plain.zero_grad()
        for x, y in batches(8)[first : first + 4]:
            F.cross_entropy(reference(x), y).backward()
        for parameter in reference.parameters():
            parameter.grad.mul_(0.25)
        plain.step()

    for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-7)


@pytest.mark.parametrize(
    ("configs", "copies"),
    [
        ({"soft_wait_ms": 30_000}, 2),  # as if the servers had answered
        ({"soft_wait_ms": 30_000, "runtime_split_send_recv": True}, 2),
        ({"half_async": True, "max_merge_var_num": 3}, 1),
        ({"staleness": 2}, 0),
        ({"modes": {"*": "sync"}}, 0),
        ({"k_steps": 2, "send_queue_size": 1}, 1),
        ({"k_steps": 2, "outer_optimizer": OUTER_SGD}, 0),
    ],
    ids=str,
)
def test_a_lane_holds_one_copy_of_its_parameters_where_servers_answer(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any], copies: int
) -> None:
    """What comes back lands where its gradient left, and the next step's leaves from there; none
    where the script waits.  A queue holds one more, of what has landed last.
    """
    monkeypatch.setattr("trainer.senders.async_lane.SMALL_BYTES", 0)
    blank, made = ParameterSlices.blank, list[Callable[[], torch.Tensor | None]]()

    def counted(self: ParameterSlices, name: str) -> torch.Tensor:
        buffer = blank(self, name)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(ParameterSlices, "blank", counted)
    mine = net()
    optimizer = joined(servers(2), mine, torch.optim.SGD(mine.parameters(), lr=0.1), **configs)
    for batch in batches(12):
        train(mine, optimizer, [batch])
        if "k_steps" in configs:
            optimizer.communicator.lanes[0].drain()
    optimizer.flush()

    held = [tensor for each in made if (tensor := each()) is not None]
    assert sum(tensor.nbytes for tensor in held) == copies * sum(
        parameter.nbytes for parameter in mine.parameters()
    )
