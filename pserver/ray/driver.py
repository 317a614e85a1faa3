"""``pserver.ray.run``: attempts at a job on the nodes of a Ray cluster, one after the other."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pserver.launcher.log_file import LogFile
from pserver.launcher.processes import Terminal
from pserver.launcher.supervisor import LEAVE_SECONDS, REASON_SECONDS
from pserver.polling import poll
from pserver.ray.actor import (
    ActorPlace,
    Credentials,
    JobKeys,
    JobRequest,
    ProcessEnd,
    RoleActor,
    StartRequest,
    Target,
    own_variables,
    ray_library,
)
from pserver.running_clock import RUNNING
from pserver.timeouts import KILL_SECONDS
from pserver.transport.endpoint import spell

# ---- failures ----
#
# The process that is the cause of a failure, and the error about it.


@dataclass(frozen=True)
class Failure:
    """A process that has failed.

    Attributes:
        kind: "server" or "trainer".
        number: which of them.
        node: the address of its node; "" where it never had one.
        status: its exit status, or 128 + the signal that killed it; None: it was lost with its
            actor, and is not known.
        tail: its last lines.
        told: its line about the error by which another process has ended it; "" where there is
            none.
        gone: why its actor is gone, in Ray's words; "" where it is there.
    """

    kind: str
    number: int
    node: str
    status: int | None
    tail: tuple[str, ...] = ()
    told: str = ""
    gone: str = ""

    @property
    def name(self) -> str:
        """``"trainer 0"``."""
        return f"{self.kind} {self.number}"

    def __str__(self) -> str:
        """One sentence, without the last lines."""
        where = f"{self.name} on node {self.node}" if self.node else self.name
        if self.status is None:
            return f"{where} was lost with its actor: {self.gone}"
        said = f", reported by others: {self.told}" if self.told else ""
        return f"{where} failed with status {self.status}{_killer(self.status)}{said}"


class ProcessFailed(RuntimeError):
    """A process of a job on Ray failed, and the job is not started again.

    Attributes:
        failures: the processes that failed by themselves, the likeliest cause first.
        exit_status: of the first one, for ``sys.exit``; 1 where it is not known.
    """

    def __init__(self, failures: Sequence[Failure], restarts: int) -> None:
        self.failures = by_cause(failures)
        first = self.failures[0]
        self.exit_status = first.status or 1
        lines = [f"{first}; its last lines:" if first.tail else str(first)]
        lines += [f"    {line}" for line in first.tail]
        lines += [str(other) for other in self.failures[1:]]
        if restarts:
            lines.append(f"the job was started {restarts + 1} times")
        super().__init__("\n".join(lines))


def by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """The likeliest cause first: processes that are gone with their actors, those that a signal
    killed, those that received no report of another's end, then the others; of each trainers, then
    servers, in the order in which they ended.
    """
    return sorted(
        failures,
        key=lambda each: (
            each.status is not None,
            (each.status or 0) < 128,
            bool(each.told),
            each.kind == "server",
        ),
    )


def _killer(status: int) -> str:
    """The signal that a status of 128 and more stands for, as part of a sentence."""
    if status - 128 not in {each.value for each in signal.Signals}:
        return ""
    return f" (killed by {signal.Signals(status - 128).name})"


# ---- placement ----
#
# The placement group of a job: a bundle of resources for each of its processes.


WAKE_SECONDS = 1.0  # Ctrl-C is not seen while Ray waits


@contextmanager
def placed(request: JobRequest) -> Iterator[Any]:
    """A group with the resources of every process, servers first; removed at the end.

    Raises:
        TimeoutError: the cluster has not had the resources within ``start_timeout``; the message
            has the request, and what the cluster has.
    """
    ray = ray_library()
    bundles = [_needed(request, kind) for kind, _ in request.processes()]
    group = ray.util.placement_group(bundles, strategy=request.strategy)
    try:
        wait_for(group, request)
        yield group
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster itself is gone
            ray.util.remove_placement_group(group)


def wait_for(group: Any, request: JobRequest) -> None:
    """Returns when every bundle has its resources; after a node's end Ray looks for others.

    Raises:
        TimeoutError: see :func:`placed`.
    """
    ray = ray_library()
    end = RUNNING() + request.start_timeout
    while (left := end - RUNNING()) > 0:
        if group.wait(min(left, WAKE_SECONDS)):
            return
    raise TimeoutError(
        f"expected resources for the job within {request.start_timeout:g} s: {request.strategy} of "
        f"{_asked(request)}; the cluster has {_amounts(ray.cluster_resources())}, of which "
        f"{_amounts(ray.available_resources())} is free, on {_nodes(ray)}"
    )


def actor_options(request: JobRequest, group: Any, kind: str, bundle: int) -> dict[str, Any]:
    """Ray's options of an actor: all of its bundle, and no restart by itself.

    Args:
        kind: "server" or "trainer".
        bundle: its index in the group.
    """
    scheduling = ray_library().util.scheduling_strategies
    needs = _needed(request, kind)
    named = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0)}
    memory = {"memory": needs.pop("memory")} if "memory" in needs else {}
    return {
        **named,
        **memory,
        "resources": needs,
        "max_restarts": 0,  # a job starts again as a whole
        "max_task_retries": 0,
        "max_concurrency": 4,  # news, while it is asked to start or to stop
        "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    }


def _needed(request: JobRequest, kind: str) -> dict[str, float]:
    """Removes resources with the amount 0, as Ray refuses a bundle with one."""
    return {name: amount for name, amount in request.resources(kind).items() if amount}


def _asked(request: JobRequest) -> str:
    counts = Counter(kind for kind, _ in request.processes())
    return " and ".join(
        f"{count} {kind}{'s' if count > 1 else ''} with {_amounts(request.resources(kind))} each"
        for kind, count in counts.items()
    )


def _amounts(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that stand for nodes, groups, and Ray's own store."""
    shown = [
        f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if amount
        and not name.startswith(("node:", "bundle", "object_store_memory"))
        and "_group_" not in name
    ]
    return ", ".join(shown) or "nothing"


