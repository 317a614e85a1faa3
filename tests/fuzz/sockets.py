"""The fuzzer over sockets: attacks on all ports of a server whose job runs."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.victim import Victim

ATTACKERS = 4
REST_SECONDS = 3.0  # until memory is measured: what has ended is given back
MB = 2**20


@dataclass
class Found:
    """What a server was like under attack.

    Attributes:
        counts: inputs by attack.
        grown, peak: bytes of memory, more than before: afterwards, and at most.
        slowest_beat, join: seconds.
        log_per_minute: bytes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    grown: int = 0
    peak: int = 0
    slowest_beat: float = 0.0
    join: float = 0.0
    log_per_minute: float = 0.0

    def excesses(self) -> list[str]:
        """Where it was beyond its bounds."""
        limits = (
            ("memory afterwards", self.grown / MB, 32, "MB"),
            ("memory at most", self.peak / MB, 256, "MB"),
            ("a heartbeat", self.slowest_beat, 1.0, "s"),
            ("joining", self.join, 2.0, "s"),
            ("the log of a minute", self.log_per_minute / MB, 1.0, "MB"),
        )
        return [
            f"{what}: expected less than {most:g} {unit}, got {got:.2f}"
            for what, got, most, unit in limits
            if got >= most
        ]


def fuzz(
    seed: int, seconds: float, guard: str = "open", say: Callable[[str], None] = print
) -> Found:
    """Attacks a server for so long.

    Args:
        guard: what the server asks for, of ``victim.GUARDS``.

    Raises:
        AssertionError: the server or its job did not survive, or the job's result is another.
    """
    found = Found()
    with tempfile.TemporaryDirectory() as folder, Victim(Path(folder), guard) as victim:
        victim.begin()
        time.sleep(1.0)
        before, logged, began = victim.memory()[0], victim.log.stat().st_size, time.monotonic()
        _attack(victim, seed, seconds, found, say)
        took = time.monotonic() - began
        time.sleep(REST_SECONDS)
        victim.finish()
        now, peak = victim.memory()
        found.grown, found.peak = now - before, peak - before
        found.slowest_beat = victim.slowest_beat
        found.log_per_minute = (victim.log.stat().st_size - logged) * 60 / max(took, 60)
    return found


def _attack(
    victim: Victim, seed: int, seconds: float, found: Found, say: Callable[[str], None]
) -> None:
    end, lock = time.monotonic() + seconds, threading.Lock()

    def run(which: int) -> None:
        attacker = victim.attacker(seed, which)
        number = which
        while time.monotonic() < end and not victim.failures:
            if number // ATTACKERS % 200 == 0:
                attacker.observe()
            name, count = attacker.attack(number)
            number += ATTACKERS
            with lock:
                found.counts[name] += count
        attacker.close()

    threads = [threading.Thread(target=run, args=(which,)) for which in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    found.join = victim.joined_in()  # in the middle of it
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(5 / ATTACKERS)
        victim.check()
        now = (victim.memory()[0]) // MB
        say(f"over sockets: {found.counts.total()} inputs, {now} MB, --seed {seed}")
