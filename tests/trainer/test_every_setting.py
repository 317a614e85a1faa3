"""Every setting of a strategy, in every place where a script may give it: it acts, or it is refused
with a true reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pserver.storage.remote import options_of
from tests.support.eager_jobs import Servers
from tests.support.settings import assign, other
from trainer import fleet
from trainer.collective.data_parallel import DataParallel
from trainer.compat.flags import WORKSPACE
from trainer.hybrid import parallel
from trainer.job import collective
from trainer.job.collective import CollectiveJob, agreed
from trainer.job.job import present
from transpiler import DistributedStrategy
from transpiler.plan.modes import COLLECTIVE
from transpiler.precision.mixed_forward import mixed_forward
from transpiler.strategy.strategy import every_setting

EVERY = dict(every_setting())
HYBRID = {"mp_degree": 1, "order": ["mp", "sep", "sharding", "pp", "dp"]}  # another one than unset

# what else a setting needs to act at all
BESIDE: dict[str, dict[str, Any]] = {
    "sync_batch_norm": {"a_sync": False},
    "elastic": {"a_sync": False, "a_sync_configs": {"lost_trainer": "stop"}},
    "localsgd_configs.k_steps": {"localsgd": True},
    "localsgd_configs.begin_step": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "adaptive_localsgd_configs.init_k_steps": {"adaptive_localsgd": True},
    "adaptive_localsgd_configs.begin_step": {"adaptive_localsgd": True},
    "a_sync_configs.outer_optimizer": {"a_sync_configs": {"k_steps": 3}},
    "a_sync_configs.row_invalidation": {"a_sync_configs": {"k_steps": 3}},
    "a_sync_configs.outlier_factor": {"a_sync_configs": {"outlier_push": "stop"}},
    "a_sync_configs.lost_trainer": {"a_sync": False},
    "pipeline": {"hybrid_configs": {"pp_degree": 2}},
    "tensor_parallel": {"hybrid_configs": {"mp_degree": 2}},
    **{
        f"pipeline_configs.{key}": {"hybrid_configs": {"pp_degree": 2}}
        for key in ("micro_batch_size", "accumulate_steps", "schedule_mode")
    },
    **{
        f"tensor_parallel_configs.{key}": {
            "tensor_parallel": True,
            "tensor_parallel_configs": {"tensor_parallel_degree": 2},
        }
        for key in ("tensor_parallel_degree", "tensor_init_seed")
    },
    **{
        name: {"sharding": True}
        for name in EVERY
        if name.startswith("sharding_configs.") and name != "sharding_configs.optimize_cast"
    },
    "sharding_configs.pp_degree": {"sharding": True, "pipeline": True},
    "sharding_configs.sharding_segment_strategy": {
        "sharding": True,
        "sharding_configs": {"segment_anchors": ["0"]},
    },
    "sharding_configs.segment_anchors": {
        "sharding": True,
        "sharding_configs": {"sharding_segment_strategy": "segment_anchors"},
    },
    "recompute": {"recompute_configs": {"checkpoints": ["1"]}},
    "recompute_configs.checkpoints": {"recompute": True},
    "recompute_configs.enable_offload": {
        "recompute": True,
        "recompute_configs": {"checkpoints": ["1"]},
    },
    "recompute_configs.checkpoint_shape": {
        "recompute": True,
        "recompute_configs": {"checkpoints": ["1"], "enable_offload": True},
    },
    "gradient_merge": {"gradient_merge_configs": {"k_steps": 3}},
    "gradient_merge_configs.k_steps": {"gradient_merge": True},
    "gradient_merge_configs.avg": {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 3},
    },
    "gradient_scale_configs.scale_strategy": {"a_sync": False},  # which "collective" does not read
    "fuse_grad_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}},
    **dict.fromkeys(
        (
            "dgc_configs.rampup_begin_step",
            "dgc_configs.rampup_step",
            "dgc_configs.sparsity",
        ),
        {"dgc": True},
    ),
    "hierarchical_allreduce_inter_nranks": {"use_hierarchical_allreduce": True},
    **{name: {"lars": True} for name in EVERY if name.startswith("lars_configs.")},
    **{name: {"lamb": True} for name in EVERY if name.startswith("lamb_configs.")},
    **{name: {"amp": True} for name in EVERY if name.startswith("amp_configs.")},
    "amp_configs.use_fp16_guard": {"amp": True, "amp_configs": {"use_pure_fp16": True}},
}
HOST = "ftp://host/folder"
BESIDE |= {
    "fs_client_param.uri": {"fs_client_param": {"user": "ann"}},
    "fs_client_param.user": {"fs_client_param": {"uri": HOST}},
    "fs_client_param.passwd": {"fs_client_param": {"uri": HOST}},
    "fs_client_param.hadoop_bin": {"fs_client_param": {"uri": HOST}},
}
DUMP = "memory://dumps"
BESIDE |= {
    "trainer_desc_configs.dump_fields_path": {"trainer_desc_configs": {"dump_fields": ["0"]}},
    "trainer_desc_configs.dump_fields": {"trainer_desc_configs": {"dump_fields_path": DUMP}},
    "trainer_desc_configs.dump_param": {"trainer_desc_configs": {"dump_fields_path": DUMP}},
    "trainer_desc_configs.stat_var_names": {"trainer_desc_configs": {"dump_fields_path": DUMP}},
}
# What an error says of a setting that was read: it asks for more than one trainer, for a GPU, for a
# module of that name, or for a file beside the script.
READ = (
    r"product is the 1 rank|pp_degree|match|at most the number of ranks|replicas only|a model on a "
    r"GPU|a module below the model|hadoop_bin acts with|dump_param: no|"
    r"the choice for this script in"
)
# with servers, what is about gradients that trainers average among themselves
AVERAGED = {"a_sync_configs": {"modes": {"0.*": "sync", "*": "collective"}}}
# The only reasons there are, by what a reason says.
REASONS = (
    r"acts only in (a job|a program) with.+, and this is (a job|a process) .+; leave it "
    r"at its default(, and .+)?",
    r"no job reads it in this version(: .+)?; leave it at its default(, and .+)?",
    r"fleet\.(distributed_model|shard) reads it, from the strategy as it was given to fleet.*",
    r"has no effect with(out)? \w+=(True|False|'off').*",
)


def averaged(place: str, name: str) -> bool:
    """Whether the setting needs a job with servers in which trainers average gradients."""
    return place.endswith("with servers") and EVERY[name].modes == (COLLECTIVE.name,)


def strategy_with(
    *names: str, beside: bool = True, more: dict[str, Any] | None = None
) -> DistributedStrategy:
    """These settings are not as by default, and with ``beside`` those that they need.

    Args:
        more: further ones.
    """
    strategy = DistributedStrategy()
    for field, values in (more or {}).items():
        setattr(strategy, field, values)
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


def without(name: str) -> DistributedStrategy:
    """What this setting needs, without it."""
    strategy = DistributedStrategy()
    for field, values in BESIDE.get(name, {}).items():
        setattr(strategy, field, values)
    return strategy


def script(given_to: str, strategy: DistributedStrategy | None, **init: Any) -> Any:
    """A script that gives its strategy to one of two calls; its optimizer."""
    fleet.init(strategy=strategy if given_to == "init" else None, **init)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 2), nn.BatchNorm1d(2)]
    model = fleet.distributed_model(nn.Sequential(*layers))
    adam = strategy is not None and (strategy.lamb or strategy.adam_d2sum)
    optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.1)
        if adam
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    return fleet.distributed_optimizer(
        optimizer, strategy=strategy if given_to == "optimizer" else None
    )


def recomputing() -> list[Any]:
    """How the modules of the job compute again."""
    modules = (module for model in present().models for module in model.modules())
    return [vars(how) for each in modules if (how := each.__dict__.get("_recomputed"))]


def of_the_whole_job() -> Any:
    """What torch goes by in the present job, and what data the job gets."""
    environment = os.environ.get(WORKSPACE)
    flags = torch.backends.cudnn.benchmark, environment, torch.get_num_threads()
    dump = present().optimizer.dump
    dumped = None if dump is None else (dump._settings, len(dump._hooks))
    fused = present().optimizer.param_groups[0].get("fused")
    things = flags, fused, present().splits_data, options_of(f"{HOST}/job"), dumped
    return *things, recomputing()


def of_steps(optimizer: Any) -> Any:
    """What its steps do besides an update: merge, compress, average."""
    merge, dgc, local = optimizer._merge, optimizer.dgc, getattr(optimizer, "local_sgd", None)
    return (
        merge and (merge._k_steps, merge._avg, merge._fused),
        dgc and repr(dgc.ramp),
        local and repr(local._schedule),
        str(optimizer.inner),
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
        optimizer._overlap is not None,
        of_steps(optimizer),
        communicator.plan.averaged,
        of_the_whole_job(),
        classes(),
        communicator.plan.groups,
        communicator.dense_allreduce and communicator.dense_allreduce.exchange,
        zeros(optimizer),
        precision(),
        leased(),
    )


def leased() -> bool:
    """Whether servers deal out the samples."""
    job = present()
    return job.samples.leases(job.communicator, job.strategy, None) is not None


def classes() -> list[str]:
    """Of the registered model's layers."""
    return [type(layer).__name__ for layer in present().models[0].children()]