def _nodes(ray: Any) -> str:
    alive = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"{alive} node{'' if alive == 1 else 's'}"


# ---- workers ----
#
# The actors of one attempt, and what they have said.
#
# The driver has one question out to each actor whose process runs: what is new?  An actor answers
# when something is, so that lines arrive as they are printed.


NEWS_SECONDS = 10.0  # an actor without news answers after this time
ACTORS_SECONDS = 2 * KILL_SECONDS + 4.0  # for actors to end their processes, and to answer
MOST_WORDS = 400  # of Ray's about an actor that is gone
Say = Callable[[str, str], None]


@dataclass(eq=False)
class RayProcess:
    """One actor, and the known state of its process.

    Attributes:
        bundle: its index in the placement group.
        place: None until it has reported it.
        endpoint: of a server that is ready; "" until then.
        ended: None while its process runs.
        gone: why the actor is gone, in Ray's words; "" while it is there.
        broken: its process could not even begin, and would not another time.
    """

    kind: str
    number: int
    bundle: int
    actor: Any
    place: ActorPlace | None = None
    endpoint: str = ""
    ended: ProcessEnd | None = None
    gone: str = ""
    broken: bool = False

    @property
    def name(self) -> str:
        """``"trainer 0"``."""
        return f"{self.kind} {self.number}"

    @property
    def over(self) -> bool:
        """Whether no more news comes from it."""
        return self.ended is not None or bool(self.gone)

    @property
    def failure(self) -> Failure | None:
        """Its failure, if it has failed."""
        node = self.place.address if self.place else ""
        if self.gone:
            return Failure(self.kind, self.number, node, None, gone=self.gone)
        if self.ended is None or self.ended.status == 0:
            return None
        ended = self.ended
        return Failure(self.kind, self.number, node, ended.status, ended.tail, ended.told)


