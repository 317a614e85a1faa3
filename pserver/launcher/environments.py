"""The environment variables of the processes of a launch: they tell a script its role."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pserver.config import split_endpoint
from pserver.launcher.cluster import Cluster
from pserver.launcher.free_port import free_port

SERVER_ROLE_VARIABLES = (
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


class ProcessEnvironments:
    """What each process of this host finds in its environment.

    Args:
        cluster: what is started.
        inherits: the variables that every process gets besides its own.
    """

    def __init__(self, cluster: Cluster, inherits: Mapping[str, str]) -> None:
        self._cluster, self._inherits = cluster, inherits

    def of(self, kind: str, number: int) -> dict[str, str]:
        """The variables of a process, without those of its role.

        Args:
            kind: "server" or "trainer".
        """
        return {**self._inherited(), **self._threads(), **self._labels(kind, number)}

    def trainer_roles(self, endpoints: Sequence[str]) -> dict[int, dict[str, str]]:
        """By trainer of this host, the variables of its role where there are servers.

        Args:
            endpoints: of all servers.
        """
        cluster = self._cluster
        local, fewer = cluster.host is None, bool(cluster.least_trainers)
        return {
            number: {
                "TRAINING_ROLE": "TRAINER",
                "PSERVER_ENDPOINTS": ",".join(endpoints),
                "TRAINERS": str(len(cluster.trainers)),
                "TRAINER_ID": str(number),
                **({} if local or fewer else {"CURRENT_ENDPOINT": cluster.trainers[number]}),
                **({} if cluster.transport is None else {"PSERVER_TRANSPORT": cluster.transport}),
            }
            for number in cluster.trainers_here
        }

    def collective_roles(self) -> dict[int, dict[str, str]]:
        """By trainer, torchrun's variables.

        Trainers of one host see the same GPUs and take theirs by LOCAL_RANK.
        """
        cluster = self._cluster
        local = cluster.host is None
        host, port = ("127.0.0.1", free_port()) if local else split_endpoint(cluster.trainers[0])
        here = cluster.trainers_here
        shared = {
            "TRAINING_ROLE": "TRAINER",
            **{"WORLD_SIZE": str(len(cluster.trainers)), "LOCAL_WORLD_SIZE": str(len(here))},
            **{"MASTER_ADDR": host, "MASTER_PORT": str(port)},
            **(
                {}
                if cluster.devices is None
                else {"CUDA_VISIBLE_DEVICES": ",".join(cluster.devices)}
            ),
        }
        if local and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in self._inherits:
            # this host's name need not resolve to an address of this host
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        return {
            number: {**shared, "RANK": str(number), "LOCAL_RANK": str(index)}
            for index, number in enumerate(here)
        }

    def _inherited(self) -> Mapping[str, str]:
        """The variables that every process inherits: in the collective mode without those of the
        other role.
        """
        if not self._cluster.collective:
            return self._inherits
        return {
            name: value
            for name, value in self._inherits.items()
            if name not in SERVER_ROLE_VARIABLES
        }

    def _threads(self) -> dict[str, str]:
        """How many threads a process may use: its share of the cores, or what the user has set."""
        if "OMP_NUM_THREADS" in self._inherits:
            return {}
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        servers = self._cluster.here(self._cluster.servers)
        processes = len(servers) + len(self._cluster.trainers_here)
        count = str(max(1, cores // processes))
        return {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": self._inherits.get("MKL_NUM_THREADS", count),
        }

    def _labels(self, kind: str, number: int) -> dict[str, str]:
        """The job's name, and where a process serves its metrics, if it does."""
        cluster = self._cluster
        if cluster.collective:
            return {}
        name = cluster.job or self._inherits.get("PSERVER_JOB", "") or cluster.script_name
        place = cluster.metrics_at(kind, number)
        return {"PSERVER_JOB": name, **({"PSERVER_METRICS": place} if place else {})}