def zeros(optimizer: Any) -> int:
    """How many elements of its parameters are 0."""
    return sum(int((value == 0).sum()) for value in optimizer.trained().values())


def precision() -> Any:
    """Of the registered model's forward."""
    amp = mixed_forward(present().models[0])
    return None if amp is None else amp.precision


def of_trainers(given_to: str, strategy: DistributedStrategy | None, servers: Servers) -> Any:
    """What a job without servers does by its strategy."""
    made: list[Any] = []

    class Recorded(DataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "DataParallel", Recorded)
        patch.setattr(CollectiveJob, "_agree_on", lambda _, given: made.append(agreed(given)))
        optimizer = script(given_to, strategy, is_collective=True)
    divided = parallel._made.get(present().models[0])
    return (
        made,
        classes(),
        divided and (present().mesh.mesh_dim_names, divided.sharding),
        of_the_whole_job(),
        of_steps(optimizer),
        zeros(optimizer),
        precision(),
    )


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
    if setting.early and place.startswith("distributed_optimizer"):
        return False
    if "hybrid" in setting.jobs and "collective" not in setting.jobs:
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
    plain, _ = outcome(place, DistributedStrategy(), servers)
    among, _ = outcome(place, strategy_with(more=AVERAGED), servers)
    for name in EVERY:
        usual, more = (among, AVERAGED) if averaged(place, name) else (plain, {})
        done, said = outcome(place, strategy_with(name, more=more), servers)
        if not acts(place, name):
            if EVERY[name].idle_jobs:  # which the page says, too
                assert (done, said) == (usual, "")
                continue
            sentences = re.split(r"; (?=strategy\.|a_sync_configs)", said)
            own = [each for each in sentences if name.rpartition(".")[2] in each]
            assert own and any(re.search(f"{reason}$", own[0]) for reason in REASONS), (name, said)
        elif said:
            assert re.search(READ, said), (name, said)
        else:
            bare = outcome(place, without(name), servers)[0] if name in BESIDE else usual
            assert done != bare, name