class WorkerGroup:
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
            RayProcess(kind, number, bundle, self._actor(kind, number, bundle))
            for bundle, (kind, number) in enumerate(request.processes())
        ]
        self._asked: dict[Any, RayProcess] = {}  # by what Ray will answer

    def _actor(self, kind: str, number: int, bundle: int) -> Any:
        options = actor_options(self._request, self._group, kind, bundle)
        return self._made.options(**options).remote(kind, number)

    def place_again(self) -> None:
        """Makes new actors in place of those that are gone without having reported their place: Ray
        placed them before it knew that their node had died.

        Raises:
            TimeoutError: the cluster does not have their resources any more.
        """
        wait_for(self._group, self._request)
        for member in self.members:
            if member.gone and not member.place and not member.broken:
                member.actor = self._actor(member.kind, member.number, member.bundle)
                member.gone = ""

    def of(self, kind: str) -> list[RayProcess]:
        """Its servers, or its trainers."""
        return [member for member in self.members if member.kind == kind]

    @property
    def failed(self) -> bool:
        """Whether a process has failed."""
        return any(member.failure for member in self.members)

    @property
    def failures(self) -> list[Failure]:
        """The failures so far."""
        return [failure for member in self.members if (failure := member.failure)]

    def answers(
        self, members: Sequence[RayProcess], ask: Callable[[RayProcess], Any], seconds: float
    ) -> dict[RayProcess, Any]:
        """Their answers to a call; none of one whose actor is gone.

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

        Call it for processes that have been started; others have no news.
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

    def ask_news(self, members: Sequence[RayProcess]) -> None:
        """Begins to follow these processes."""
        for member in members:
            if not member.over:
                self._asked[member.actor.events.remote(NEWS_SECONDS)] = member

    def _take(self, member: RayProcess, answer: Any) -> None:
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
                self._ray.wait(calls, num_returns=len(calls), timeout=ACTORS_SECONDS)
        finally:
            for member in self.members:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(member.actor, no_restart=True)


def _words(error: Exception) -> str:
    """Ray's message, on one line."""
    said = " ".join(str(error).split())
    return said if len(said) <= MOST_WORDS else f"{said[:MOST_WORDS]} ..."


# ---- attempt ----
#
# One start of all processes of a job: servers, then trainers, until all have ended.


PAUSE_SECONDS = 0.5  # between two tries to place an actor

log = logging.getLogger(__name__)


