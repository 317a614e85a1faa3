"""Compressed gradients: the bytes they take on the wire, and what training makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from pserver.config import ServerConfig
from pserver.control.control_client import ControlClient
from pserver.launcher import status
from pserver.service.server import Server
from pserver.wire_pb2 import StatusRequest
from tests.support.eager_jobs import Servers, batches, train
from tests.support.eager_modes import OUTER_SGD, adam, net, strategy_of
from trainer import fleet


@pytest.mark.parametrize(
    "configs", [{"modes": {"*": "sync"}}, {"send_queue_size": 1}, {"send_queue_size": 4}], ids=str
)
@pytest.mark.parametrize(("scheme", "share"), [("bfloat16", 0.5), ("float16", 0.5), ("int8", 0.27)])
def test_compressed_gradients_take_fewer_bytes_and_train_as_well(
    servers: Servers, scheme: str, share: float, configs: dict[str, Any]
) -> None:
    """Slices on two servers, in sync and async lanes: the bytes shrink as they should, and the loss
    falls as it does without.
    """

    def run(compression: dict[str, str] | None) -> tuple[float, float]:
        model = net()
        fleet.init(
            fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
        )
        fleet.distributed_model(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = fleet.distributed_optimizer(
            plain, strategy_of(**configs), compression=compression
        )
        train(model, optimizer, batches(1) * 30)
        optimizer.flush()
        x, y = batches(1)[0]
        loss, sent = F.cross_entropy(model(x), y).item(), fleet.metrics()["bytes_out"]
        fleet.finish()
        return loss, sent

    (loss, sent), (reference, full) = run({"*": scheme}), run(None)

    # what trainer 0 uploads at the start is not compressed: 112 KB
    assert sent <= share * full + 200_000
    assert loss < 0.5 * 0.7 and abs(loss - reference) < 0.05


def test_compression_works_in_every_mode_in_which_gradients_travel(servers: Servers) -> None:
    """A quarter of the bytes, and the loss falls; a k-step mode may stand beside it."""
    endpoints = servers(2).split(",")
    for configs in (
        {"half_async": True, "max_merge_var_num": 2},
        {"staleness": 2},
        {"dc_asgd": 0.1, "send_queue_size": 1},
        {"staleness": 0},
        {"runtime_split_send_recv": True, "max_merge_var_num": 2, "send_queue_size": 2},
        {"modes": {"0.*": "async", "*": "geo"}, "k_steps": 2, "send_queue_size": 1},
    ):
        model = net()
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints))
        fleet.distributed_model(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.005)
        optimizer = fleet.distributed_optimizer(
            sgd, strategy_of(**configs), compression={"0.weight": "int8", "*": ""}
        )
        x, y = batches(1)[0]
        before, sent = (
            F.cross_entropy(model(x), y).item(),
            fleet.variable_bytes()["0.weight"]["bytes_out"],
        )
        train(model, optimizer, batches(1) * 8)
        optimizer.flush()
        fleet.barrier_worker()
        messages = 4 if "half_async" in configs else 8
        assert (
            0
            < fleet.variable_bytes()["0.weight"]["bytes_out"] - sent
            <= messages * 0.26 * model[0].weight.nbytes
        )
        assert F.cross_entropy(model(x), y).item() < before, configs
        fleet.finish()


def test_compression_refuses_what_it_cannot_do(servers: Servers) -> None:
    """An unknown scheme, a pattern that matches nothing, a mode in which no gradients travel."""
    for compression, words, configs in (
        ({"*": "int4"}, "int4", {}),
        ({"embedding.*": "int8"}, "embedding", {}),
        ({"*": "int8"}, "no gradients travel", {"k_steps": 2}),
        ({"*": "int8"}, "no gradients travel", {"k_steps": 2, "outer_optimizer": OUTER_SGD}),
        (
            {"*": "int8"},
            "no gradients travel",
            {"k_steps": 2, "modes": {"0.*": "async", "*": "geo"}},
        ),
    ):
        fleet.init(
            fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
        )
        model = fleet.distributed_model(net())
        with pytest.raises(ValueError, match=words):
            fleet.distributed_optimizer(
                adam(model), strategy_of(**configs), compression=compression
            )
        fleet.finish()


def test_bytes_on_the_wire_are_counted_per_variable() -> None:
    """As they travel, slices and scales together; trainer and servers agree, and what is sent to a
    server is what it receives.
    """
    with Server(ServerConfig()) as first, Server(ServerConfig()) as second:
        endpoints = [first.endpoint, second.endpoint]
        model = net()
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints))
        fleet.distributed_model(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(
            plain, compression={"0.weight": "int8", "0.bias": "bfloat16", "*": ""}
        )
        before = fleet.variable_bytes()
        train(model, optimizer, batches(3))
        after = fleet.variable_bytes()
        told = [
            ControlClient(endpoint, 5.0).status(StatusRequest(variables=True)).variables
            for endpoint in endpoints
        ]
        console = Console(width=200)
        with console.capture() as shown:
            assert status.show(status.ask_each(endpoints, True), console) == 0
        fleet.finish()

    def gone(name: str, direction: str) -> int:
        return after[name][direction] - before[name][direction]

    weight, bias = model[0].weight, model[0].bias
    blocks = sum(-(-rows * 6 // 1024) for rows in (2000, 2000))
    assert gone("0.weight", "bytes_out") == 3 * (weight.numel() + 4 * blocks)
    assert gone("0.bias", "bytes_out") == 3 * 2 * bias.numel()
    assert gone("2.weight", "bytes_out") == 3 * model[2].weight.nbytes
    assert all(
        gone(name, "bytes_in") == 3 * value.nbytes for name, value in model.named_parameters()
    )
    for name, counts in after.items():
        assert counts["bytes_out"] == sum(server[name].bytes_in for server in told)
        assert counts["bytes_in"] == sum(server[name].bytes_out for server in told)
    assert "0.weight: " in shown.get()
