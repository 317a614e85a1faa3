"""Groups of parameters that say what is clipped, in fleet: they act, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, assert_same, batches, joined, net, train
from trainer import fleet, group_sharded_parallel, init_parallel_env
from trainer.collective.world import leave_parallel_env
from transpiler import ClipGradByGlobalNorm, L2Decay, ParamAttr, parameter_groups

CLIP = ClipGradByGlobalNorm(0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Biases learn twice as fast, do not decay, and are not clipped."""
    attr = ParamAttr("*bias", learning_rate=2.0, regularizer=L2Decay(0.0), need_clip=False)
    groups = parameter_groups(model, [attr], learning_rate=0.1)
    return torch.optim.SGD(groups, lr=0.1, weight_decay=0.2)


def test_one_trainer_steps_as_the_groups_say(servers: Servers) -> None:
    """To the bit as by hand: clipping on the trainer, rates and decays on servers."""
    mine, plain = net(), net()
    train(mine, joined(servers(2), mine, sgd(mine), grad_clip=CLIP), batches(4))
    optimizer = sgd(plain)
    for x, y in batches(4):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        weights = [each for name, each in plain.named_parameters() if not name.endswith("bias")]
        nn.utils.clip_grad_norm_(weights, CLIP.clip_norm)
        optimizer.step()
    fleet.finish()

    assert_same(mine.state_dict(), plain.state_dict())


def test_servers_that_clip_refuse_it(servers: Servers) -> None:
    """In sync mode with several trainers servers clip every merged gradient."""
    model = net()
    role = fleet.UserDefinedRoleMaker(0, worker_num=2, server_endpoints=servers(1).split(","))
    fleet.init(role)
    fleet.distributed_model(model)
    with pytest.raises(ValueError, match="need_clip=False: .* got sync with 2 trainers"):
        fleet.distributed_optimizer(sgd(model), grad_clip=CLIP)


def test_sharded_gradients_are_clipped_together() -> None:
    """A shard's optimizer refuses what it would not do."""
    init_parallel_env()
    optimizer: Any = sgd(model := net())
    optimizer.grad_clip = CLIP
    try:
        with pytest.raises(ValueError, match="need_clip=False: expected parameters that are whole"):
            group_sharded_parallel(model, optimizer, "os")
    finally:
        leave_parallel_env()
