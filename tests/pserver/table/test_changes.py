"""Which rows a server says that others have changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.table.changes import MESSAGES, OVERHEAD, RowChanges, TableChanges

NAMES = ("one", "other", "third")


def ids(*given: int) -> np.ndarray:
    return np.array(given, np.int64)


def told(changes: TableChanges) -> list[int] | None:
    return None if changes.ids is None else sorted(changes.ids.tolist())


def test_each_is_told_what_others_have_changed_since() -> None:
    """Own messages are not told, an id that two have changed once; a later position has less."""
    changes = RowChanges()
    changes.note("one", ids(3, 5))
    changes.note("other", ids(5, 7))
    first = changes.since("one", 0)
    assert told(first) == [5, 7]
    assert told(changes.since("other", 0)) == [3, 5]
    assert told(changes.since("third", 0)) == [3, 5, 7]

    assert told(changes.since("one", first.position)) == []
    changes.note("third", ids(-1))
    assert told(changes.since("one", first.position)) == [-1]
    assert changes.since("one", first.position).position == first.position + 1


def test_after_a_load_any_row_may_have_changed() -> None:
    """Positions of before count no more, and nobody is told all changes from the beginning."""
    changes = RowChanges()
    changes.note("one", ids(3))
    before = changes.since("other", 0).position
    changes.forget()

    assert told(changes.since("other", before)) is None
    assert told(changes.since("other", 0)) is None
    position = changes.since("other", before).position
    changes.note("one", ids(4))
    assert told(changes.since("other", position)) == [4]


def test_a_position_of_another_server_is_not_taken_for_one_of_this() -> None:
    """As after a restart: the positions of two tables begin apart."""
    one, other = RowChanges(), RowChanges()
    for each in (one, other):
        each.note("one", ids(3))
    assert told(other.since("other", one.since("other", 0).position)) is None


def test_ids_that_are_not_kept_or_too_many_are_not_told() -> None:
    """Then any row may have changed; from there on all is told again."""
    changes = RowChanges(kept=4, most=2)
    begin = changes.since("other", 0).position
    changes.note("one", ids(1, 2, 3))
    assert told(changes.since("other", begin)) is None  # three are too many
    assert told(changes.since("one", begin)) == []
    changes.note("one", ids(4, 5))
    assert told(changes.since("other", begin)) is None  # the first message is not kept
    assert told(changes.since("one", 0)) is None
    assert told(changes.since("other", begin + 1)) == [4, 5]
    assert changes.bytes_held == 16 + OVERHEAD


def test_small_messages_take_a_bounded_memory() -> None:
    """Those of few ids are kept up to a number, and those of none are not kept."""
    changes = RowChanges()
    begin = changes.since("other", 0).position
    for _ in range(3):
        changes.note("one", ids())
    assert changes.bytes_held == 0 and told(changes.since("other", begin)) == []
    for number in range(MESSAGES + 10):
        changes.note("one", ids(number % 5))
    assert changes.bytes_held == MESSAGES * (8 + OVERHEAD)
    assert told(changes.since("other", begin)) is None
    assert told(changes.since("other", begin + 10)) == [0, 1, 2, 3, 4]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(NAMES), st.sets(st.integers(-3, 6), max_size=5)),
            st.none(),
        ),
        max_size=30,
    ),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_what_is_told_is_what_others_have_changed(
    messages: list[tuple[str, set[int]] | None], data: st.DataObject
) -> None:
    """Whatever is told since a position is exact, and nothing is told only where something was
    dropped: random messages and loads (None).
    """
    changes, log = RowChanges(kept=20, most=8), list[tuple[str, set[int]] | None]()
    position = changes.since("one", 0).position
    positions = {position: 0}
    for message in messages:
        log.append(message)
        if message is None:
            changes.forget()
        else:
            changes.note(message[0], ids(*sorted(message[1])))
        position = changes.since("one", position).position
        positions[position] = len(log)
    asked, asker = data.draw(st.sampled_from(list(positions))), data.draw(st.sampled_from(NAMES))
    since = log[positions[asked] :]
    found = told(changes.since(asker, asked))
    if found is not None:
        assert None not in since
        assert set(found) == set().union(*(m[1] for m in since if m and m[0] != asker))
    elif None not in since:
        kept = sum(len(m[1]) for m in since if m)
        assert kept > 20 or len(set().union(*(m[1] for m in since if m and m[0] != asker))) > 8
