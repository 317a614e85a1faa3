"""What a server says that has come back: what was decided and is lost there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pserver.job_log.records import Loss
from tests.checker.history import History, Message
from tests.checker.server_lives import LaneStep, Life


def loss_differences(
    life: Life, history: History, lost: Iterable[LaneStep], since: int
) -> Iterator[str]:
    """Where it says something else; nothing: nowhere.

    Args:
        history: of the trial.
        lost: the steps that it has not.
        since: how many of them were decided since its save.
    """
    expected: dict[int, Loss] = defaultdict(Loss)
    for lane, step in lost:
        messages = history.messages.get((step.process.incarnation, lane, life.server), {})
        message = messages.get(step.step, Message())
        rows = sum(len(each.ids) for each in message.rows.values())
        trainer = step.process.trainer
        expected[trainer] = expected[trainer].plus(Loss(1, rows))
    assert life.stood is not None, "it has come back"
    said = {trainer: loss for trainer, loss in life.stood.lost.items() if loss != Loss()}
    if said != expected:
        yield f"server {life.server} counts as lost {said}, not {dict(expected)}"
    if f": {since} decided steps since then are lost here" not in life.stood.said:
        yield f"server {life.server} says {life.stood.said!r}, and {since} are lost"
