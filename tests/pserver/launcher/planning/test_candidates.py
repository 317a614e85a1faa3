"""What a search compares, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.launcher.planning.cost import JobLoad, LaneLoad, Measured, Probed, Where
from pserver.launcher.planning.plan import between, candidates, candidates_text, on_servers

MB = 10**6
LOAD = JobLoad(
    trainers=2,
    lanes=(LaneLoad("sync", True, 1, True, (8 * MB,), (8 * MB,)),),
    memory=(40 * MB,),
    tables=False,
)
ONE = Measured(
    *(100, 0.012, 0.002, 0.011, 0.001, 1.0, 0.0, (8e6,), (8e6,), (0.0,), (0.0005,)),
    server_cpu_seconds=(0.001,),
)
THREE = replace(
    ONE,
    seconds=0.014,
    exchange_seconds=0.004,
    sent=(4e6, 2e6, 2e6),
    received=(4e6, 2e6, 2e6),
    looked_up=(0.0,) * 3,
    update_seconds=(0.0003,) * 3,
    server_cpu_seconds=(0.001,) * 3,
)


def shared(measured: Measured) -> Measured:
    """The same for two trainers: a longer step, and most of the servers' work twice."""
    return replace(
        measured,
        seconds=measured.seconds + 0.002,
        exchange_seconds=measured.exchange_seconds + 0.001,
        server_cpu_seconds=tuple(1.8 * each for each in measured.server_cpu_seconds),
    )


PROBES = {1: Probed(ONE, shared(ONE)), 3: Probed(THREE, shared(THREE))}


def test_a_slow_link_favours_modes_that_send_little() -> None:
    """The longest interval comes first, and sync on one server last."""
    found = candidates(LOAD, PROBES, 3, Where(2, True, link=25e6), None)

    assert len(found) == 3 * 4
    assert (found[0].mode, found[0].k_steps) == ("geo", 100)
    assert (found[-1].mode, found[-1].servers) == ("sync", 1)
    seconds = [each.prediction.seconds for each in found]
    assert seconds == sorted(seconds)


def test_what_does_not_fit_is_left_out() -> None:
    """40 MB on two servers are 20 each; where nothing fits, the error says what is needed."""
    found = candidates(LOAD, PROBES, 3, Where(2), 20 * MB)

    assert {each.servers for each in found} == {2, 3}
    assert {each.memory for each in found} == {20 * MB, -(-40 * MB // 3)}
    with pytest.raises(ValueError, match="3 servers need 13333334 bytes each, got 1000000"):
        candidates(LOAD, PROBES, 3, Where(2), MB)


def test_between_two_probes_figures_are_interpolated() -> None:
    """Two servers lie in the middle of one and three; four are taken for three."""
    two, four = between(PROBES, 2), between(PROBES, 4)

    assert (two.alone.seconds, two.pair.seconds) == (pytest.approx(0.013), pytest.approx(0.015))
    assert two.alone.server_cpu_seconds == pytest.approx((0.001, 0.001))
    assert two.alone.update_seconds == pytest.approx((0.00035, 0.00035))
    assert four.alone.seconds == 0.014
    assert four.alone.sent == (2e6,) * 4


def test_bytes_are_spread_evenly() -> None:
    """Of messages and of memory."""
    spread = on_servers(LOAD, 4)

    assert spread.lanes[0].sent == (2 * MB,) * 4
    assert spread.memory == (10 * MB,) * 4


def test_a_script_in_another_mode_is_refused() -> None:
    """Its figures say nothing of sync mode."""
    geo = replace(LOAD, lanes=(replace(LOAD.lanes[0], mode="geo"),))

    with pytest.raises(ValueError, match="expected a script in sync mode, .* got geo"):
        candidates(geo, PROBES, 1, Where(2), None)


def test_the_table_says_how_a_script_asks_for_each() -> None:
    """The best on top, with what all trainers do together."""
    found = candidates(LOAD, PROBES, 1, Where(2, True, link=25e6), None)

    lines = candidates_text(found, 2).splitlines()

    assert lines[0].split("  ")[0] == "servers"
    assert "a_sync = True, a_sync_configs = {'k_steps': 100}" in lines[1]
    assert lines[-1].split()[1:4] == ["a_sync", "=", "False"]