class AttemptFailed(Exception):
    """Raised when a process has failed and all others have ended.

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
        workers: its actors.
    """

    def __init__(self, request: JobRequest, workers: WorkerGroup) -> None:
        self._request, self._workers = request, workers
        self._credentials: dict[RayProcess, Credentials] = {}

    def run(self) -> tuple[Any, ...]:
        """Returns when every trainer has ended well, with what their functions have returned.

        Raises:
            AttemptFailed: a process has failed.
            TimeoutError: an actor or a server is not there within ``start_timeout``.
            FileNotFoundError: a node does not have the script.
        """
        workers = self._workers
        try:
            end = RUNNING() + self._request.start_timeout
            keys = self._meet(end)
            self._start_servers(keys, end)
            self._start_trainers()
            self._follow(lambda: all(each.over for each in workers.of("trainer")), None)
            self._follow(lambda: all(each.over for each in workers.of("server")), LEAVE_SECONDS)
        finally:
            workers.end()
        return tuple(each.ended.value for each in workers.of("trainer") if each.ended)

    def _meet(self, end: float) -> JobKeys:
        """Learns the places of the actors; makes the keys of the job."""
        workers = self._workers
        places: dict[RayProcess, ActorPlace] = {}
        seconds = end - RUNNING()
        for waited in poll(log, self._unplaced, seconds, PAUSE_SECONDS):
            if waited:
                workers.place_again()
            new = [member for member in workers.members if member.place is None]
            answers = workers.answers(new, lambda member: member.actor.place.remote(), seconds)
            for member, place in answers.items():
                member.place = places[member] = place
            if not any(each.gone and not each.broken for each in workers.members):
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
        names = ", ".join(each.name for each in self._workers.members if not each.place)
        return f"waiting for Ray to place {names} on other nodes"

    def _start_servers(self, keys: JobKeys, end: float) -> None:
        workers, request = self._workers, self._request
        servers = workers.of("server")

        def start(member: RayProcess) -> Any:
            assert member.place is not None, "it has said where it is"
            endpoint = spell(keys.host(member.place.address), 0)
            variables = own_variables(request, "server", member.number)
            flags = ("--endpoint", endpoint, *request.server_flags)
            return member.actor.start.remote(
                StartRequest(variables, self._credentials[member], flags)
            )

        workers.answers(servers, start, request.start_timeout)
        workers.ask_news(servers)
        if not self._follow(lambda: all(each.endpoint for each in servers), end - RUNNING()):
            late = ", ".join(each.name for each in servers if not each.endpoint)
            raise TimeoutError(
                f"{late}: expected a server that is ready within {request.start_timeout:g} s"
            )

    def _start_trainers(self) -> None:
        workers, request = self._workers, self._request
        endpoints = [server.endpoint for server in workers.of("server")]
        trainers = workers.of("trainer")

        def start(member: RayProcess) -> Any:
            variables = own_variables(request, "trainer", member.number, endpoints)
            order = StartRequest(variables, self._credentials[member], folder=os.getcwd())
            if request.is_function:
                return member.actor.prepare.remote(order)
            return member.actor.start.remote(_with_script(order, request))

        workers.answers(trainers, start, request.start_timeout)
        if request.is_function:
            workers.answers(
                trainers,
                lambda member: member.actor.train.remote(request.target, request.arguments),
                request.start_timeout,
            )
        workers.ask_news(trainers)

    def _follow(self, condition: Any, seconds: float | None) -> bool:
        """Follows the group until a process fails.

        Raises:
            AttemptFailed: one has.
        """
        workers = self._workers
        followed = workers.follow(lambda: condition() or workers.failed, seconds)
        self._check()
        return followed

    def _check(self) -> None:
        """Returns if no process has failed.

        After a failure the others have time to end by themselves: one of them may know the reason
        better.

        Raises:
            AttemptFailed: one has.
        """
        workers = self._workers
        if workers.failed:
            workers.follow(lambda: all(each.over for each in workers.members), REASON_SECONDS)
            raise AttemptFailed(workers.failures)


def _with_script(order: StartRequest, request: JobRequest) -> StartRequest:
    """The order with the script, by its path here and by that from the working directory."""
    whole = os.path.abspath(request.script)
    return StartRequest(
        order.variables,
        order.credentials,
        script=whole,
        near=os.path.relpath(whole),
        folder=order.folder,
        arguments=tuple(request.arguments),
    )


# ---- output ----
#
# The lines of all processes, at the driver.


class Output:
    """Standard output of the driver, and a file for each process; a context manager.

    Args:
        width: characters of the longest process name.
        log_dir: the folder of ``server-0.log``, ``trainer-0.log``, ...; None: there are no files.
    """

    def __init__(self, width: int, log_dir: str | None) -> None:
        self._terminal = Terminal(sys.stdout, width)
        self._folder = None if log_dir is None else Path(log_dir)
        self._files: dict[str, LogFile] = {}
        self._stack = ExitStack()

    def line(self, name: str, text: str) -> None:
        """A line of a process."""
        self._terminal.line(name, text)
        if self._folder is not None:
            if name not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{name.replace(' ', '-')}.log"
                self._files[name] = LogFile(path, True, self._say)
                self._stack.callback(self._files[name].close)
            self._files[name].add(text)

    def _say(self, text: str) -> None:
        self._terminal.line("driver", text)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# ---- job ----
#
# ``run``: a job on Ray, from its placement group to its end.


MOST_FUNCTION = 65_536  # bytes of a function with its arguments: Ray gives up to 100 KB inline


