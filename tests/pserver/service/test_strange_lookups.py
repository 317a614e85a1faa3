"""A trainer whose lookups and refreshes are not those of ours: each is refused with words, or
answered, and what the server keeps stays bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pserver.config import ServerConfig
from pserver.errors import PServerError
from pserver.service.server import Server
from pserver.table.kept_lookups import MOST_KEPT, SentRows
from pserver.transport import frames
from pserver.transport.arrays import PLACES, ROWS
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Done, Frame, Kind, Part
from tests.support.stranger import RULE, Stranger, ask, commit
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table
from transpiler.plan.plan import Plan

DIM = 4
Answer = tuple[Done, dict[str, torch.Tensor]]


def plan_of(mode: str = "sync") -> Plan:
    """A table in one lane, with a variable."""
    return plan_parameters(
        [("w", (2, 3), "float32", 0), ("b", (3,), "float32", 0), ("mean", (3,), "float32", None)],
        [Rule("sgd", RULE, {})],
        mode=mode,
        trainers=1,
        servers=1,
        tables=[Table("emb", DIM, (Segment(0, DIM, 0),))],
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("pserver.service.tables.AFTER_SECONDS", 0.2)
    with Server(ServerConfig(keep_failed_seconds=0.0)) as server:
        yield server


def stranger_of(server: Server, mode: str = "sync") -> tuple[Stranger, Stream, Stream]:
    """A stranger, with its lane's stream and that of the tables."""
    stranger = Stranger(server.endpoint, "tcp", plan_of(mode))
    return stranger, stranger.installed(), stranger.hello(tables=True, stream=1)


def look_up(tables: Stream, ids: torch.Tensor, number: int) -> Answer:
    for header, payload in frames.frames(Kind.LOOKUP, 0, [("emb", ids)]):
        tables.send(header, payload)
    return ask(tables, Frame(kind=Kind.PULL, lookup=number, parts=[Part(name="emb")]))


def refresh(number: int, *names: str, after: dict[int, int] | None = None) -> Frame:
    parts = [Part(name=name) for name in names or ("emb",)]
    return Frame(kind=Kind.REFRESH, lookup=number, parts=parts, after=after or {})


def kept_bytes(server: Server) -> int:
    (member,) = server.job._members.by_trainer.values()
    return member.kept_bytes


def test_a_lookup_that_is_not_kept_is_unknown(server: Server) -> None:
    """Another number, or a name that is no table or was not looked up."""
    stranger, _, tables = stranger_of(server)
    look_up(tables, torch.arange(5), 7)
    for asked in (
        refresh(0),
        refresh(8),
        refresh(2**64 - 1),
        refresh(7, "emb", "w"),
        refresh(7, ""),
    ):
        done, arrays = ask(tables, asked)
        assert done.unknown_lookup and not arrays
    done, arrays = ask(tables, refresh(7))
    assert not done.unknown_lookup and not arrays
    stranger.leave()


def test_a_step_that_never_comes_is_awaited_for_a_while(server: Server) -> None:
    """Whatever its number; the stream goes on, and so does the lane."""
    stranger, lane, tables = stranger_of(server)
    look_up(tables, torch.arange(5), 1)
    for step in (1, 2**64 - 1):
        began = time.monotonic()
        done, _ = ask(tables, refresh(1, after={0: step}))
        assert done.unknown_lookup and time.monotonic() - began < 20
    ask(lane, commit(absent=("w", "b")))
    assert not ask(tables, refresh(1, after={0: 1}))[0].unknown_lookup
    assert not ask(tables, refresh(1, after={0: 0}))[0].unknown_lookup
    stranger.leave()


