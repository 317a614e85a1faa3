"""The placement group of a job: a bundle of resources for each of its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pserver.ray.installed import ray_library
from pserver.ray.request import JobRequest
from pserver.running_clock import RUNNING

WAKE_SECONDS = 1.0  # Ctrl-C is not seen while Ray waits


@contextmanager
def placed(request: JobRequest) -> Iterator[Any]:
    """A group with the resources of every process, servers first; removed at the end.

    Raises:
        TimeoutError: the cluster has not had the resources within ``start_timeout``; the message
            says what was asked for, and what the cluster has.
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
    """What Ray is told of an actor: all of its bundle, and no restart by itself.

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
        "max_concurrency": 4,  # news, while it is told to start or to stop
        "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    }


def _needed(request: JobRequest, kind: str) -> dict[str, float]:
    """Ray refuses a bundle with 0 of something."""
    return {name: amount for name, amount in request.resources(kind).items() if amount}


def _asked(request: JobRequest) -> str:
    counts = Counter(kind for kind, _ in request.processes())
    return " and ".join(
        f"{count} {kind}{'s' if count > 1 else ''} with {_amounts(request.resources(kind))} each"
        for kind, count in counts.items()
    )


def _amounts(resources: Mapping[str, float]) -> str:
    """Without the resources that stand for nodes, groups, and Ray's own store."""
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
