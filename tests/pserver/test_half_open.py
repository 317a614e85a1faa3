"""What has begun and has not said what it is: so many at a time, each for so long."""

from __future__ import annotations

from pserver.half_open import HalfOpen, address_of


def begun(half_open: HalfOpen, address: str, ended: list[str], name: str = "") -> int:
    return half_open.begin(address, lambda: ended.append(name or address))


def test_a_flood_displaces_itself() -> None:
    """Where one more comes than may be, the oldest of the address that has the most ends."""
    ended: list[str] = []
    half_open = HalfOpen(4, 10.0)
    begun(half_open, "10.0.0.1", ended)
    numbers = [begun(half_open, "10.0.0.9", ended, f"flood {index}") for index in range(50)]
    begun(half_open, "10.0.0.2", ended)

    assert ended == [f"flood {index}" for index in range(48)]
    assert len(half_open) == 4 and half_open.ended == 48
    assert [half_open.over(number) for number in numbers[-3:]] == [False, True, True]


def test_what_lasts_too_long_ends() -> None:
    """What is over before is left alone."""
    now, ended = [0.0], list[str]()
    half_open = HalfOpen(4, 10.0, lambda: now[0])
    first = begun(half_open, "a", ended)
    begun(half_open, "b", ended)
    now[0] = 5.0
    begun(half_open, "c", ended)
    assert half_open.over(first)
    now[0] = 10.0
    half_open.end_late()

    assert ended == ["b"] and len(half_open) == 1


def test_the_address_of_a_peer() -> None:
    """HOST:PORT without its port; a process's name as it is."""
    assert address_of("10.0.0.1:80") == "10.0.0.1"
    assert address_of("[::1]:80") == "[::1]"
    assert address_of("process 12 of this host") == "process 12 of this host"
