"""``pserver.ray.run``: attempts at a job on the nodes of a Ray cluster, one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pserver.config import MOST_JOB_NAME, check_seconds
from pserver.launcher.processes import killer
from pserver.launcher.supervisor import LEAVE_SECONDS, REASON_SECONDS
from pserver.polling import poll
from pserver.ray.actor import (
    ActorPlace,
    FunctionActor,
    JobKeys,
    ProcessEnd,
    ScriptActor,
    ServerActor,
    StartRequest,
    ray_library,
)
from pserver.running_clock import RUNNING
from pserver.timeouts import KILL_SECONDS
from pserver.transport.endpoint import spell

log = logging.getLogger(__name__)

# ---- request ----
#
# The arguments of ``run``, and their checks.  Ray checks those that it gets.


# The settings of a process that follow from its place in the job, or from the actor that starts it.
OUR_SETTINGS = (
    "TRAINING_ROLE",
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "PSERVER_TOKEN_FILE",
    "PSERVER_METRICS",
)
FLAGS_OF_OURS = ("--endpoint", "--once", "--keys", "--insecure", "--metrics", "--keep-failed")
Target = str | os.PathLike[str] | Callable[..., Any]


@dataclass(frozen=True)
class JobRequest:
    """A job, as :func:`pserver.ray.run` has been asked for it; see there for each field.

    Attributes:
        resources: by kind, "server" or "trainer".

    Raises:
        TypeError: a field is of another type.
        ValueError: there is no such script, or a field is out of its range or has no effect; one
            sentence.
    """

    target: Target
    servers: int
    trainers: int
    arguments: Sequence[Any]
    resources: Mapping[str, Mapping[str, float]]
    max_restarts: int
    environment: Mapping[str, str]
    server_flags: Sequence[str]
    strategy: str
    start_timeout: float

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("trainers", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected a whole number from {least} on, got {value!r}")
        for name in ("arguments", "server_flags"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected a list, got the text {getattr(self, name)!r}")
        check_seconds("start_timeout", self.start_timeout)
        if self.script and not os.path.isfile(self.script):
            raise ValueError(f"target: expected a script, and there is no file {self.script!r}")
        for argument in self.arguments if self.script else ():
            if not isinstance(argument, str):
                raise TypeError(f"arguments: a script's are texts, got {argument!r}")
        for flag in self.server_flags:
            if flag.partition("=")[0] in FLAGS_OF_OURS:
                raise ValueError(f"server_flags: pserver.ray.run sets {flag}: leave it out")
        for variable, value in self.environment.items():
            if not isinstance(value, str):
                raise TypeError(f"environment: expected a text for {variable}, got {value!r}")
            if variable in OUR_SETTINGS:
                raise ValueError(f"environment: {variable} follows from the job's place on Ray")
        for kind, resources in self.resources.items():
            for name, amount in resources.items():
                if not amount > 0:  # Ray takes it
                    raise ValueError(
                        f"{kind}_resources: expected 0 or more of {name}, got {amount}"
                    )

    @property
    def script(self) -> str:
        """The absolute path of the script; "": the target is a function.

        Raises:
            TypeError: it is neither.
        """
        return "" if callable(self.target) else os.path.abspath(self.target)

    @property
    def processes(self) -> list[tuple[str, int]]:
        """The kind and the number of each process: servers first."""
        counts = (("server", self.servers), ("trainer", self.trainers))
        return [(kind, number) for kind, count in counts for number in range(count)]

    def variables(self, kind: str, number: int, endpoints: Sequence[str] = ()) -> dict[str, str]:
        """The variables of a process, besides those of its node.

        Args:
            kind: "server" or "trainer".
            endpoints: of all servers, for a trainer.
        """
        job = Path(self.script).stem or getattr(self.target, "__name__", "function")
        threads = str(max(1, int(self.resources[kind].get("CPU", 1))))
        role = {
            "TRAINING_ROLE": "TRAINER",
            "PSERVER_ENDPOINTS": ",".join(endpoints),
            "TRAINERS": str(self.trainers),
            "TRAINER_ID": str(number),
        }
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "PSERVER_JOB": job[:MOST_JOB_NAME],
            **self.environment,
            **(role if kind == "trainer" else {}),
        }


class ProcessFailed(RuntimeError):
    """A process of a job on Ray failed, and the job is not started again.

    Attributes:
        failures: the ends of the processes that failed by themselves, the likeliest cause first:
            those lost with their actors, those killed by a signal, those without a report of
            another's end, then the others; of each trainers, then servers.
        exit_status: of the first one, for ``sys.exit``; 1 where it is not known.
    """

    def __init__(self, failures: Sequence[ProcessEnd], restarts: int) -> None:
        self.failures = sorted(
            failures,
            key=lambda each: (
                each.status is not None,
                killer(each.status) is None,
                bool(each.told),
                each.name.startswith("server"),
            ),
        )
        first = self.failures[0]
        self.exit_status = first.status or 1
        lines = [f"{first}; its last lines:" if first.tail else str(first)]
        lines += [f"    {line}" for line in first.tail]
        lines += [str(other) for other in self.failures[1:]]
        if restarts:
            lines.append(f"the job was started {restarts + 1} times")
        super().__init__("\n".join(lines))


# ---- placement ----
#
# The placement group of a job: a bundle of resources for each of its processes.


WAKE_SECONDS = 1.0  # Ctrl-C is not seen while Ray waits for a group


@contextmanager
def placed(request: JobRequest) -> Iterator[Any]:
    """A group with a bundle for every process, servers first; removed at the end."""
    ray = ray_library()
    bundles = [request.resources[kind] for kind, _ in request.processes]
    group = ray.util.placement_group(bundles, strategy=request.strategy)
    try:
        yield group
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster itself is gone
            ray.util.remove_placement_group(group)


def wait_for(group: Any, request: JobRequest) -> None:
    """Returns when every bundle has its resources; after a node's end Ray looks for others.

    Raises:
        TimeoutError: the cluster has not had the resources within ``start_timeout``; the message
            has the request, and the resources of the cluster.
    """
    end = RUNNING() + request.start_timeout
    while (left := end - RUNNING()) > 0:
        if group.wait(min(left, WAKE_SECONDS)):
            return
    ray = ray_library()
    asked = " and ".join(
        f"{count} x {request.resources[kind]} for {kind}s"
        for kind, count in (("server", request.servers), ("trainer", request.trainers))
    )
    there, free = (
        {name: amount for name, amount in found.items() if ":" not in name and "_group" not in name}
        for found in (ray.cluster_resources(), ray.available_resources())
    )
    raise TimeoutError(
        f"expected resources for the job within {request.start_timeout:g} s: {request.strategy} of "
        f"{asked}; the cluster has {there}, of which {free} is free"
    )


def actor_options(resources: Mapping[str, float], group: Any, bundle: int) -> dict[str, Any]:
    """Ray's options of an actor: all of its bundle, whose index in the group is given."""
    scheduling = ray_library().util.scheduling_strategies
    others = dict(resources)
    return {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
        "memory": others.pop("memory", None),
        "resources": others,
        "max_restarts": 0,  # a job starts again as a whole
        "max_task_retries": 0,
        "max_concurrency": 4,  # a call waits for the end, while another stops the process
        "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(group, bundle),
    }


