"""Two optimizers in one job, of a GAN's networks: each steps its own, in lanes of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers, assert_same
from tests.support.eager_modes import strategy_of
from tests.support.gans import (
    Gan,
    Pair,
    batches,
    discriminator_step,
    gan,
    generator_step,
    optimizers,
    train,
)
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.job import Job
from trainer.row_optimizers import SGD
from transpiler import ClipGradByGlobalNorm, ClipGradByValue, DistributedStrategy

# of the discriminator and of the generator; None: sync
MODES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "sync": (None, None),
    "async": ({"send_queue_size": 1}, {"send_queue_size": 1}),
    "half-async": ({"half_async": True, "max_merge_var_num": 1},) * 2,
    "geo": ({"k_steps": 1},) * 2,
    "one sync, one async": (None, {"send_queue_size": 1}),
    "one geo, one sync": ({"k_steps": 2}, None),
}


def joined(endpoints: str, nets: Gan, modes: str = "sync", **options: Any) -> Pair:
    """A job of one trainer with both optimizers."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    return distributed(nets, modes, **options)


def distributed(nets: Gan, modes: str = "sync", **options: Any) -> Pair:
    """Both optimizers, in the present job."""
    for net in nets:
        fleet.distributed_model(net)
    strategies = [None if configs is None else strategy_of(**configs) for configs in MODES[modes]]
    return Pair(
        *(
            fleet.distributed_optimizer(optimizer, strategy, **options)
            for optimizer, strategy in zip(optimizers(nets), strategies, strict=True)
        )
    )


@pytest.mark.parametrize("modes", MODES)
def test_a_gan_trains_as_in_plain_torch(servers: Servers, modes: str) -> None:
    """One trainer that waits for its own results, in each mode, to the bit: values, states and
    counts; also where one optimizer steps more often than the other.
    """
    mine, reference = gan(), gan()
    pair, plain = joined(servers(2), mine, modes), optimizers(reference)
    for critic, seed in ((1, 1), (3, 2)):
        train(mine, pair, batches(6, seed), critic)
        train(reference, plain, batches(6, seed), critic)
    if "geo" in modes:
        fleet.finish()
    assert_same(mine.state(), reference.state())
    if "geo" not in modes:
        assert_same(pair.states(), plain.states())
    assert [each.steps for each in pair] == [12, 8]


def test_two_trainers_train_a_gan_as_one_on_the_joint_batch(servers: Servers) -> None:
    """In sync mode, within 1e-6; the servers hold one step of each optimizer for both trainers."""
    endpoints, data = servers(2).split(","), batches(6, size=16)
    both = [gan(seed=number, norm=False) for number in range(2)]  # here: a seed is of all threads

    def play(number: int) -> Gan:
        role = fleet.UserDefinedRoleMaker(number, worker_num=2, server_endpoints=endpoints)
        job, nets = Job(role, None), both[number]
        job.models += nets
        pair = Pair(*(job.join(each) for each in optimizers(nets)))
        half = slice(8 * number, 8 * number + 8)
        train(nets, pair, [(real[half], noise[half]) for real, noise in data], critic=2)
        job.finish()
        assert [each.steps for each in pair] == [6, 3]
        return nets

    one, other = at_once(lambda: play(0), lambda: play(1))
    reference = gan(seed=0, norm=False)
    train(reference, optimizers(reference), data, critic=2)
    assert_same(one.state(), other.state())
    for mine, theirs in zip(
        one.generator.parameters(), reference.generator.parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)
    for mine, theirs in zip(
        one.discriminator.parameters(), reference.discriminator.parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)


def test_a_step_sends_and_receives_its_own_parameters_only(servers: Servers) -> None:
    """A generator's step lets no value or gradient of the discriminator travel, though its backward
    makes some; and the other way round.
    """
    nets = gan()
    pair = joined(servers(2), nets)
    batch = batches(1)[0]

    def travelled() -> dict[str, int]:
        found = {"model0": 0, "model1": 0}
        for name, count in fleet.variable_bytes().items():
            found[name.split(".")[0]] += count["bytes_in"] + count["bytes_out"]
        return found

    before = travelled()
    discriminator_step(nets, pair.discriminator, batch)
    between = travelled()
    generator_step(nets, pair.generator, batch)
    after = travelled()
    assert between["model0"] > before["model0"] and between["model1"] == before["model1"]
    assert after["model0"] == between["model0"] and after["model1"] > between["model1"]