@pytest.mark.parametrize(
    ("mode", "asked", "words"),
    [
        ("sync", refresh(1, after={1: 1}), "expected a lane below 1, got 1"),
        ("sync", refresh(1, after={2**32 - 1: 0}), "expected a lane below 1, got 4294967295"),
        ("async", refresh(1, after={0: 0}), "lane 0: its trainers do not step together"),
        ("sync", refresh(1, *["emb"] * 1000), "'emb': expected each table once"),
        (
            "sync",
            Frame(kind=Kind.PULL, lookup=1, parts=[Part(name="emb")] * 1000),
            "'emb': expected each table once",
        ),
        ("sync", Frame(kind=Kind.PULL, lookup=1, parts=[Part(name="w")]), "no table 'w'"),
    ],
    ids=["lane", "last lane", "async", "often", "pulled often", "no table"],
)
def test_what_nobody_may_ask_is_refused(
    server: Server, mode: str, asked: Frame, words: str
) -> None:
    """The peer is told what was expected."""
    stranger, _, tables = stranger_of(server, mode)
    look_up(tables, torch.arange(5), 1)
    with pytest.raises(PServerError, match=words):
        ask(tables, asked)
    stranger.leave()


def test_a_refresh_is_for_the_stream_of_the_tables(server: Server) -> None:
    """On a lane's it is out of place."""
    stranger, lane, _ = stranger_of(server)
    with pytest.raises(PServerError, match="expected GRADIENT.*got REFRESH"):
        ask(lane, refresh(1))
    stranger.leave()


def test_ten_thousand_lookups_are_not_kept(server: Server) -> None:
    """The last ones are; a later stream has none of an earlier one's."""
    stranger, _, tables = stranger_of(server)
    for number in range(1, 10_001):
        look_up(tables, torch.arange(3), number)
    known = [not ask(tables, refresh(n))[0].unknown_lookup for n in range(9_980, 10_001)]
    assert sum(known) == MOST_KEPT and all(known[-MOST_KEPT:])
    assert kept_bytes(server) == MOST_KEPT * 3 * (8 + 4 * DIM)
    later = stranger.hello(tables=True, stream=2)
    assert ask(later, refresh(10_000))[0].unknown_lookup and kept_bytes(server) == 0
    stranger.leave()


def test_lookups_of_many_bytes_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, by the oldest ones that go; one that is too large itself is answered, not kept."""
    most = 2**20
    monkeypatch.setattr("pserver.service.tables.KEPT_BYTES", most)
    stranger, _, tables = stranger_of(server)
    for number in range(1, 7):
        look_up(tables, torch.arange(12_000), number)
        assert 0 < kept_bytes(server) <= most
    _, values = look_up(tables, torch.arange(100_000), 9)
    assert values["emb"].shape == (100_000, DIM) and kept_bytes(server) == 0
    assert ask(tables, refresh(9))[0].unknown_lookup
    stranger.leave()


def test_ids_that_nobody_asks_for_are_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in one memory with those that are: of what is kept, all is counted."""
    kept = list[Any]()

    def noted(ids: Any, rows: Any) -> SentRows:
        kept.append(ids)
        return SentRows(ids, rows)

    monkeypatch.setattr("pserver.service.tables.SentRows", noted)
    stranger, _, tables = stranger_of(server)
    arrays = [("emb", torch.arange(3)), ("emb@values", torch.zeros(2**15))]
    ((header, payload),) = frames.frames(Kind.LOOKUP, 0, arrays)
    tables.send(header, payload)
    ask(tables, Frame(kind=Kind.PULL, lookup=1, parts=[Part(name="emb")]))
    assert not ask(tables, refresh(1))[0].unknown_lookup
    assert kept[0].tolist() == [0, 1, 2]
    assert kept[0].base.untyped_storage().nbytes() == kept[0].nbytes
    assert kept_bytes(server) == 3 * (8 + 4 * DIM)
    stranger.leave()


def test_ids_that_repeat_are_looked_up_and_refreshed_as_they_are(server: Server) -> None:
    """Places are those among the ids, whatever these are."""
    stranger, _, tables = stranger_of(server)
    look_up(tables, torch.tensor([3, 3, -1, 3]), 1)
    loaded = [("emb@ids", torch.tensor([3])), ("emb@values", torch.ones(1, DIM))]
    for header, payload in frames.frames(Kind.VALUE, 0, loaded):
        tables.send(header, payload)
    ask(tables, Frame(kind=Kind.COMMIT, step=0))
    _, arrays = ask(tables, refresh(1))
    assert arrays["emb" + PLACES].tolist() == [0, 1, 3]
    assert torch.equal(arrays["emb" + ROWS], torch.ones(3, DIM))
    assert ask(tables, refresh(1))[1] == {}
    stranger.leave()