# ---- attempt ----
#
# One start of all processes of a job: servers, then trainers, until all have ended.


PAUSE_SECONDS = 0.5  # between two tries to place an actor
STOP_SECONDS = 2 * KILL_SECONDS + 4.0  # for actors to end their processes, and to answer


@dataclass(eq=False)
class RayProcess:
    """One actor, and its answers; each is None until it is there.

    Attributes:
        place: where it is.
        endpoint: of a server that is ready; "" for a trainer that has been started.
        end: of its process, or of the actor.
        broken: the actor was placed, and could not be made there.
    """

    kind: str
    number: int
    actor: Any = None
    place: ActorPlace | None = None
    endpoint: str | None = None
    end: ProcessEnd | None = None
    broken: bool = False

    @property
    def name(self) -> str:
        """``"trainer 0"``."""
        return f"{self.kind} {self.number}"

    @property
    def lost(self) -> bool:
        """Whether the actor is lost."""
        return self.end is not None and self.end.status is None

    def fail(self, error: Exception) -> None:
        """Notes Ray's error in place of an answer; a known failure of the process stays."""
        node = self.place.address if self.place else ""
        if cause := getattr(error, "cause", None):  # raised by a method of the actor
            end = ProcessEnd(self.name, node, 1, (f"{type(cause).__name__}: {cause}",))
        else:
            end = ProcessEnd(self.name, node, None, told=" ".join(str(error).split()))
        if self.end is None or self.end.status == 0:
            self.end = end
        self.broken = bool(getattr(error, "actor_init_failed", False))


