"""The texts of trainers that average gradients among themselves when they gather, and what
follows from it: every one of them concludes the same.

[Note: which average counts]  A trainer counts an average when its step is settled.  Where servers
decide the step (a sync lane), that is when all who are in the average are in the step, too; until
then its result is *held*.  Nobody is in the next average before all have taken part in this one, so
counts differ by one at most.  Of those that gather there are these cases::

    some have counted one more     theirs is the result: one of them tells it to the others
    one has a sealed result        of a step that is decided: likewise
    the step is known as decided   without a trainer that was in the average: it is made again
    one has no result              so it has not committed the step, which is therefore undecided,
                                   and a lost trainer is in it no more: it is made again
    a new one is in that step      likewise
    all hold a result              the servers decide the step without help; nothing is done

A new process needs the values of the step before its first one.  Where others lack a result that
is certain, or hold results of that step's predecessor, it is not let in before they have settled
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trainer.collective.member_groups import Member
from transpiler.files import bounded_json

NONE, HELD, SEALED = "", "held", "sealed"


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a trainer is.

    Attributes:
        incarnation: of its process.
        count: averages that count.
        step: the last settled step, as servers number those of all trainers; 0: there are none.
        result: of the average after these: ``NONE``, ``HELD``, or ``SEALED``: it is certain, and
            not counted yet.
        decided: servers have decided that step, and not with all that were in the average.
        wants: it waits in an average.
        ends: it takes no further step.
        new: it was in no group yet.
        late: the others trained already when it joined.
        group: the number of the gathering after which its group came up; 0: it has none that is
            whole.
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
        """As it is told."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Standing:
        """What :meth:`text` gave."""
        return cls(**bounded_json.loads(text))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows.

    Attributes:
        members: who goes on together, in the order of their numbers.
        arrived: those of them that get values.
        waiting: new ones that are let in next time.
        same_group: all members told the same group.
        values_from: who gives the values; None: nobody gets any.
        result_from: who tells its result; None: nobody does.
        takers: who takes it.
        again: results that are held do not count; the average is made again.
        decided: servers have decided the step of that average.
        over: all take no further step.
        problem: why those that want an average cannot go on; "": they can.
    """

    members: tuple[Member, ...]
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


def verdict_of(standings: Mapping[int, Standing]) -> Verdict:
    """What follows from what the trainers tell.

    Args:
        standings: by trainer.
    """
    some_old = not all(each.new for each in standings.values())
    old = {t: each for t, each in sorted(standings.items()) if not (some_old and each.new)}
    if all(each.late for each in standings.values()):
        return Verdict((), problem="no trainer is left that has what they average")
    top = max(each.count for each in old.values())
    first = {t: each for t, each in old.items() if each.count == top}
    behind = frozenset(old.keys() - first.keys())
    sealed = [t for t, each in old.items() if each.result == SEALED and not behind]
    decided = not behind and any(each.decided for each in old.values())
    source = next(iter(first if behind else sealed), None)
    step = max(each.step for each in first.values())
    arrived = frozenset(
        t for t in standings.keys() - old.keys() if source is None and standings[t].step <= step
    )
    members = sorted({*old, *arrived})
    groups = {standings[t].group for t in members}
    lacks = any(each.result == NONE for each in old.values())
    return Verdict(
        tuple(Member(t, standings[t].incarnation) for t in members),
        arrived,
        frozenset(standings.keys() - set(members)),
        len(groups) == 1 and 0 not in groups,
        min(first) if arrived else None,
        source,
        behind or frozenset(old.keys() - set(sealed) if sealed else ()),
        source is None and bool(decided or lacks or arrived),
        decided,
        source is None and all(each.ends for each in standings.values()),
        "" if behind else _problem(old),
    )


def _problem(old: Mapping[int, Standing]) -> str:
    """Why an average that some want cannot be made; "": it can."""
    gone = [t for t, each in old.items() if each.ends]
    wanting = [t for t, each in old.items() if each.wants]
    if not gone or not wanting:
        return ""
    return (
        f"trainer {', '.join(map(str, gone))} has left the job, and trainer "
        f"{', '.join(map(str, wanting))} is in the dense all-reduce: all trainers run the same "
        "number of steps"
    )
