"""Every setting of a strategy, in every place where a script may give it: it acts, or it is refused
with a true reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from tests.support.settings import assign, other
from trainer import fleet
from trainer.collective.data_parallel import DataParallel
from trainer.job import collective_job
from trainer.job.current import present
from transpiler import DistributedStrategy
from transpiler.strategy.fields import every_setting

EVERY = dict(every_setting())
HYBRID = {"mp_degree": 1, "order": ["mp", "sep", "sharding", "pp", "dp"]}  # another one than unset

# what else a setting needs to act at all
BESIDE: dict[str, dict[str, Any]] = {
    "a_sync_configs.outer_optimizer": {"a_sync_configs": {"k_steps": 3}},
    "pipeline_configs.micro_batch_size": {"hybrid_configs": {"pp_degree": 2}},
    "pipeline_configs.accumulate_steps": {"hybrid_configs": {"pp_degree": 2}},
}
# The only reasons there are, by what a reason says.
REASONS = (
    r"acts only in (a job with .+|a job without .+), and this is (a job|a process) .+; leave it "
    r"at its default",
    r"no job reads it in this version; leave it at its default(, and .+)?",
    r"fleet\.distributed_model moves embeddings, by the strategy of fleet\.init.*",
)


def strategy_with(*names: str, beside: bool = True) -> DistributedStrategy:
    """These settings are not as by default, and with ``beside`` those that they need."""
    strategy = DistributedStrategy()
    for name in names:
        needed = BESIDE.get(name, {}) if beside else {}
        owner, _, key = name.rpartition(".")
        for field, values in needed.items():
            setattr(strategy, field, values)
        if needed.get(owner):
            setattr(strategy, owner, {**needed[owner], key: other(name, EVERY[name])})
        else:
            assign(strategy, name, other(name, EVERY[name]))
    return strategy


def script(given_to: str, strategy: DistributedStrategy | None, **init: Any) -> Any:
    """A script that gives its strategy to one of two calls; its optimizer."""
    fleet.init(strategy=strategy if given_to == "init" else None, **init)
    model = fleet.distributed_model(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fleet.distributed_optimizer(
        optimizer, strategy=strategy if given_to == "optimizer" else None
    )


def of_servers(given_to: str, strategy: DistributedStrategy | None, servers: Servers) -> Any:
    """What a job with servers does by its strategy."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    optimizer = script(given_to, strategy, role_maker=role)
    communicator = optimizer.communicator
    return (
        communicator.plan.lanes,
        communicator._options,
        [client._start_timeout for client in communicator.clients],
        optimizer._overlap,
        communicator.plan.averaged,
    )


def of_trainers(given_to: str, strategy: DistributedStrategy | None, servers: Servers) -> Any:
    """What a job without servers does by its strategy."""
    made: list[Any] = []

    class Recorded(DataParallel):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append((self._sizes, self.find_unused_parameters))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_job, "DataParallel", Recorded)
        script(given_to, strategy, is_collective=True)
    mesh = getattr(present(), "mesh", None)
    return made, None if mesh is None else mesh.mesh_dim_names


Place = tuple[str, Callable[[str, DistributedStrategy | None, Servers], Any]]
PLACES: dict[str, Place] = {
    "fleet.init with servers": ("init", of_servers),
    "distributed_optimizer with servers": ("optimizer", of_servers),
    "fleet.init without servers": ("init", of_trainers),
    "distributed_optimizer without servers": ("optimizer", of_trainers),
}


def acts(place: str, name: str) -> bool:
    """Whether the setting's row says that it acts there."""
    setting, without = EVERY[name], place.endswith("without servers")
    if name == "a_sync":  # trainers without servers step together, whatever it says
        return not without
    if name == "a_sync_configs.embeddings":
        return place == "fleet.init with servers"
    if "hybrid" in setting.jobs:
        return place == "fleet.init without servers"
    return bool("collective" in setting.jobs if without else setting.modes)


def outcome(place: str, strategy: DistributedStrategy | None, servers: Servers) -> tuple[Any, str]:
    """What the job does, and what it says where it refuses."""
    given_to, job = PLACES[place]
    try:
        return job(given_to, strategy, servers), ""
    except ValueError as error:
        return None, str(error)
    finally:
        fleet.finish()


@pytest.mark.parametrize("place", PLACES)
def test_every_setting_acts_or_is_refused_with_a_true_reason(place: str, servers: Servers) -> None:
    """A refusal names the setting, says where it acts (or that nothing reads it), and what to
    write; a setting that is accepted changes what the job does.
    """
    usual, _ = outcome(place, DistributedStrategy(), servers)
    for name in EVERY:
        done, said = outcome(place, strategy_with(name), servers)
        if not acts(place, name):
            if name == "a_sync":  # trainers without servers step together, whatever it says
                assert (done, said) == (usual, "")
                continue
            sentences = re.split(r"; (?=strategy\.|a_sync_configs)", said)
            own = [each for each in sentences if name.rpartition(".")[2] in each]
            assert own and any(re.search(f"{reason}$", own[0]) for reason in REASONS), (name, said)
        elif said:
            # it was read: these ask for more than one trainer, or for a module of that name
            assert re.search("product is the 1 rank|pp_degree|match", said), (name, said)
        else:
            assert done != usual, name


def test_all_offenders_are_named_in_one_error() -> None:
    """Switches, keys of dictionaries, and keys that another one makes meaningless."""
    strategy = DistributedStrategy()
    strategy.amp, strategy.lamb, strategy.fuse_grad_size_in_MB = True, True, 8
    strategy.hybrid_configs = {"mp_degree": 2}
    strategy.a_sync, strategy.a_sync_configs = False, {"staleness": 3, "dc_asgd": 0.5}
    with pytest.raises(ValueError) as raised:
        fleet.init(strategy=strategy)

    said = str(raised.value)
    for name in ("amp", "lamb", "fuse_grad_size_in_MB", "hybrid_configs.mp_degree"):
        assert f"strategy.{name}: " in said
    assert "staleness=3 has no effect with a_sync=False" in said
    assert "dc_asgd=0.5 has no effect with a_sync=False" in said
    assert "torch.autocast" in said and "fleet.init(is_collective=True" in said


def test_embeddings_of_the_optimizers_strategy_come_too_late(servers: Servers) -> None:
    """They are refused; the same ones that fleet.init got are not."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"embeddings": ["0"]}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    for early, late in ((strategy, strategy), (None, strategy)):
        fleet.init(role, strategy=early)
        model = fleet.distributed_model(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if early is None:
            with pytest.raises(ValueError, match="give the strategy to fleet.init"):
                fleet.distributed_optimizer(optimizer, strategy=late)
        else:
            assert fleet.distributed_optimizer(optimizer, strategy=late).communicator is not None
            assert list(fleet.table_status()) == ["0"]
        fleet.finish()


def test_a_strategy_reads_what_torch_does() -> None:
    """The defaults of switches about torch are torch's own."""
    strategy = DistributedStrategy()

    assert strategy.cudnn_exhaustive_search is torch.backends.cudnn.benchmark
    strategy.cudnn_exhaustive_search = True
    with pytest.raises(ValueError, match="and set torch.backends.cudnn.benchmark in the script"):
        fleet.init(strategy=strategy)
