"""How the trainers of a job with servers bring the spans of a trace together: the others leave
theirs at server 0, and trainer 0 reads those and the servers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pserver.client.client import Client
from pserver.errors import PServerError, Unreachable
from pserver.polling import poll
from pserver.telemetry.trace import Estimate, Recording

PAUSE_SECONDS = 0.1  # between two looks

log = logging.getLogger(__name__)


class ServerMeeting:
    """One trainer's part in bringing spans together; see
    :class:`~trainer.communicator.trace.Meeting`.

    Clocks are compared with those of servers: a trainer's with trainer 0's by way of server 0.

    Args:
        clients: the connections, by server.
        trainers: of the job.
    """

    def __init__(self, clients: Sequence[Client], trainers: int) -> None:
        self._clients, self._trainers = clients, trainers

    def begin(self, number: int) -> None:
        """The servers note what they do from here on.

        Raises:
            PServerError: one of them cannot be reached.
        """
        for client in self._clients:
            client.tracing.begin(number)

    def deliver(self, number: int, recording: Recording, seconds: float) -> None:
        """A further trainer leaves its spans at server 0.

        Raises:
            PServerError: the server cannot be reached, or refuses.
        """
        calls = self._clients[0].tracing
        calls.ask_clock()
        clock = _known(calls.clock, "server 0")
        recording.offset_ns, recording.bound_ns = -clock.offset_ns, clock.bound_ns
        recording.clock = f"the shortest of {clock.rounds} rounds with server 0"
        calls.leave(number, recording)

    def gather(
        self, number: int, seconds: float, hurried: Callable[[], bool]
    ) -> tuple[list[Recording], dict[str, str]]:
        """Trainer 0: what the others have left, and the servers' spans.

        Args:
            seconds: to wait for the other trainers.
            hurried: whether to wait no longer.

        Returns:
            Their recordings, by trainer 0's clock; and the missing processes, with the reasons.
        """
        found: list[Recording] = []
        missing: dict[str, str] = {}
        try:
            self._clients[0].tracing.ask_clock()
            first = _known(self._clients[0].tracing.clock, "server 0")
            missing |= self._trainers_left(number, seconds, hurried, found)
        except PServerError as error:
            missing |= {f"trainer {each}": str(error) for each in range(1, self._trainers)}
        for recording in found:
            recording.offset_ns += first.offset_ns
            recording.bound_ns += first.bound_ns
            recording.clock += f", and of {first.rounds} of trainer 0 with it"
        for client in self._clients:
            try:
                found.append(_of_server(client, number))
            except PServerError as error:
                missing[f"server {client.index}"] = str(error)
        return found, missing

    def _trainers_left(
        self, number: int, seconds: float, hurried: Callable[[], bool], found: list[Recording]
    ) -> dict[str, str]:
        """Adds what the other trainers have left to ``found``; gives those that left nothing."""
        client, wanted = self._clients[0], set(range(1, self._trainers))

        def text() -> str:
            return f"the trace waits for trainer {', '.join(map(str, sorted(wanted)))}"

        for _ in poll(log, text, seconds, PAUSE_SECONDS):
            for trainer in sorted(wanted):
                if (recording := client.tracing.left_by(trainer, number)) is not None:
                    found.append(recording)
                    wanted.discard(trainer)
            if not wanted or hurried() or client.failure is not None:
                break
        return {f"trainer {trainer}": "it left no spans" for trainer in sorted(wanted)}


def _of_server(client: Client, number: int) -> Recording:
    calls = client.tracing
    calls.ask_clock()
    clock = _known(calls.clock, str(client))
    recording = calls.end(number, client.index)
    recording.offset_ns, recording.bound_ns = clock.offset_ns, clock.bound_ns
    recording.clock = f"the shortest of {clock.rounds} rounds of trainer 0"
    return recording


def _known(clock: Estimate | None, name: str) -> Estimate:
    if clock is None:
        raise Unreachable(f"{name}: its clock is not known")
    return clock
