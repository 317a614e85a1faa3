"""Two trainers that write into their parameters: in sync the same, or the job ends; otherwise the
last writer wins, element by element.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.service.server import Server
from tests.support.eager_modes import strategy_of
from trainer.communicator.communicator import Communicator, options_of
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.strategy.from_strategy import lanes_of

SYNC: dict[str, Any] = {"modes": {"*": "sync"}}
IN_PLACE: dict[str, dict[str, Any]] = {
    "one slot": {"send_queue_size": 1},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "bounded staleness": {"staleness": 100},
}
ASYNC: dict[str, dict[str, Any]] = {"a queue": {}, **IN_PLACE}
SECONDS = 20.0


class Pair:
    """Two trainers of one vector of 3000 zeros under SGD with rate 1, on two servers."""

    def __init__(self, endpoints: tuple[str, ...], **configs: Any) -> None:
        rule = Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
        strategy = strategy_of(**configs)
        plan = plan_parameters(
            [("w", (3000,), "float32", 0)],
            [rule],
            lanes=lanes_of(strategy),
            trainers=2,
            servers=len(endpoints),
            min_block_size=1000,
        )
        self.hparams = {0: rule.hparams}
        self.values = [torch.zeros(3000) for _ in range(2)]
        self.trainers = [
            Communicator(
                Deployment(plan, endpoints, trainer_id=number),
                {"w": self.values[number]},
                options=options_of(strategy),
            )
            for number in range(2)
        ]
        self.pool = ThreadPoolExecutor(2)
        self.both(lambda number: self.trainers[number].start())

    def both(self, call: Callable[[int], Any]) -> list[Any]:
        """Both trainers at the same time."""
        made = [self.pool.submit(call, number) for number in range(2)]
        return [each.result(SECONDS) for each in made]

    def step(self, number: int, gradient: float = 0.0) -> None:
        """One trainer's step, and what came of it."""
        trainer = self.trainers[number]
        trainer.send_whole({"w": torch.full((3000,), gradient)})
        trainer.commit(self.hparams)

    def close(self) -> None:
        """Both leave."""
        self.both(lambda number: self.trainers[number].leave())
        self.pool.shutdown()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """``pair(**a_sync_configs)``."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(ServerConfig())) for _ in range(2)]

        def make(**configs: Any) -> Pair:
            made = Pair(tuple(server.endpoint for server in servers), **configs)
            stack.callback(made.close)
            return made

        yield make


def said_by_trainers(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that trainers logged.  Servers log as well: a stranger may meet a port of theirs,
    such as a channel of another test's worker that looks for a server that had the port before.
    """
    return [each.getMessage() for each in caplog.records if each.name.startswith("trainer.")]


def test_in_sync_what_all_trainers_write_takes_effect(pair: Callable[..., Pair]) -> None:
    """Then the mean of their gradients is applied."""
    both = pair(**SYNC)
    both.both(lambda number: both.step(number, 1.0))
    for value in both.values:
        value.data[:5] = 7.0
        value.data[2999] = 9.0
    both.both(lambda number: both.step(number, float(number)))

    for value in both.values:
        assert value[:6].tolist() == [6.5] * 5 + [-1.5]
        assert value[2998:].tolist() == [-1.5, 8.5]


@pytest.mark.parametrize("written", [(7.0, None), (None, 7.0), (7.0, 8.0)])
def test_in_sync_a_trainer_that_wrote_otherwise_ends_the_job(
    pair: Callable[..., Pair], written: tuple[float | None, float | None]
) -> None:
    """Both are told the variable, and who wrote what."""
    both = pair(**SYNC)
    both.both(both.step)
    for value, new in zip(both.values, written, strict=True):
        if new is not None:
            value.add_(new)

    def step(number: int) -> str:
        with pytest.raises(PServerError) as raised:
            both.step(number)
        both.trainers[number].leave("the job has failed")
        return str(raised.value)

    for said in both.both(step):
        assert "what they wrote into 'w.block" in said
        assert ("did not write" in said) == (None in written)
        assert "trainer 0" in said and "trainer 1" in said


@pytest.mark.parametrize("mode", ASYNC)
def test_in_async_only_the_elements_that_differ_are_assigned(
    pair: Callable[..., Pair], mode: str
) -> None:
    """Each trainer's elements; where they meet the last writer wins; and what a trainer has not
    written stays the other one's.
    """
    both = pair(**ASYNC[mode])
    both.values[0][:10] = 5.0
    both.step(0)
    both.trainers[0].flush()
    both.trainers[1].flush()
    both.values[1][5:15] = 6.0
    both.step(1)
    for trainer in reversed(both.trainers):
        trainer.flush()

    for value in both.values:
        assert value[:16].tolist() == [5.0] * 5 + [6.0] * 10 + [0.0]


