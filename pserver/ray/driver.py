"""The actors of one attempt, and what they have said.

The driver has one question out to each actor whose process runs: what is new?  An actor answers
when something is, so that lines arrive as they are printed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pserver.launcher.supervisor import GRACE_SECONDS
from pserver.ray.failures import Failure
from pserver.ray.installed import ray_library
from pserver.ray.news import Ended, Place
from pserver.ray.placement import actor_options, wait_for
from pserver.ray.request import JobRequest
from pserver.ray.role_actor import RoleActor
from pserver.running_clock import RUNNING

NEWS_SECONDS = 10.0  # an actor without news answers after this time
STOP_SECONDS = 2 * GRACE_SECONDS + 4.0
MOST_WORDS = 400  # of Ray's about an actor that is gone
Say = Callable[[str, str], None]


@dataclass(eq=False)
class Member:
    """One actor, and what is known of its process.

    Attributes:
        bundle: its index in the placement group.
        place: None until it has said where it is.
        endpoint: of a server that is ready; "" until then.
        ended: None while its process runs.
        gone: why the actor is gone, in Ray's words; "" while it is there.
        broken: its process could not even begin, and would not another time.
    """

    kind: str
    number: int
    bundle: int
    actor: Any
    place: Place | None = None
    endpoint: str = ""
    ended: Ended | None = None
    gone: str = ""
    broken: bool = False

    @property
    def name(self) -> str:
        """``"trainer 0"``."""
        return f"{self.kind} {self.number}"

    @property
    def over(self) -> bool:
        """Whether nothing more comes from it."""
        return self.ended is not None or bool(self.gone)

    @property
    def failure(self) -> Failure | None:
        """How it has failed, if it has."""
        node = self.place.address if self.place else ""
        if self.gone:
            return Failure(self.kind, self.number, node, None, gone=self.gone)
        if self.ended is None or self.ended.status == 0:
            return None
        ended = self.ended
        return Failure(self.kind, self.number, node, ended.status, ended.tail, ended.told)


class Company:
    """All actors of an attempt.  One thread calls it.

    Args:
        request: the job.
        group: the placement group.
        say: called with a process's name and each of its lines.

    Attributes:
        members: servers first.
    """

    def __init__(self, request: JobRequest, group: Any, say: Say) -> None:
        self._ray, self._say = ray_library(), say
        self._request, self._group = request, group
        self._made = self._ray.remote(RoleActor)
        self.members = [
            Member(kind, number, bundle, self._actor(kind, number, bundle))
            for bundle, (kind, number) in enumerate(request.processes())
        ]
        self._asked: dict[Any, Member] = {}  # by what Ray will answer

    def _actor(self, kind: str, number: int, bundle: int) -> Any:
        options = actor_options(self._request, self._group, kind, bundle)
        return self._made.options(**options).remote(kind, number)

    def place_again(self) -> None:
        """New actors in place of those that are gone and never said where they were: Ray placed
        them before it knew that their node had died.

        Raises:
            TimeoutError: the cluster does not have their resources any more.
        """
        wait_for(self._group, self._request)
        for member in self.members:
            if member.gone and not member.place and not member.broken:
                member.actor = self._actor(member.kind, member.number, member.bundle)
                member.gone = ""

    def of(self, kind: str) -> list[Member]:
        """Its servers, or its trainers."""
        return [member for member in self.members if member.kind == kind]

    @property
    def failed(self) -> bool:
        """Whether a process has failed."""
        return any(member.failure for member in self.members)

    @property
    def failures(self) -> list[Failure]:
        """Those that have."""
        return [failure for member in self.members if (failure := member.failure)]

    def answers(
        self, members: Sequence[Member], ask: Callable[[Member], Any], seconds: float
    ) -> dict[Member, Any]:
        """What they answer to a call; of one whose actor is gone nothing.

        Args:
            ask: makes the call.

        Raises:
            TimeoutError: some have not answered within that time.
            Exception: what the call has raised in an actor.
        """
        asked = {ask(member): member for member in members if not member.over}
        done, late = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        if late:
            names = ", ".join(asked[each].name for each in late)
            raise TimeoutError(f"{names}: expected an answer within {seconds:.3g} s, got none")
        found = {}
        for each in done:
            try:
                found[asked[each]] = self._ray.get(each)
            except self._ray.exceptions.RayActorError as error:
                asked[each].gone = _words(error)
                asked[each].broken = bool(error.actor_init_failed)
            except self._ray.exceptions.RayTaskError as error:
                raise getattr(error, "cause", error) from None
        return found

    def follow(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Takes news until the condition holds (True) or the time is over (False).

        Call it for processes that have been started; of others there are no news.
        """
        end = None if seconds is None else RUNNING() + seconds
        while not condition():
            left = NEWS_SECONDS if end is None else end - RUNNING()
            if left <= 0:
                return False
            if not self._asked:
                return condition()
            done, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=left)
            for each in done:
                self._take(self._asked.pop(each), each)
        return True

    def ask_news(self, members: Sequence[Member]) -> None:
        """From now on they are followed."""
        for member in members:
            if not member.over:
                self._asked[member.actor.news.remote(NEWS_SECONDS)] = member

    def _take(self, member: Member, answer: Any) -> None:
        try:
            news = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            member.gone = _words(error)
            return
        if news.left_out:
            self._say(member.name, f"... {news.left_out} lines came too fast, and are left out")
        for line in news.lines:
            self._say(member.name, line)
        member.endpoint, member.ended = news.endpoint, news.ended
        self.ask_news([member])

    def end(self) -> None:
        """Ends every process and every actor, and returns when they are gone."""
        try:
            there = [member for member in self.members if not member.gone and member.place]
            calls = [member.actor.stop.remote(signal.SIGTERM.value) for member in there]
            if calls:
                self._ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS)
        finally:
            for member in self.members:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(member.actor, no_restart=True)


def _words(error: Exception) -> str:
    """What Ray says, on one line."""
    said = " ".join(str(error).split())
    return said if len(said) <= MOST_WORDS else f"{said[:MOST_WORDS]} ..."
