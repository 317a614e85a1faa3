"""Promises of docs/troubleshooting.md: the messages that it quotes are those of the sources, and
what goes wrong in these tests says one of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver import Server, ServerConfig
from pserver.control.control_client import ControlClient
from pserver.errors import NonFinite
from pserver.security import tokens
from pserver.security.access import Access
from pserver.security.tokens import Role, Secret
from tests.support.one_parameter import Trainer
from tests.support.tiny_launch import Run
from tests.support.troubles import pattern, quotes, quoting, said
from trainer import DistributedEmbedding, fleet
from trainer.environment.environment import CloudRoleMaker
from trainer.metrics import auc
from transpiler import capture

SECONDS = 20.0


def test_every_message_of_the_page_is_one_of_the_sources() -> None:
    """A message that is reworded, or gone, is found here; the page has the likeliest of them."""
    strings = said()
    gone = [each for each in quotes() if not any(map(pattern(each).search, strings))]

    assert gone == [] and len(quotes()) >= 25


# ---- what goes wrong, and which quote tells of it ----


def job(model: nn.Module, endpoints: str, **keys: Any) -> torch.optim.Optimizer:
    """A script up to its first step, as the one trainer of some servers."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    strategy.a_sync_configs = keys
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def captured(step: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    model = nn.Linear(4, 2)
    capture(model, step, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(3, 4),))


def no_server(folder: Path) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        job(nn.Linear(2, 1), f"127.0.0.1:{taken.getsockname()[1]}")


def port_in_use(folder: Path) -> None:
    with Server(ServerConfig()) as first, Server(ServerConfig(endpoint=first.endpoint)):
        pass


def variable_missing(folder: Path) -> None:
    CloudRoleMaker(
        {"TRAINING_ROLE": "TRAINER", "PSERVER_ENDPOINTS": "127.0.0.1:1", "TRAINERS": "2"}
    )


def beyond_this_host(folder: Path) -> None:
    ServerConfig(endpoint="10.0.0.1:6174")


def another_program(folder: Path) -> None:
    with Server(ServerConfig()) as server:
        Trainer(server.endpoint, 0, trainers=2)
        Trainer(server.endpoint, 1, trainers=3)


def no_token(folder: Path) -> None:
    tokens.write(folder / "token", Secret.make())
    with Server(ServerConfig(token_file=str(folder / "token"))) as server:
        ControlClient(server.endpoint, SECONDS).reset()


def trainers_key(folder: Path) -> None:
    secret = Secret.make()
    tokens.write(folder / "token", secret)
    with Server(ServerConfig(token_file=str(folder / "token"))) as server:
        access = Access(secret.of(Role.TRAINER))
        ControlClient(server.endpoint, SECONDS, access=access).drain()


def too_large(folder: Path) -> None:
    with Server(ServerConfig(max_memory=1e-6)) as server:
        job(nn.Linear(1000, 10), server.endpoint)


def not_finite(folder: Path) -> None:
    with Server(ServerConfig()) as server:
        model = nn.Linear(2, 1)
        optimizer = job(model, server.endpoint, nonfinite="stop")
        model(torch.full((1, 2), float("nan"))).sum().backward()
        try:
            optimizer.step()
        finally:
            with suppress(NonFinite):  # again
                fleet.finish()


def optimizer_of_another_model(folder: Path) -> None:
    fleet.init()
    fleet.distributed_model(nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))


def begun_twice(folder: Path) -> None:
    fleet.init()
    fleet.init()


def two_modes(folder: Path) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"staleness": 3, "k_steps": 10}
    fleet.init(strategy=strategy)


def weight_of_a_table(folder: Path) -> None:
    DistributedEmbedding(4).weight  # noqa: B018  # it raises


def branch_on_a_size(folder: Path) -> None:
    captured(lambda model, x: model(x).sum() if x.shape[0] > 2 else model(x).mean())


def branch_on_a_value(folder: Path) -> None:
    captured(lambda model, x: model(x).sum() * x.max().item())


def sparse_and_adam(folder: Path) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.Adam(model.parameters())
    capture(model, lambda model, ids: model(ids).sum(), optimizer, (torch.arange(3),))


def logits_as_predictions(folder: Path) -> None:
    auc([2.5, -1.0], [1, 0])


def wrong_line(folder: Path) -> None:
    (folder / "part-0").write_text("1 x\n")
    dataset = fleet.QueueDataset()
    dataset.init(use_var=[fleet.Slot("id")])
    dataset.set_filelist([str(folder / "part-0")])
    list(dataset)


def alone(**options: Any) -> None:
    """A script in this process, up to its first step."""
    fleet.init()
    model = fleet.distributed_model(nn.Linear(2, 1, **options))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def nothing_saved(folder: Path) -> None:
    alone()
    fleet.load(str(folder))


def changed_bit(folder: Path) -> None:
    alone()
    fleet.save(str(folder))
    (file,) = folder.glob("tensors-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fleet.load(str(folder))


def another_model(folder: Path) -> None:
    alone()
    fleet.save(str(folder))
    fleet.finish()
    alone(bias=False)
    fleet.load(str(folder))


@pytest.mark.parametrize(
    ("wrong", "quote"),
    [
        (no_server, "...: no server there within"),
        (port_in_use, "cannot listen on"),
        (variable_missing, "... is not set: a process with TRAINING_ROLE="),
        (beyond_this_host, "...: ... is beyond this host: expected keys"),
        (another_program, "trainer ... runs another program than"),
        (no_token, "this server asks for its job's key"),
        (trainers_key, "... needs the ...'s key"),
        (too_large, "the program's slices and optimizer states take"),
        (not_finite, "step ... of trainer ... has a NaN or an infinity in"),
        (optimizer_of_another_model, "parameter ... of group ..., of shape ..., is in no"),
        (begun_twice, "fleet.init() was called before"),
        (two_modes, "a_sync_configs: ... has no effect with"),
        (weight_of_a_table, "... has no 'weight'"),
        (branch_on_a_size, "...: cannot capture this step: it takes another path"),
        (branch_on_a_value, "control flow or a size depends on the values in a tensor"),
        (sparse_and_adam, "capture: ... has sparse=True"),
        (logits_as_predictions, "preds: expected probabilities from 0 to 1"),
        (wrong_line, "slot ...: expected a count and"),
        (nothing_saved, "no complete checkpoint in"),
        (changed_bit, "...: its bytes are not those that were saved"),
        (another_model, "...: expected the model's variables"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_what_goes_wrong_is_on_the_page(
    wrong: Callable[[Path], None], quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's text has a message of the page in it, the one that is meant."""
    monkeypatch.setenv("PSERVER_START_TIMEOUT", "0.5")
    with pytest.raises(Exception) as raised:  # noqa: PT011, B017  # any class: its text is meant
        wrong(tmp_path)

    assert [each for each in quoting(str(raised.value)) if each.startswith(quote)], raised.value


@pytest.mark.processes
def test_a_launch_that_fails_says_a_message_of_the_page(tmp_path: Path) -> None:
    """The cause, with its status and its last lines."""
    run = Run(tmp_path, "raise SystemExit(7)", trainers="1")
    status, _, errors = run.end()

    assert status == 7 and "... failed with status ..." in quoting(errors)