@pytest.mark.parametrize("modes", ["sync", "async"])
def test_a_saved_gan_goes_on_to_the_bit(servers: Servers, tmp_path: Path, modes: str) -> None:
    """Both optimizers' states, steps and schedules are in a checkpoint, which another number of
    servers loads.
    """

    def schedules(pair: Pair) -> list[Any]:
        return [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in pair]

    def run(nets: Gan, pair: Pair, schedulers: list[Any], seed: int) -> None:
        for batch in batches(5, seed):
            train(nets, pair, [batch])
            discriminator_step(nets, pair.discriminator, batch)
            for scheduler in schedulers:
                scheduler.step()

    path, mine, reference = str(tmp_path / "saved"), gan(), gan()
    plain = optimizers(reference)
    theirs = schedules(plain)
    run(reference, plain, theirs, 1)
    pair = joined(servers(2), mine, modes)
    own = schedules(pair)
    run(mine, pair, own, 1)
    fleet.save(path, scheduler=own)
    fleet.finish()

    again = gan(seed=9)
    pair = joined(servers(1), again, modes)
    own = schedules(pair)
    with pytest.raises(ValueError, match="a list of 2, got one"):
        fleet.load(path, scheduler=own[0])
    assert fleet.load(path, scheduler=own) == 10
    assert [each.steps for each in pair] == [10, 5]
    run(again, pair, own, 2)
    run(reference, plain, theirs, 2)
    assert_same(again.state(), reference.state())
    assert_same(pair.states(), plain.states())
    assert own[0].get_last_lr() == theirs[0].get_last_lr()


def test_a_checkpoint_of_other_optimizers_is_refused(servers: Servers, tmp_path: Path) -> None:
    """One optimizer with two groups is not two with one each: nothing is taken."""
    path, nets = str(tmp_path / "saved"), gan()
    pair = joined(servers(1), nets)
    train(nets, pair, batches(1))
    fleet.save(path)
    fleet.finish()

    other = gan()
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    for net in other:
        fleet.distributed_model(net)
    groups = [{"params": net.parameters()} for net in other]
    fleet.distributed_optimizer(torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match="expected the checkpoint of one optimizer, got one of 2"):
        fleet.load(path)


def test_loading_one_optimizers_state_leaves_the_others(servers: Servers) -> None:
    """``load_state_dict`` gives the servers the states of that optimizer, and not what this process
    has read of the other's some time ago.
    """
    mine, reference = gan(), gan()
    pair, plain = joined(servers(2), mine), optimizers(reference)
    for nets, both in ((mine, pair), (reference, plain)):
        train(nets, both, batches(2))
        kept = copy.deepcopy(both.states()[0])  # reads the generator's, too
        train(nets, both, batches(3, seed=2))
        both.discriminator.load_state_dict(kept)
        train(nets, both, batches(2, seed=3))
    assert_same(mine.state(), reference.state())
    assert_same(pair.states(), plain.states())


@pytest.mark.parametrize("modes", ["sync", "async"])
def test_weights_that_a_script_clamps_stay_clamped(servers: Servers, modes: str) -> None:
    """A critic's weights are clamped after its step: the generator's step leaves them so, and the
    critic's next one goes on from there.
    """
    mine, reference = gan(), gan()
    pair, plain = joined(servers(2), mine, modes), optimizers(reference)
    for nets, both in ((mine, pair), (reference, plain)):
        for batch in batches(5):
            discriminator_step(nets, both.discriminator, batch)
            with torch.no_grad():
                for parameter in nets.discriminator.parameters():
                    parameter.clamp_(-0.1, 0.1)
            generator_step(nets, both.generator, batch)
    assert_same(mine.state(), reference.state())


def test_a_queue_lands_at_the_steps_of_its_own_optimizer(servers: Servers) -> None:
    """With queues and receiving threads nothing moves while a model's graph waits for its backward,
    not even at another model's forward.
    """
    nets, endpoints = gan(), servers(2).split(",")
    strategy = strategy_of(send_queue_size=8, independent_recv_thread=True)
    fleet.init(
        fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints), False, strategy
    )
    for net in nets:
        fleet.distributed_model(net)
    pair = Pair(*(fleet.distributed_optimizer(each) for each in optimizers(nets)))
    train(nets, pair, batches(20))
    pair.generator.flush()
    flushed = copy.deepcopy(nets.state())
    fleet.finish()
    assert_same(nets.state(), flushed)
    assert [each.steps for each in pair] == [20, 20]


def test_alone_the_same_script_trains_both(servers: Servers) -> None:
    """Without a cluster's variables each optimizer steps here."""
    mine, reference = gan(), gan()
    fleet.init()
    train(mine, distributed(mine), batches(4))
    train(reference, optimizers(reference), batches(4))
    assert_same(mine.state(), reference.state())
    assert fleet.metrics() == {"steps": 8.0}


def test_each_optimizer_clips_by_its_own_rule_on_one_trainer(servers: Servers) -> None:
    """A gradient that one trainer has whole is clipped there: any two rules go together."""
    mine, reference = gan(), gan()
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    for net in mine:
        fleet.distributed_model(net)
    one, other = optimizers(mine)
    pair = Pair(
        fleet.distributed_optimizer(one, grad_clip=ClipGradByValue(0.01)),
        fleet.distributed_optimizer(other),
    )
    train(mine, pair, batches(4))
    plain = optimizers(reference)
    plain.discriminator.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_value_(reference.discriminator.parameters(), 0.01)
    )
    train(reference, plain, batches(4))
    assert_same(mine.state(), reference.state())