@dataclass(frozen=True)
class Result:
    """A job that has ended well: every process with status 0.

    Attributes:
        values: what each trainer's function has returned; None for each script.
        restarts: how often the job was started again.
    """

    values: tuple[Any, ...]
    restarts: int


def run(
    target: Target,
    *,
    servers: int = 1,
    trainers: int = 1,
    arguments: Sequence[Any] = (),
    server_resources: Mapping[str, float] | None = None,
    trainer_resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    server_flags: Sequence[str] = (),
    strategy: str = "PACK",
    start_timeout: float = 300.0,
    log_dir: str | None = None,
) -> Result:
    """Runs a job on the Ray cluster that this process is connected to, until it has ended.

    Where it is not connected, it calls ``ray.init()``, and ``ray.shutdown()`` at the end.  What the
    processes print appears on standard output, as ``trainer 0 | loss 0.03``.  However it ends, no
    process, actor or placement group of the job is left.

    Example::

        import pserver.ray

        pserver.ray.run("train.py", servers=2, trainers=4, trainer_resources={"GPU": 1})

    Args:
        target: the path of a script, which each trainer runs in a process; or a function, which
            each trainer calls in its actor's process.  Ray pickles the function: it may be of the
            driver's own script.
        servers, trainers: how many of each, 1 or more.
        arguments: of the script (texts), or of the function.
        server_resources, trainer_resources: what Ray reserves for each of them: "CPU", "GPU",
            "memory" in bytes, or resources of the cluster's own; one CPU unless said otherwise.  A
            process has as many threads as CPUs.
        max_restarts: how often the whole job is started again after a process has failed, or is
            gone with its node.  The script resumes from its checkpoint, by ``fleet.load``.
        environment: variables of all processes, as PSERVER_TRANSPORT or PSERVER_KEYS.
        server_flags: of ``pserver serve``, as ``("--data-dir", "/shared/job")``.
        strategy: of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        start_timeout: seconds for the cluster to have the resources, and then for the actors and
            servers of each attempt to be there.
        log_dir: a folder, on the driver's machine, for a file of each process's lines.

    Returns:
        What the functions have returned, and how often the job was started again.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: an argument is wrong; one sentence.  Also a function that is too
            large: data does not go through Ray.
        FileNotFoundError: a node does not have the script.
        TimeoutError: the cluster does not have the resources, or an actor or a server is not there
            in time.
        ProcessFailed: a process failed, after all restarts; the message has its number, its node,
            its status and its last lines.
    """
    request = JobRequest(
        target,
        servers,
        trainers,
        tuple(arguments) if isinstance(arguments, list) else arguments,
        server_resources,
        trainer_resources,
        max_restarts,
        environment,
        server_flags,
        strategy,
        start_timeout,
        log_dir,
    )
    _check_size(request)
    width = len(f"trainer {trainers - 1}")
    with _connected(), Output(width, log_dir) as output, placed(request) as group:
        for restarts in range(max_restarts + 1):
            wait_for(group, request)  # after the end of a node Ray looks for others
            try:
                values = Attempt(request, WorkerGroup(request, group, output.line)).run()
                return Result(values, restarts)
            except AttemptFailed as error:
                if restarts == max_restarts:
                    raise ProcessFailed(error.failures, restarts) from None
                cause = by_cause(error.failures)[0]
                log.warning(
                    "%s; the job starts again (%d of %d)", cause, restarts + 1, max_restarts
                )
    raise AssertionError("the last attempt returns or raises")


def _check_size(request: JobRequest) -> None:
    """Returns if a function is small enough for Ray.

    Raises:
        ValueError: it is not.
    """
    if not request.is_function:
        return
    size = len(ray_library().cloudpickle.dumps((request.target, tuple(request.arguments))))
    if size > MOST_FUNCTION:
        raise ValueError(
            f"target: expected a function of at most {MOST_FUNCTION} bytes with its arguments and "
            f"what it refers to, got {size}: Ray carries no data for a job; read it in the function"
        )


@contextmanager
def _connected() -> Iterator[None]:
    """Connects this process to Ray while the block runs."""
    ray = ray_library()
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()