@pytest.mark.parametrize("mode", IN_PLACE)
def test_a_first_write_after_others_have_stepped_replaces_their_values_and_is_said(
    pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """No copy of what landed was kept; from the next write on only its elements count."""
    both = pair(**IN_PLACE[mode])
    for _ in range(4):  # in the first steps there is a copy
        both.step(0)
    both.step(1, -1.0)
    with caplog.at_level(logging.WARNING):
        both.values[0][:10] = 5.0
        both.step(0)
    (said,) = said_by_trainers(caplog)
    assert "the first write into parameters of this lane (w)" in said
    assert both.values[0][:11].tolist() == [5.0] * 10 + [0.0]

    caplog.clear()
    both.step(1, -1.0)
    both.values[0][:10] = 3.0
    both.step(0)
    assert not said_by_trainers(caplog)
    assert both.values[0][:11].tolist() == [3.0] * 10 + [1.0]


@pytest.mark.parametrize("mode", ["one slot", "bounded staleness"])
def test_a_first_write_is_exact_where_nobody_has_stepped_since(
    pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """The servers' values are what landed, and the others' later steps stay."""
    both = pair(**IN_PLACE[mode])
    both.step(1, -1.0)
    for _ in range(5):
        both.step(0)
    with caplog.at_level(logging.WARNING):
        both.values[0][:10] = 5.0
        both.step(0)

    assert not said_by_trainers(caplog)
    assert both.values[0][:11].tolist() == [5.0] * 10 + [1.0]


@pytest.mark.parametrize("mode", ASYNC)
def test_until_the_next_step_nothing_lands_on_what_was_written(
    pair: Callable[..., Pair], mode: str
) -> None:
    """The other trainer's steps do not, whatever receives parameters."""
    both = pair(**ASYNC[mode])
    both.values[0].fill_(5.0)
    both.step(1, -1.0)
    both.trainers[1].flush()  # or it may be applied after what trainer 0 writes
    for receive in (both.trainers[0].refresh, both.trainers[0].flush, both.trainers[0].states):
        receive()
        assert torch.equal(both.values[0], torch.full((3000,), 5.0))
    both.step(0)
    both.trainers[0].flush()

    assert torch.equal(both.values[0], torch.full((3000,), 5.0))


# ---- where the script's own optimizer steps ----


def own_step(both: Pair, number: int, change: float) -> None:
    """A step of the script's own optimizer."""
    both.values[number].add_(change)
    both.trainers[number].commit(both.hparams)


def test_in_geo_an_average_swapped_in_stands_and_swapped_back_undoes_nobodys_steps(
    pair: Callable[..., Pair],
) -> None:
    """What has arrived lands with the next step, not on the average."""
    both = pair(k_steps=1)
    own_step(both, 1, 1.0)
    both.trainers[1].flush()
    own_step(both, 0, 1.0)
    both.trainers[0].lanes[0].wait_for_replies()  # with the half of the other's step
    own = both.values[0].clone()

    both.values[0].fill_(100.0)
    for receive in (both.trainers[0].refresh, both.trainers[0].flush):
        receive()
        assert torch.equal(both.values[0], torch.full((3000,), 100.0))
    both.values[0].copy_(own)
    own_step(both, 0, 0.0)

    assert torch.equal(both.values[0], torch.full((3000,), 1.5))


def test_in_geo_what_is_written_after_the_last_message_leaves_at_the_end(
    pair: Callable[..., Pair],
) -> None:
    """As a trainer's share, like a step."""
    both = pair(k_steps=1)
    own_step(both, 0, 2.0)
    both.trainers[0].flush()
    both.values[0].data.fill_(9.0)
    both.trainers[0].leave()

    for value in (both.values[0], both.trainers[1].served()["w"]):
        assert torch.equal(value, torch.full((3000,), 5.0))


@pytest.mark.parametrize("outer", [None, {"type": "sgd", "lr": 1.0}])
def test_in_the_kstep_modes_values_for_files_lack_what_was_written_and_it_is_said(
    pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, outer: dict[str, Any] | None
) -> None:
    """The trainer's own parameters keep it, also while values are received."""
    both = pair(k_steps=100, **({} if outer is None else {"outer_optimizer": outer}))
    both.values[0].fill_(8.0)
    both.trainers[0].flush()
    with caplog.at_level(logging.WARNING):
        served = both.trainers[0].served()["w"]
    assert "w: written since the last step" in caplog.text
    assert not served.any() and bool((both.values[0] == 8.0).all())

    caplog.clear()
    own_step(both, 0, 1.0)
    both.trainers[0].served()
    assert not said_by_trainers(caplog)