def test_what_does_not_go_together_is_refused(servers: Servers) -> None:
    """A shared parameter, an optimizer after the first step, and overlap: the first stays as it
    is.
    """
    nets = gan()
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    for net in nets:
        fleet.distributed_model(net)
    one, other = optimizers(nets)
    first = fleet.distributed_optimizer(one)
    shared = torch.optim.SGD([*nets.generator.parameters(), nets.discriminator[0].bias], lr=0.1)
    with pytest.raises(ValueError, match=r"'model0.0.bias': expected in one optimizer .* 0 and"):
        fleet.distributed_optimizer(shared)
    overlap = DistributedStrategy()
    overlap.a_sync, overlap.a_sync_configs = False, {"overlap": True}
    with pytest.raises(ValueError, match="overlap: expected one optimizer"):
        fleet.distributed_optimizer(other, overlap)
    with pytest.raises(ValueError, match=r"a_sync_configs\['buffers'\]: expected the same"):
        fleet.distributed_optimizer(other, strategy_of(buffers="own"))
    discriminator_step(nets, first, batches(1)[0])
    with pytest.raises(RuntimeError, match="before the first step, got a further one after step 1"):
        fleet.distributed_optimizer(other)
    discriminator_step(nets, first, batches(1)[0])
    assert first.steps == 2


def test_servers_clip_by_one_rule(servers: Servers) -> None:
    """Where servers clip the mean of several trainers' gradients the optimizers clip alike."""
    endpoints = servers(1).split(",")

    def play(number: int) -> str:
        role = fleet.UserDefinedRoleMaker(number, worker_num=2, server_endpoints=endpoints)
        job, nets = Job(role, None), gan(norm=False)
        job.models += nets
        one, other = optimizers(nets)
        job.join(one, grad_clip=ClipGradByGlobalNorm(0.1))
        with pytest.raises(ValueError, match="grad_clip: expected the same") as found:
            job.join(other)
        job.finish()
        return str(found.value)

    for said in at_once(lambda: play(0), lambda: play(1)):
        assert "2 trainers" in said and "optimizer 0" in said and "optimizer 1" in said


def test_a_group_is_added_beside_another_optimizer(servers: Servers) -> None:
    """``add_param_group`` of the first keeps the order, and the numbers, of both."""
    mine, reference = gan(), gan()
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    for net in mine:
        fleet.distributed_model(net)

    def pair_of(nets: Gan, distribute: Any) -> Pair:
        one = torch.optim.SGD(nets.discriminator[0].parameters(), lr=0.05, momentum=0.9)
        pair = Pair(distribute(one), distribute(optimizers(nets).generator))
        pair.discriminator.add_param_group({"params": nets.discriminator[2].parameters(), "lr": 1})
        return pair

    pair, plain = pair_of(mine, fleet.distributed_optimizer), pair_of(reference, lambda each: each)
    train(mine, pair, batches(3))
    train(reference, plain, batches(3))
    assert_same(mine.state(), reference.state())


class Conditional(nn.Module):
    """A network whose input is moved by two embeddings of a label."""

    def __init__(self, net: nn.Module, width: int, **options: Any) -> None:
        super().__init__()
        self.net = net
        self.first, self.second = nn.Embedding(5, width), nn.Embedding(5, width)
        for embedding in (self.first, self.second):
            fleet.distribute_embedding(embedding, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(x)) % 5
        return self.net(x + self.first(labels) + self.second(labels))


def test_tables_follow_the_optimizer_of_their_module(servers: Servers) -> None:
    """Rows that servers begin with outlive the second join; the steps of the optimizer that has a
    table's module update it, by the optimizer's rule or the table's own.
    """

    def conditional() -> Gan:
        nets = gan(norm=False)
        return Gan(
            Conditional(nets.discriminator, 6), Conditional(nets.generator, 4, optimizer=SGD(0.5))
        )

    def sgd(nets: Gan) -> Pair:
        return Pair(
            torch.optim.SGD(nets.discriminator.parameters(), lr=0.05),
            torch.optim.SGD(nets.generator.parameters(), lr=0.5),
        )

    mine, reference = conditional(), conditional()
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(",")))
    mine = Gan(*(fleet.distributed_model(net) for net in mine))
    pair = Pair(*(fleet.distributed_optimizer(each) for each in sgd(mine)))
    train(mine, pair, batches(6), critic=2)
    train(reference, sgd(reference), batches(6), critic=2)
    x = torch.ones(5, 6), torch.ones(5, 4)
    for own, theirs, given in zip(mine, reference, x, strict=True):
        assert torch.allclose(own(given), theirs(given), atol=1e-6)
