"""Gathers the spans of a trace in a job without servers: over the trainers' store, on separate
connections.

A trainer on trainer 0's host has the same clock.  Others ask for trainer 0's clock, in rounds over
the store: see [Note: one clock] in pserver/telemetry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from pserver.errors import Unreachable
from pserver.polling import poll
from pserver.telemetry.trace import MOST_PARTS, ClockOffset, Recording, clock_ns, parts_of, whole
from trainer.collective.rendezvous import Peers

ROUNDS = 8  # of questions for the clock
ROUND_SECONDS = timedelta(seconds=5)
PAUSE_SECONDS = 0.1  # between two looks

log = logging.getLogger(__name__)


class PeerMeeting:
    """One trainer's part in gathering spans; see
    :class:`~trainer.communicator.trace.SpanGathering`.

    The script's thread calls :meth:`begin`, a thread of the trace the rest.

    Args:
        peers: the trainers.
        host: names the clock of this process; None: that of its host.
    """

    def __init__(self, peers: Peers, host: str | None = None) -> None:
        self._rank, self._size, self._peers = peers.rank, peers.size, peers
        self._host = _boot() if host is None else host
        # of its own: the script's thread may wait on the other connection
        self._store: Store = peers.store.clone()  # type: ignore[attr-defined]  # not in torch's stub

    def begin(self, number: int) -> None:
        """Makes trainer 0 announce its clock.

        Raises:
            Unreachable: the store does not answer.
        """
        try:
            if self._rank == 0:
                self._store.set(f"trace/{number}/host", self._host)
        except DistError as error:
            raise Unreachable(f"the trainers' store: {error}") from error

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """Leaves the spans of a trainer other than 0 in the store.

        Raises:
            OSError: trainer 0 does not answer.
        """
        store, place = self._store, f"trace/{number}/{self._rank}"
        try:
            store.wait([f"trace/{number}/host"], timedelta(seconds=seconds))
            same = store.get(f"trace/{number}/host").decode() == self._host
            store.set(f"{place}/rounds", "0" if same else str(ROUNDS))
            recording.clock = "the clock of trainer 0's host"
            if not same:
                self._ask(place, recording)
            parts = parts_of(recording.to_bytes())
            for index, part in enumerate(parts):
                store.set(f"{place}/part/{index}", part)  # type: ignore[arg-type]  # torch takes bytes
            store.set(f"{place}/parts", str(len(parts)))
        except DistError as error:
            raise OSError(f"trainer 0 did not answer: {error}") from error

    def _ask(self, place: str, recording: Recording) -> None:
        """Asks for trainer 0's clock; :meth:`_left_by` answers."""
        clock = ClockOffset()
        for index in range(ROUNDS):
            asked = clock_ns()
            self._store.set(f"{place}/ask/{index}", "")
            self._store.wait([f"{place}/tell/{index}"], ROUND_SECONDS)
            answered = clock_ns()
            clock.add_round(asked, int(self._store.get(f"{place}/tell/{index}")), answered)
        found = clock.estimate()
        assert found is not None, "a round"
        recording.offset_ns, recording.bound_ns = -found.offset_ns, found.bound_ns
        recording.clock = f"the shortest of {found.rounds} rounds over the trainers' store"

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Reads, on trainer 0, the spans that the others have left.

        Args:
            seconds: to wait for them.
            hurried: whether to wait no longer.

        Returns:
            Their recordings, by trainer 0's clock; and the missing processes, with the reasons.
        """
        wanted, found = set(range(1, self._size)), list[Recording]()
        missing: dict[str, str] = {}

        def text() -> str:
            return f"the trace waits for trainer {', '.join(map(str, sorted(wanted)))}"

        for _ in poll(log, text, seconds, PAUSE_SECONDS):
            for rank in sorted(wanted):
                try:
                    recording = self._left_by(number, rank)
                except (DistError, ValueError) as error:
                    missing[f"trainer {rank}"] = f"{error}"
                    wanted.discard(rank)
                    continue
                if recording is not None:
                    found.append(recording)
                    wanted.discard(rank)
            ended = self._peers.membership is not None and self._peers.membership.event()
            if not wanted or hurried() or ended:
                break
        for rank in wanted:
            missing[f"trainer {rank}"] = "it left no spans"
        return found, missing

    def _left_by(self, number: int, rank: int) -> Recording | None:
        """A trainer's recording; None if it is not in the store yet."""
        store, place = self._store, f"trace/{number}/{rank}"
        if store.check([f"{place}/rounds"]):
            rounds = min(int(store.get(f"{place}/rounds")), ROUNDS)
            store.delete_key(f"{place}/rounds")
            for index in range(rounds):
                store.wait([f"{place}/ask/{index}"], ROUND_SECONDS)
                store.set(f"{place}/tell/{index}", str(clock_ns()))
        if not store.check([f"{place}/parts"]):
            return None
        keys = [f"{place}/part/{index}" for index in range(int(store.get(f"{place}/parts")))]
        recording = Recording.from_bytes(whole([store.get(key) for key in keys[:MOST_PARTS]]))
        for key in keys:
            store.delete_key(key)
        if recording.name != f"trainer {rank}":
            raise ValueError(f"expected the spans of trainer {rank}, got {recording.name}'s")
        return recording


def _boot() -> str:
    """A name for this boot of this host: processes of one boot share a clock.  If the system gives
    no name, every process gets its own.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown {clock_ns()}"
