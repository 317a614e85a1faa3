"""One start of all processes of a job: servers, then trainers, until all have ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from pserver.launcher.supervisor import LEAVE_SECONDS, REASON_SECONDS
from pserver.polling import poll
from pserver.ray.company import Company, Member
from pserver.ray.failures import Failure
from pserver.ray.news import Place
from pserver.ray.node_keys import JobKeys
from pserver.ray.order import Credentials, Order
from pserver.ray.request import JobRequest
from pserver.ray.variables import own_variables
from pserver.running_clock import RUNNING
from pserver.transport.endpoint import spell

PAUSE_SECONDS = 0.5  # between two tries to place an actor

log = logging.getLogger(__name__)


class AttemptFailed(Exception):
    """A process has failed; all others have ended.

    Attributes:
        failures: of which processes.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(str(failure) for failure in failures))
        self.failures = list(failures)


class Attempt:
    """A start of the job.

    Args:
        request: the job.
        company: its actors.
    """

    def __init__(self, request: JobRequest, company: Company) -> None:
        self._request, self._company = request, company
        self._credentials: dict[Member, Credentials] = {}

    def run(self) -> tuple[Any, ...]:
        """Returns when every trainer has ended well, with what their functions have returned.

        Raises:
            AttemptFailed: a process has failed.
            TimeoutError: an actor or a server is not there within ``start_timeout``.
            FileNotFoundError: a node does not have the script.
        """
        company = self._company
        try:
            end = RUNNING() + self._request.start_timeout
            keys = self._meet(end)
            self._start_servers(keys, end)
            self._start_trainers()
            self._follow(lambda: all(each.over for each in company.of("trainer")), None)
            self._follow(lambda: all(each.over for each in company.of("server")), LEAVE_SECONDS)
        finally:
            company.end()
        return tuple(each.ended.value for each in company.of("trainer") if each.ended)

    def _meet(self, end: float) -> JobKeys:
        """Learns where the actors are; makes the keys of the job."""
        company = self._company
        places: dict[Member, Place] = {}
        seconds = end - RUNNING()
        for waited in poll(log, self._unplaced, seconds, PAUSE_SECONDS):
            if waited:
                company.place_again()
            new = [member for member in company.members if member.place is None]
            answers = company.answers(new, lambda member: member.actor.place.remote(), seconds)
            for member, place in answers.items():
                member.place = places[member] = place
            if not any(each.gone and not each.broken for each in company.members):
                break
        self._check()
        addresses = [place.address for place in places.values()]
        keys = JobKeys(addresses, self._request.environment or {})
        for member, place in places.items():
            self._credentials[member] = keys.credentials(
                member.kind, place.address, place.public_key
            )
        return keys

    def _unplaced(self) -> str:
        names = ", ".join(each.name for each in self._company.members if not each.place)
        return f"waiting for Ray to place {names} on other nodes"

    def _start_servers(self, keys: JobKeys, end: float) -> None:
        company, request = self._company, self._request
        servers = company.of("server")

        def start(member: Member) -> Any:
            assert member.place is not None, "it has said where it is"
            endpoint = spell(keys.host(member.place.address), 0)
            variables = own_variables(request, "server", member.number)
            flags = ("--endpoint", endpoint, *request.server_flags)
            return member.actor.start.remote(Order(variables, self._credentials[member], flags))

        company.answers(servers, start, request.start_timeout)
        company.ask_news(servers)
        if not self._follow(lambda: all(each.endpoint for each in servers), end - RUNNING()):
            late = ", ".join(each.name for each in servers if not each.endpoint)
            raise TimeoutError(
                f"{late}: expected a server that is ready within {request.start_timeout:g} s"
            )

    def _start_trainers(self) -> None:
        company, request = self._company, self._request
        endpoints = [server.endpoint for server in company.of("server")]
        trainers = company.of("trainer")

        def start(member: Member) -> Any:
            variables = own_variables(request, "trainer", member.number, endpoints)
            order = Order(variables, self._credentials[member], folder=os.getcwd())
            if request.is_function:
                return member.actor.prepare.remote(order)
            return member.actor.start.remote(_with_script(order, request))

        company.answers(trainers, start, request.start_timeout)
        if request.is_function:
            company.answers(
                trainers,
                lambda member: member.actor.train.remote(request.target, request.arguments),
                request.start_timeout,
            )
        company.ask_news(trainers)

    def _follow(self, condition: Any, seconds: float | None) -> bool:
        """As the company's, until a process fails.

        Raises:
            AttemptFailed: one has.
        """
        company = self._company
        followed = company.follow(lambda: condition() or company.failed, seconds)
        self._check()
        return followed

    def _check(self) -> None:
        """Returns if no process has failed.

        After a failure the others have time to end by themselves: one of them may know the reason
        better.

        Raises:
            AttemptFailed: one has.
        """
        company = self._company
        if company.failed:
            company.follow(lambda: all(each.over for each in company.members), REASON_SECONDS)
            raise AttemptFailed(company.failures)


def _with_script(order: Order, request: JobRequest) -> Order:
    """The order with the script, by its path here and by that from the working directory."""
    whole = os.path.abspath(request.script)
    return Order(
        order.variables,
        order.credentials,
        script=whole,
        near=os.path.relpath(whole),
        folder=order.folder,
        arguments=tuple(request.arguments),
    )