class Attempt:
    """A start of the job.  One thread uses it.

    Args:
        request: the job.
        group: the placement group, which has its resources.
        restarts: the number of attempts before.
    """

    def __init__(self, request: JobRequest, group: Any, restarts: int) -> None:
        self._ray = ray = ray_library()
        self._request, self._group, self._restarts = request, group, restarts
        trainer = ScriptActor if request.script else FunctionActor
        self._classes = {"server": ray.remote(ServerActor), "trainer": ray.remote(trainer)}
        self._members = [RayProcess(kind, number) for kind, number in request.processes]
        self._servers = self._members[: request.servers]
        self._trainers = self._members[request.servers :]
        # unanswered calls: of which actor, and the field that gets the answer
        self._calls: dict[Any, tuple[RayProcess, str]] = {}

    def run(self) -> tuple[Any, ...]:
        """Returns when every trainer has ended well, with the values of their functions.

        Raises:
            ProcessFailed: a process has failed.
            TimeoutError: an actor or a server is not there within ``start_timeout``.
            FileNotFoundError: a node does not have the script.
        """
        request, servers, trainers = self._request, self._servers, self._trainers
        end = RUNNING() + request.start_timeout
        try:
            self._place(end)
            addresses = [each.place.address for each in self._members if each.place]
            keys = JobKeys(addresses, request.environment)
            for each in servers:
                self._calls[each.actor.start.remote(self._order(each, keys))] = each, "endpoint"
                self._calls[each.actor.wait.remote()] = each, "end"
            self._await("endpoint", servers, end)
            for each in trainers:
                self._calls[each.actor.start.remote(self._order(each, keys))] = each, "endpoint"
            self._await("endpoint", trainers, end)
            for each in trainers:
                if request.script:
                    call = each.actor.wait.remote()
                else:
                    call = each.actor.call.remote(request.target, request.arguments)
                self._calls[call] = each, "end"
            self._follow(lambda: all(each.end for each in trainers))
            self._follow(lambda: not self._calls, RUNNING() + LEAVE_SECONDS)
        finally:
            self._end()
        return tuple(each.end.value for each in trainers if each.end)

    def _place(self, end: float) -> None:
        """Makes the actors, and learns their places.

        Ray may place an actor before it knows that the node has died: it is made again.

        Raises:
            ProcessFailed, TimeoutError: see ``_await``; ``wait_for``.
        """
        for waited in poll(log, self._unplaced, end - RUNNING(), PAUSE_SECONDS):
            if waited:
                wait_for(self._group, self._request)
            for bundle, each in enumerate(self._members):
                if each.place is None:
                    options = actor_options(self._request.resources[each.kind], self._group, bundle)
                    each.actor = self._classes[each.kind].options(**options).remote(each.number)
                    each.end = None
                    self._calls[each.actor.place.remote()] = each, "place"
            self._take(lambda: not self._calls, end)
            if self._calls or not self._failures() or any(each.broken for each in self._members):
                break
        self._await("place", self._members, end)

    def _unplaced(self) -> str:
        names = ", ".join(each.name for each in self._members if each.place is None)
        return f"waiting for Ray to place {names} on other nodes"

    def _order(self, member: RayProcess, keys: JobKeys) -> StartRequest:
        request, place = self._request, member.place
        assert place is not None, "it has reported it"
        endpoints = [each.endpoint or "" for each in self._servers]
        variables = request.variables(member.kind, member.number, endpoints)
        credentials = keys.credentials(member.kind, place)
        if member.kind == "server":
            arguments = ("--endpoint", spell(keys.host(place.address), 0), *request.server_flags)
            return StartRequest(variables, credentials, arguments)
        arguments = tuple(request.arguments) if request.script else ()
        return StartRequest(variables, credentials, arguments, os.getcwd(), request.script)

    def _await(self, what: str, members: Sequence[RayProcess], end: float) -> None:
        """Waits until all of them have answered.

        Args:
            what: the field of their answers.

        Raises:
            TimeoutError: they have not until then.
            ProcessFailed: see ``_follow``.
        """
        self._follow(lambda: all(getattr(each, what) is not None for each in members), end)
        if late := [each.name for each in members if getattr(each, what) is None]:
            raise TimeoutError(
                f"{', '.join(late)}: expected its {what} within {self._request.start_timeout:g} s, "
                "got none"
            )

    def _follow(self, until: Callable[[], bool], end: float | None = None) -> None:
        """Takes answers of actors until a condition holds, or the time is over.

        After a failure the other processes have time to end by themselves: one of them may know the
        reason better.

        Raises:
            ProcessFailed: a process has failed.
            FileNotFoundError: a node does not have the script.
        """
        self._take(lambda: until() or bool(self._failures()), end)
        if self._failures():
            self._take(lambda: not self._calls, RUNNING() + REASON_SECONDS)
            raise ProcessFailed(self._failures(), self._restarts)

    def _failures(self) -> list[ProcessEnd]:
        return [each.end for each in self._members if each.end and each.end.status != 0]

    def _take(self, until: Callable[[], bool], end: float | None) -> None:
        ray = self._ray
        while not until():
            left = None if end is None else end - RUNNING()
            if left is not None and left <= 0:
                return
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=left)
            for each in done:
                member, field = self._calls.pop(each)
                try:
                    answer = ray.get(each)
                    # a server that was never ready has failed, also where it ends with 0
                    if field != "end" or member.end is None or answer.status:
                        setattr(member, field, answer)
                except FileNotFoundError as error:  # of the script
                    raise getattr(error, "cause", error) from None
                except ray.exceptions.RayError as error:
                    member.fail(error)

    def _end(self) -> None:
        """Ends every process and every actor, and returns when they are gone."""
        ray = self._ray
        try:
            there = [each for each in self._members if each.place and not each.lost]
            if stops := [each.actor.stop.remote() for each in there]:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
        finally:
            for each in self._members:
                with suppress(ray.exceptions.RayError):
                    if each.actor is not None:
                        ray.kill(each.actor)


