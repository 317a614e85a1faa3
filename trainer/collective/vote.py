"""The votes of trainers that gather because they average gradients among themselves, and the
verdict from them: every trainer comes to the same one.

[Note: which average counts]  A trainer counts an average when its step is settled.  If servers
decide the step (a sync lane), that is when all trainers of the average are in the step, too; until
then its result is *held*.  No trainer is in the next average before all have been in this one, so
counts differ by one at most.  These cases occur among the trainers that gather::

    some have counted one more     theirs is the result: one of them sends it to the others
    one has a sealed result        of a step that is decided: likewise
    the step is known as decided   without a trainer that was in the average: it is repeated
    one has no result              so it has not committed the step, which is therefore undecided,
                                   and a lost trainer is no longer in it: it is repeated
    a new trainer is in that step  likewise
    all hold a result              the servers decide the step by themselves; nothing is done

A new process needs the values of the step before its first one.  If others lack a result that is
certain, or hold results of the step before that, it cannot join before they have settled it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trainer.collective.member_groups import TrainerProcess
from transpiler.files import bounded_json

NONE, HELD, SEALED = "", "held", "sealed"


@dataclass(frozen=True, slots=True)
class Vote:
    """A trainer's report of its progress: its averages, steps and group.

    Attributes:
        incarnation: of its process.
        count: the number of averages that count.
        step: the last settled step, as servers number the steps of all trainers; 0 if there is
            none.
        result: of the average after these: ``NONE``, ``HELD``, or ``SEALED`` if it is certain, and
            not counted yet.
        decided: whether servers have decided that step without some trainer of the average.
        wants: whether it waits in an average.
        ends: whether it takes no further step.
        new: whether it has been in no group yet.
        late: whether the others trained already when it joined.
        group: the number of the meeting round after which its group came up; 0 if it has no working
            group.
    """

    incarnation: str
    count: int = 0
    step: int = 0
    result: str = NONE
    decided: bool = False
    wants: bool = False
    ends: bool = False
    new: bool = False
    late: bool = False
    group: int = 0

    def text(self) -> str:
        """The vote as text, for the others."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Vote:
        """The vote from the text that :meth:`text` gave."""
        return cls(**bounded_json.loads(text))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of a meeting round.

    Attributes:
        members: the trainers that continue together, in the order of their numbers.
        arrived: the members that get values.
        waiting: the new trainers that can join at the next round.
        same_group: whether all members have the same working group.
        values_from: the trainer that gives the values; None if no trainer gets any.
        result_from: the trainer that sends its result; None if no trainer does.
        takers: the trainers that take the result.
        again: whether held results do not count, and the average is repeated.
        decided: whether servers have decided the step of that average.
        over: whether no trainer takes a further step.
        problem: why the trainers that want an average cannot continue; "" if they can.
    """

    members: tuple[TrainerProcess, ...]
    arrived: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    same_group: bool = False
    values_from: int | None = None
    result_from: int | None = None
    takers: frozenset[int] = frozenset()
    again: bool = False
    decided: bool = False
    over: bool = False
    problem: str = ""


def verdict_of(votes: Mapping[int, Vote]) -> Verdict:
    """The verdict from the votes of the gathered trainers.

    Args:
        votes: by trainer.
    """
    some_old = not all(each.new for each in votes.values())
    old = {t: each for t, each in sorted(votes.items()) if not (some_old and each.new)}
    if all(each.late for each in votes.values()):
        return Verdict((), problem="no live trainer has the values that they average")
    top = max(each.count for each in old.values())
    first = {t: each for t, each in old.items() if each.count == top}
    behind = frozenset(old.keys() - first.keys())
    sealed = [t for t, each in old.items() if each.result == SEALED and not behind]
    decided = not behind and any(each.decided for each in old.values())
    source = next(iter(first if behind else sealed), None)
    step = max(each.step for each in first.values())
    arrived = frozenset(
        t for t in votes.keys() - old.keys() if source is None and votes[t].step <= step
    )
    members = sorted({*old, *arrived})
    groups = {votes[t].group for t in members}
    lacks = any(each.result == NONE for each in old.values())
    return Verdict(
        tuple(TrainerProcess(t, votes[t].incarnation) for t in members),
        arrived,
        frozenset(votes.keys() - set(members)),
        len(groups) == 1 and 0 not in groups,
        min(first) if arrived else None,
        source,
        behind or frozenset(old.keys() - set(sealed) if sealed else ()),
        source is None and bool(decided or lacks or arrived),
        decided,
        source is None and all(each.ends for each in votes.values()),
        "" if behind else _problem(old),
    )


def _problem(old: Mapping[int, Vote]) -> str:
    """The reason why an average that some want cannot be made; "" if it can."""
    gone = [t for t, each in old.items() if each.ends]
    wanting = [t for t, each in old.items() if each.wants]
    if not gone or not wanting:
        return ""
    return (
        f"trainer {', '.join(map(str, gone))} has left the job, and trainer "
        f"{', '.join(map(str, wanting))} is in the dense all-reduce: all trainers run the same "
        "number of steps"
    )