# ---- job ----


@dataclass(frozen=True)
class Result:
    """A job that has ended well: every process with status 0.

    Attributes:
        values: the return value of each trainer's function; None for each script.
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
) -> Result:
    """Runs a job on the Ray cluster that this process is connected to, until it has ended.

    Where it is not connected, it calls ``ray.init()``.  Ray shows the output of all processes in
    the driver, as ``(trainer 0 pid=4711) loss 0.03``.  However the job ends, no process, actor or
    placement group of it is left.

    Example::

        import pserver.ray

        pserver.ray.run("train.py", servers=2, trainers=4, trainer_resources={"GPU": 1})

    Args:
        target: the path of a script, which each trainer runs in a process; or a function, which
            each trainer calls in its actor's process.  Ray pickles the function: it may be of the
            driver's own script.
        servers, trainers: how many of each, 1 or more.
        arguments: of the script (texts), or of the function.
        server_resources, trainer_resources: reserved by Ray for each of them: "CPU", "GPU",
            "memory" in bytes, or resources of the cluster's own; one CPU by default.  A process has
            as many threads as CPUs.
        max_restarts: how often the whole job is started again after a process has failed, or is
            lost with its node.  The script resumes from its checkpoint, by ``fleet.load``.
        environment: variables of all processes, as PSERVER_TRANSPORT or PSERVER_KEYS.
        server_flags: of ``pserver serve``, as ``("--data-dir", "/shared/job")``.
        strategy: of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        start_timeout: seconds for the cluster to have the resources, and then for the actors and
            servers of each attempt to be there.

    Returns:
        The values of the functions, and how often the job was started again.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: an argument is wrong; one sentence.
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
        arguments,
        {"server": _bundle(server_resources), "trainer": _bundle(trainer_resources)},
        max_restarts,
        environment or {},
        server_flags,
        strategy,
        start_timeout,
    )
    ray = ray_library()
    if not ray.is_initialized():
        ray.init()
    with placed(request) as group:
        for restarts in range(max_restarts + 1):
            wait_for(group, request)
            try:
                return Result(Attempt(request, group, restarts).run(), restarts)
            except ProcessFailed as failed:
                if restarts == max_restarts:
                    raise
                cause = failed.failures[0]
                log.warning(
                    "%s; the job starts again (%d of %d)", cause, restarts + 1, max_restarts
                )
    raise AssertionError("the last attempt returns or raises")


def _bundle(resources: Mapping[str, float] | None) -> dict[str, float]:
    """One CPU unless the user says otherwise, and nothing with the amount 0, which Ray refuses."""
    return {name: amount for name, amount in {"CPU": 1, **(resources or {})}.items() if amount}
